"""Data sets that a foreign configuration names -> the recipe's data section, and how many rows they have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.foreign import is_path, open_plain
from pipeline.foreign_configs.mapping import Draft, NotTakenError, names, number, text

TABLES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")


@dataclass
class Source:
    """One data set: keys of a source of the recipe, and how many rows it has, where that is known."""

    keys: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None


def count_rows(path: Path) -> int | None:
    """Lines of a JSONL file that hold something; None: the file is none."""
    if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
        return None
    with open(open_plain(path), "rb") as file:
        return sum(1 for line in file if line.strip())


def entries_of(draft: Draft, key: str) -> list[dict[str, Any]]:
    """The data sets of a list of them, each with a path.

    Raises:
        ConfigError: it is none.
    """
    given = draft.given(key) or []
    given = given if isinstance(given, list) else [given]
    entries = [{"path": each} if isinstance(each, str) else each for each in given]
    if not all(isinstance(each, dict) and isinstance(each.get("path"), str) for each in entries):
        raise ConfigError(f"{draft.file.at(key)}: expected a list of data sets, each with its path")
    return entries


def find_source(
    draft: Draft, name: str, files: Any = None, subset: Any = None, split: Any = None, key: str = "datasets"
) -> Source:
    """By what `datasets.load_dataset` is given: a name on the hub or a path, files, configuration, split."""
    given = draft.converted(key, names, files) if files else []
    if not given and (is_path(name) or Path(name).suffix in (*TABLES, ".json") or draft.found(name)):
        given = [name]
    if not given:
        keys: dict[str, Any] = {"dataset": name}
        keys |= {"subset": draft.converted(key, text, subset)} if subset else {}
        keys |= {"split": draft.converted(key, text, split)} if split and split != "train" else {}
        return Source(keys)
    if name not in (*given, "json", "csv", "parquet", "text", "arrow") and not is_path(name):
        draft.fill_in.append(f"data.paths: the files {', '.join(given)} of {name}, on this machine")
    if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
        return Source({"dataset": name})
    paths = [draft.found(each) or Path(each) for each in given]
    for path in paths:
        if path.suffix == ".json":
            draft.fill_in.append(f"data.paths: {path} as .jsonl, one row a line: `jq -c '.[]' {path}`")
        elif not path.exists():
            draft.fill_in.append(f"data.paths: {path} is not there")
    if split and split != "train":
        draft.fill_in.append(f"data.paths: all of {', '.join(given)} is read; {key} has split {split}")
    found = [count_rows(path) for path in paths]
    rows = sum(each for each in found if each is not None) if None not in found else None
    return Source({"paths": [str(path) for path in paths]}, rows)


def put_sources(draft: Draft, kind: str, sources: list[Source], limit: int | None = None) -> None:
    """The data section's origin; `limit`: rows of each source at the most."""
    draft.put("data.kind", kind)
    if not sources:
        sources = [Source({"paths": ["FILL-IN.jsonl"]})]
        draft.fill_in.append("data.paths: the files to learn from; theirs names none")
    for source in sources:
        if limit is not None:
            source.keys["max_documents"] = limit
            source.rows = min(limit, source.rows or limit)
    if all(set(source.keys) == {"paths"} for source in sources):
        draft.put("data.paths", [path for source in sources for path in source.keys["paths"]])
    elif len(sources) == 1 and set(sources[0].keys) == {"paths", "text_field"}:
        for key, value in sources[0].keys.items():
            draft.put(f"data.{key}", value)
    else:
        draft.put("data.sources", [source.keys for source in sources])
    found = [source.rows for source in sources]
    draft.rows = None if None in found else sum(each for each in found if each is not None)
    if limit is not None:
        draft.remarks["data.sources"] = f"{limit} rows of each at the most"


def put_eval_sets(draft: Draft, sources: dict[str, Source]) -> None:
    """Further sets to evaluate on."""
    if sources:
        draft.put("data.eval_sets", {source_name(name): each.keys for name, each in sources.items()})


def source_name(name: str) -> str:
    """What a source can be called."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name).lstrip("-_.") or "eval"


def held_out(draft: Draft, key: str) -> bool:
    """Puts the share that is held out, and whether there is one."""
    value = draft.given(key, number) or 0.0
    if value >= 1:
        if draft.rows is None:
            draft.drop(key, "a number of rows; write their share as data.eval_fraction")
        value = 0.0 if draft.rows is None else min(0.99, round(value / draft.rows, 6))
    draft.put("data.eval_fraction", float(value))
    return bool(value) or "data.eval_sets" in draft.recipe


OWN_TEMPLATES = (
    "bailing", "cohere", "command", "deepseek", "exaone", "falcon", "gemma", "glm", "gpt_oss", "granite",
    "hunyuan", "intern", "jamba", "kimi", "lfm", "llama", "mimo", "minimax", "ministral", "mistral",
    "nemotron", "olmo", "phi", "qwen", "smollm", "tokenizer_default", "yi",
)  # fmt: skip


def chat_template(value: Any) -> str | None:
    """The recipe's, for the name of another trainer's; None: the one that the model's tokenizer brings."""
    name = text(value)
    if name == "chatml" or name.endswith((".jinja", ".j2")):
        return name
    if name.startswith(OWN_TEMPLATES):
        return None
    raise NotTakenError(
        f"{name[:40]!r} is not built in: the tokenizer's own counts, or a Jinja file (data.chat_template)"
    )


def put_template(draft: Draft, key: str) -> None:
    """The chat template, where it is another than the tokenizer's own."""
    given = draft.given(key)
    try:
        found = None if given is None else draft.converted(key, chat_template, given)
    except NotTakenError as reason:
        draft.drop(key, str(reason))
        return
    if found is not None:
        draft.put("data.chat_template", found)
    elif given is not None:
        draft.remarks["data.kind"] = f"{key} {given}: the template that the model's tokenizer brings"


def put_preferences(draft: Draft, length: int) -> None:
    """What all preference data have: an example lies whole in a sequence, and is a sample by itself."""
    draft.put("data.sequence_length", 2 * length, f"two answers, each of {length} tokens with its prompt")
    draft.put("data.answer_length", length)
    draft.put("data.packing", "none", "a sample is an example, as there")
