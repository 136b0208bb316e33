"""Data sets of a foreign configuration -> the recipe's data section, and templates that write their rows.

The templates are Jinja, and give another trainer's own text (`data.layout: row`), token by token. A literal
is written as a Jinja string, so that no block trims the white space around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.cli.import_configs.mapping import FILL_IN, Draft, Section, names, text
from pipeline.files import is_path

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


TEMPLATE = "template.jinja"
DIVIDE = "{{ divide }}"
PLACEHOLDER = re.compile(r"\{(\w*)\}")


def literal(text: str) -> str:
    """Return Jinja that writes a text as it is."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def column(name: str) -> str:
    """Return the Jinja expression of a field of the row."""
    return f"row[{json.dumps(name, ensure_ascii=False)}]"


def require(expression: str) -> str:
    """Return Jinja that refuses a row in which a field is missing, which would be written as nothing."""
    return choose(f"{expression} is not defined", refusal(f"the row has no {expression}"))


def filled(form: str, expressions: Mapping[str, str]) -> str:
    """Return Jinja for a text with `{name}` in it, each replaced by what its expression gives.

    Raises:
        KeyError: A name has no expression, or a brace is doubled.
    """
    if "{{" in form or "}}" in form:
        raise KeyError("{")
    pieces = PLACEHOLDER.split(form)
    return "".join(
        "{{ " + expressions[piece] + " }}" if at % 2 else literal(piece) for at, piece in enumerate(pieces)
    )


def choose(condition: str, yes: str, no: str = "") -> str:
    """Return Jinja that writes one or the other."""
    return f"{{% if {condition} %}}{yes}{f'{{% else %}}{no}' if no else ''}{{% endif %}}"


def refusal(why: str) -> str:
    """Return Jinja that refuses the row."""
    return f"{{{{ raise_exception({json.dumps(why)}) }}}}"


def learned(body: str) -> str:
    """Return Jinja whose text counts in the loss."""
    return f"{{% generation %}}{body}{{% endgeneration %}}"


def with_tokens(expression: str) -> str:
    """Return Jinja that writes what a row says, special tokens in it as tokens."""
    return f"{{{{ {expression}.replace('\\ud800', '').replace('\\ud801', '') }}}}"


def of_row(body: str) -> str:
    """Return the template of a row that is written at once."""
    return f"{{% for turn in messages %}}{{% set row = turn.row %}}{body}{{% endfor %}}"


def of_answers(prompt: str, answer: str) -> str:
    """Return the template of a prompt and a judged answer; `turn.content` is the answer's side."""
    return of_row(choose("turn.role == 'user'", prompt, learned(answer)))


def put_row_template(draft: Draft, template: str, told: str) -> None:
    """Write the template beside the recipe, and let it read the rows."""
    path = draft.folder.absolute() / TEMPLATE
    draft.files[path] = template + "\n"
    draft.put("data.layout", "row", told)
    draft.put("data.chat_template", str(path))
    draft.put("data.append_eos", False)
