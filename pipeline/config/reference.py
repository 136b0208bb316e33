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
from typing import Any

from pipeline.config import deepspeed_keys as keys
from pipeline.config.data_schema import SOURCE_NAME
from pipeline.config.model_schema import IMPORT_PATH
from pipeline.config.schema import RUN_NAME, RunConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

Schema = dict[str, Any]
"""JSON Schema, as pydantic writes it for the recipe."""

# In words; a pattern that is not here is explained by its field.
PATTERNS = {IMPORT_PATH: "an import path"} | dict.fromkeys(
    (RUN_NAME, SOURCE_NAME), "letters, digits, `_`, `.`, `-`"
)
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {"interval": "steps or epochs", "steps or share": "steps or a share of the run"}
TYPES |= {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false"}

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
    recipe = RunConfig.model_json_schema()
    defined = recipe["$defs"]
    top = {name: field for name, field in recipe["properties"].items() if not _sections(field)}
    parts = [INTRODUCTION, "## The run\n", _table("", recipe | {"properties": top}, defined)]
    for name, field in recipe["properties"].items():
        members = [defined[section] for section in _sections(field)]
        if not members:
            continue
        parts.append(f"## {name}\n")
        for section in members:
            if len(members) > 1:
                parts.append(f"### {_kind(section)}\n")
            parts += [_paragraph(section["description"]), _table(f"{name}.", section, defined)]
        for item, holders in _items(name, members).items():
            parts.append(f"### Each of {' and '.join(f'`{holder}`' for holder in holders)}\n")
            parts += [_paragraph(defined[item]["description"]), _table("", defined[item], defined)]
    return "\n".join([*parts, *_deepspeed()])


def _deepspeed() -> Iterator[str]:
    kinds = ", ".join(f"`{theirs}` means `{ours}`" for theirs, ours in keys.SCHEDULES.items())
    optimizers = ", ".join(f"`{theirs}` means `{ours}`" for theirs, ours in keys.OPTIMIZERS.items())
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
        "bucket sizes by the width of the model or its number of parameters, `overlap_comm` where gradients "
        'are reduced over several ranks; an `"auto"` that nothing fills is an error. Stages 1 and 2 '
        "have `parameter_alignment` unless the file says `false`. Keys that people write for each other "
        "(`_comment`, `//`, `comment`, `$schema`) and sections that are switched off (`enabled: false`) are "
        "passed over, with a line."
    )
    yield "This trainer's own:\n"
    yield _rows(("key", "meaning"), [(f"`{key}`", text) for key, text in keys.OWN_MEANINGS.items()])
    yield _paragraph(
        'These numbers are the recipe\'s. The JSON says `"auto"` or nothing; a file brought from elsewhere '
        "may state one where the recipe does not. Two different values for one number are an error that "
        "quotes both. Without `--config` nobody chose the recipe: the JSON's numbers then replace those of "
        "the default recipe."
    )
    yield _rows(("in the JSON", "in the recipe"), [(f"`{theirs}`", f"`{ours}`") for theirs, ours in owned])
    yield _paragraph(
        "The JSON's `optimizer.type` (in any case) decides the recipe's `optimizer.kind`: "
        f"{optimizers}. Its `scheduler.type` decides `schedule.kind`: {kinds}. "
        "`WarmupDecayLR` ends at 0 and `WarmupCosineLR` at 0.0001 of the peak, as DeepSpeed's do. "
        "The warm-up is linear here; DeepSpeed's follows a logarithm "
        "unless `warmup_type` is `linear`, and a line says so. Any other parameter of `optimizer` and "
        "`scheduler` is refused, unless it says what is done here anyway."
    )
    yield "Taken, with a line, and read by nobody:\n"
    yield _rows(("key", "why"), [(f"`{key}`", text) for key, text in keys.IGNORED.items()])
    yield "Refused, with what to use instead, unless switched off:\n"
    yield _rows(("key", "instead"), [(f"`{key}`", text) for key, text in keys.NOT_HERE.items()])
    yield "No longer in DeepSpeed:\n"
    yield _rows(("key", "instead"), [(f"`{key}`", text) for key, text in keys.REMOVED.items()])


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False) + "\n"


def _sections(field: Schema) -> list[str]:
    """The section a field holds, or the alternatives where its `kind` chooses one; empty for a value."""
    return [
        each["$ref"].rpartition("/")[2] for each in field.get("oneOf", _alternatives(field)) if "$ref" in each
    ]


def _alternatives(field: Schema) -> list[Schema]:
    """What a value may be besides null."""
    return [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]


def _items(name: str, members: list[Schema]) -> dict[str, dict[str, None]]:
    """Sections within lists and mappings of a section, with the keys that hold them."""
    found: dict[str, dict[str, None]] = {}
    for section in members:
        for key, field in section["properties"].items():
            for each in _alternatives(field):
                held = [each.get("items", {}), *each.get("patternProperties", {}).values()]
                for item in (item for inner in held for item in _sections(inner)):
                    found.setdefault(item, {})[f"{name}.{key}"] = None
    return found


def _kind(section: Schema) -> str:
    return f"kind: {section['properties']['kind'].get('const', 'package.module:function')}"


def _table(prefix: str, section: Schema, defined: Schema) -> str:
    return _rows(("key", "type", "default", "range", "meaning"), list(_field_rows(prefix, section, defined)))


def _field_rows(prefix: str, section: Schema, defined: Schema) -> Iterator[tuple[str, ...]]:
    fields = section["properties"].items()
    for name, field in sorted(fields, key=lambda item: item[0] != "kind"):  # what chooses stands first
        if inner := _sections(field):
            yield from _field_rows(f"{prefix}{name}.", defined[inner[0]], defined)
            continue
        meaning = " ".join(field.get("description", "What this section describes.").split())
        # A kind is looked at before its section is made, so its default never counts.
        default = "required" if name == "kind" and prefix in ("model.", "data.") else _default(field)
        yield f"`{prefix}{name}`", _type(field), default, ", ".join(_range(field)), meaning


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _type(field: Schema) -> str:
    return " or ".join(map(_type_of, _alternatives(field)))


def _type_of(value: Schema) -> str:
    if "const" in value or "enum" in value:
        return ", ".join(f"`{word}`" for word in value.get("enum", [value.get("const")]))
    if "prefixItems" in value:
        return f"list of {len(value['prefixItems'])} x {_type(value['prefixItems'][0])}"
    if "items" in value:
        return f"list of {_type(value['items'])}"
    if "$ref" in value:
        return "sections"
    if value["type"] == "object":
        return "sections by name" if "patternProperties" in value else "keys and values"
    return TYPES[value["type"]]


def _default(field: Schema) -> str:
    if "default" not in field:
        return "required"
    if field["default"] is None:
        return "none"
    return f"`{json.dumps(field['default'])}`".replace('"', "")


def _range(field: Schema) -> Iterator[str]:
    """The limits of a number, the length of a list, the pattern of a text."""
    for value in _alternatives(field):
        yield from (f"{sign} {value[name]:,}" for name, sign in LIMITS.items() if name in value)
        if "minItems" in value and "prefixItems" not in value:
            yield f"at least {value['minItems']}"
        patterns = [value.get("pattern"), *value.get("patternProperties", ())]
        yield from (PATTERNS[pattern] for pattern in patterns if pattern in PATTERNS)
        if item := value.get("prefixItems", [value.get("items")])[0]:  # they are all alike
            yield from _range(item)


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
