"""Data sets that a foreign configuration names -> the recipe's data section."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.files import is_path
from pipeline.foreign_configs.mapping import FILL_IN, Draft, Section, names, text

TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")
LOADERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in place of a name
Source = dict[str, Any]  # keys of a source of the recipe


def find_source(draft: Draft, entry: Section) -> Source:
    """Return the source that `datasets.load_dataset` would read: a hub name or a path, with its files."""
    name, subset = entry.given("path", text), entry.given("name", text)
    split, files = entry.given("split", text), entry.given("data_files", names) or []
    if not name:
        raise entry.refused("path", "expected the path or the name of a data set")
    if not files and (is_path(name) or Path(name).suffix in TABLES or draft.found(name)):
        files = [name]
    revision = entry.given("revision", text)
    if not files:
        given = {"dataset": name, "subset": subset, "split": split, "revision": revision}
        return {key: value for key, value in given.items() if value and value != "train"}
    if name not in (*files, *LOADERS) and not is_path(name):
        draft.fill_in.append(f"data.paths: the files {', '.join(files)} of {name}, on this machine")
    if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
        return {"dataset": str(Path(name).absolute())}
    for key, value in (("split", split), ("name", subset)):
        if value and value != "train":
            entry.drop(key, f"all of {', '.join(files)} is read")
    return {"paths": [str(local(draft, each)) for each in files]}


def local(draft: Draft, name: str | Path) -> Path:
    """Return where a file is; one that is not there is left to the user."""
    found = draft.found(str(name))
    if found is None:
        draft.fill_in.append(f"data.paths: {name} is not there")
    return found or Path(name)


def put_sources(draft: Draft, kind: str, sources: list[Source]) -> None:
    """Put the kind of data and where they come from."""
    draft.put("data.kind", kind)
    if not sources:
        sources = [{"paths": [f"{FILL_IN}.jsonl"]}]
        draft.fill_in.append("data.paths: the files to learn from; theirs names none")
    if all(set(source) == {"paths"} for source in sources):
        draft.put("data.paths", [path for source in sources for path in source["paths"]])
    else:
        draft.put("data.sources", sources)


def put_eval_sets(draft: Draft, sources: dict[str, Source]) -> None:
    """Put further sets to evaluate on."""
    if sources:
        draft.put("data.eval_sets", {source_name(name): each for name, each in sources.items()})


def source_name(name: str) -> str:
    """Return what a source can be called."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name).lstrip("-_.") or "eval"


def held_out(draft: Draft, key: str, value: float | None) -> bool:
    """Put the share that is held out, and return whether anything is."""
    share = value or 0.0
    if share >= 1:
        draft.drop(key, "a number of rows; write their share as data.eval_fraction")
    draft.put("data.eval_fraction", float(share) if share < 1 else 0.0)
    return 0 < share < 1 or "data.eval_sets" in draft.recipe


def rows_of(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON files that are at hand, up to the first that is none."""
    for path in map(Path, source.get("paths", [])):
        try:
            with path.open(encoding="utf-8") as file:
                lines = map(json.loads, filter(str.strip, file))
                rows = json.load(file) if path.suffix == ".json" else lines
                yield from (row for row in rows if isinstance(row, dict))
        except (OSError, ValueError, RecursionError, TypeError):
            return


def put_preferences(draft: Draft, length: int) -> None:
    """Put what all preference data have: an example is a sample, whole in a sequence."""
    draft.put("data.sequence_length", 2 * length, f"two answers, each of {length} tokens with its prompt")
    draft.put("data.answer_length", length)
    draft.put("data.packing", "none", "a sample is an example, as there")


def tell_of_long_rows(draft: Draft, key: str, theirs: str = "cut off") -> None:
    """Name what happens to rows that are longer than a sequence."""
    draft.not_taken[f"{key} of longer rows"] = f"a row that does not fit is left out here, and {theirs} there"
