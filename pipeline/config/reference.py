"""Writes docs/configuration.md from the schema: python -m pipeline.config.reference > docs/configuration.md

With --check it writes nothing and fails where the file is not what the schema gives.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.config import deepspeed_keys as keys
from pipeline.config.data_schema import SOURCE_NAME
from pipeline.config.model_schema import IMPORT_PATH
from pipeline.config.recipe import sections_in
from pipeline.config.schema import RUN_NAME, RunConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

# In words; a pattern that is not here is explained by its field.
PATTERNS = {IMPORT_PATH: "an import path"} | dict.fromkeys(
    (RUN_NAME, SOURCE_NAME), "letters, digits, `_`, `.`, `-`"
)

INTRODUCTION = """\
# Configuration

*Written by `python -m pipeline.config.reference` from `pipeline/config/schema.py`; a test compares the two.*

A run is described by two files. The **recipe** (YAML, `--config`) says what is trained; its keys are below.
The **DeepSpeed JSON** (`--deepspeed`, see `ds_configs/`) says how the work is split and in which precision.
`--dry-run` prints both with everything filled in and starts nothing.

Both can be changed on the command line, after the options. Values are read as YAML:

```
deepspeed launch/train.py --deepspeed ds_configs/zero2.json model.num_layers=4 'data.paths=[notes, "*.md"]'
deepspeed launch/train.py --deepspeed ds_configs/zero2.json ds.zero_optimization.stage=3
```

A key that begins with `ds.` changes the DeepSpeed JSON, any other the recipe. The command line goes before
the file, the file before the default. In both files an unknown key is an error with file, line and the
nearest key, or `command line`; so is a key given twice, a value out of its range, and a number of absurd
size. Two keys that cannot stand together are told before anything is loaded.
"""


def document() -> str:
    """The whole of docs/configuration.md."""
    top = {name: field for name, field in RunConfig.model_fields.items() if not _sections(field.annotation)}
    parts = [INTRODUCTION, "## The run\n", _table("", top)]
    for name, field in RunConfig.model_fields.items():
        members = _sections(field.annotation)
        if not members:
            continue
        parts.append(f"## {name}\n")
        for section in members:
            if len(members) > 1:
                parts.append(f"### {_kind(section)}\n")
            parts += [
                _paragraph(" ".join((section.__doc__ or "").split())),
                _table(f"{name}.", section.model_fields),
            ]
        for item, holders in _items(name, members).items():
            parts.append(f"### Each of {' and '.join(f'`{holder}`' for holder in holders)}\n")
            parts += [_paragraph(" ".join((item.__doc__ or "").split())), _table("", item.model_fields)]
    return "\n".join([*parts, *_deepspeed()])


def _deepspeed() -> Iterator[str]:
    kinds = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in keys.SCHEDULES.items())
    optimizers = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in keys.OPTIMIZERS.items())
    types = [("optimizer.type", "optimizer.kind"), ("scheduler.type", "schedule.kind")]
    owned = [*keys.RECIPE_OWNS.items(), *types]
    yield "## The DeepSpeed JSON\n"
    yield _paragraph(
        "DeepSpeed's own keys, and three more. Every key of every section is checked before anything "
        "starts, with its value, against what DeepSpeed takes (`pipeline/config/deepspeed_schema.json`, "
        "written by `python -m pipeline.engine.deepspeed_schema`; a test compares the two). An error names "
        "the file, the line, the key, and the nearest one where one is near. What DeepSpeed calls by other "
        "names too (`max_live_parameters`, `cpu_offload`, `bfloat16`) may be called so here. Only what is "
        "below `optimizer` and `scheduler` is the recipe's and has a table of its own."
    )
    yield _paragraph(
        '`null` is the same as leaving a key out. `"auto"` is filled in here: the batch numbers from the '
        "recipe, `bf16.enabled` and `fp16.enabled` by what the device computes in (bf16 before fp16), ZeRO's "
        'bucket sizes by the width of the model; an `"auto"` that nothing fills is an error. Keys that '
        "people write for each other (`_comment`, `//`, `comment`, `$schema`) and sections that are switched "
        "off (`enabled: false`) are passed over, with a line."
    )
    yield "This trainer's own:\n"
    yield _rows(("key", "meaning"), [(f"`{key}`", text) for key, text in keys.OWN_MEANINGS.items()])
    yield _paragraph(
        'These numbers are the recipe\'s. The JSON says `"auto"` or nothing; a file brought from elsewhere '
        "may state one where the recipe does not. Two different values for one number are an error."
    )
    yield _rows(("in the JSON", "in the recipe"), [(f"`{theirs}`", f"`{ours}`") for theirs, ours in owned])
    yield _paragraph(
        f"As `optimizer.kind`, {optimizers} (in any case); as `schedule.kind`, {kinds}. Any other parameter "
        "of `optimizer` and `scheduler` is refused, unless it says what is done here anyway."
    )
    yield "Taken, with a line, and read by nobody:\n"
    yield _rows(("key", "why"), [(f"`{key}`", text) for key, text in keys.IGNORED.items()])
    yield "Refused, with what to use instead, unless switched off:\n"
    yield _rows(("key", "instead"), [(f"`{key}`", text) for key, text in keys.NOT_HERE.items()])
    yield "No longer in DeepSpeed:\n"
    yield _rows(("key", "instead"), [(f"`{key}`", text) for key, text in keys.REMOVED.items()])


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The section a field holds, or the alternatives where its `kind` chooses one; empty for a value."""
    section, _, members = sections_in(annotation)
    return [section] if section is not None else list(members.values())


def _item(annotation: Any) -> type[BaseModel] | None:
    """The section that a list's items or a mapping's values are."""
    _, inside, _ = sections_in(annotation)
    return sections_in(inside)[0]


def _items(name: str, members: list[type[BaseModel]]) -> dict[type[BaseModel], list[str]]:
    """Sections within lists and mappings of a section, with the keys that hold them."""
    found: dict[type[BaseModel], dict[str, None]] = {}
    for section in members:
        for key, field in section.model_fields.items():
            if not _sections(field.annotation) and (item := _item(field.annotation)) is not None:
                found.setdefault(item, {})[f"{name}.{key}"] = None
    return {item: list(holders) for item, holders in found.items()}


def _kind(section: type[BaseModel]) -> str:
    values = get_args(section.model_fields["kind"].annotation)
    return f"kind: {values[0]}" if values else "kind: package.module:function"


def _table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    return _rows(("key", "type", "default", "range", "meaning"), list(_field_rows(prefix, fields)))


def _field_rows(prefix: str, fields: dict[str, FieldInfo]) -> Iterator[tuple[str, ...]]:
    for name, field in sorted(
        fields.items(), key=lambda item: item[0] != "kind"
    ):  # what chooses stands first
        inner = _sections(field.annotation)
        if inner:
            yield from _field_rows(f"{prefix}{name}.", inner[0].model_fields)
            continue
        meaning = " ".join((field.description or "What this section describes.").split())
        # A kind is looked at before its section is made, so its default never counts.
        default = "required" if name == "kind" and prefix in ("model.", "data.") else _default(field)
        yield f"`{prefix}{name}`", _type(field.annotation), default, _range(field), meaning


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "sections"
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(each) for each in arguments if each is not NoneType)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} x {_type(arguments[0])}"
    if origin is dict:
        return "sections by name" if _item(annotation) is not None else "keys and values"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true, false"}[
        annotation.__name__
    ]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    return f"`{json.dumps(field.default)}`".replace('"', "")


def _range(field: FieldInfo) -> str:
    """The limits of a number, the length of a list, the pattern of a text."""
    limits = []
    for rule in [*field.metadata, *_item_rules(field.annotation)]:
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
            if (limit := getattr(rule, name, None)) is not None:
                limits.append(f"{sign} {limit:,}")
        if (length := getattr(rule, "min_length", None)) is not None:
            limits.append(f"at least {length}")
        limits += [PATTERNS[p] for p in (getattr(rule, "pattern", None),) if p in PATTERNS]
    return ", ".join(limits)


def _item_rules(annotation: Any) -> list[Any]:
    """The rules for the items of a list, which are all alike."""
    for each in get_args(annotation):
        if get_origin(each) is Annotated:
            return [rule for item in each.__metadata__ for rule in item.metadata]
        if rules := _item_rules(each):
            return rules
    return []


def main() -> int:
    """Prints the document, or compares it with the file."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.config.reference", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail where docs/configuration.md is out of date"
    )
    if not parser.parse_args().check:
        print(document(), end="")
        return 0
    if DOCUMENT.read_text(encoding="utf-8") == document():
        return 0
    print(f"{DOCUMENT} is out of date: python -m pipeline.config.reference > {DOCUMENT}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
