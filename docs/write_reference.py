"""Writes the tables of docs/reference/ from the code: `python docs/write_reference.py`.

configuration.md has the keys of the recipe, cli.md the commands, metrics-and-alerts.md the columns of
metrics.jsonl and the alerts, imported-keys.md the keys of other trainers, and splits.md what combines. Other
text is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.__main__ import COMMANDS
from pipeline.cli import train
from pipeline.cli.import_configs import training_arguments
from pipeline.cli.import_configs.conversions import KeyMapping
from pipeline.cli.import_configs.unmapped_keys import NO_EFFECT, NO_EXACT_COUNTERPART
from pipeline.cli.import_configs.writing import TOOLS
from pipeline.config import deepspeed_keys as keys
from pipeline.config.data_schema import SOURCE_NAME
from pipeline.config.features import format_features_table
from pipeline.config.model_schema import IMPORT_PATH
from pipeline.config.schema import RUN_NAME, RunConfig
from pipeline.config.split_conflicts import format_rules_table
from pipeline.monitoring import columns
from pipeline.monitoring.alerts.rules import ALERTS

REFERENCE = Path(__file__).with_name("reference")
PAGES = ("configuration.md", "cli.md", "metrics-and-alerts.md", "imported-keys.md", "splits.md")
IMPORT_TABLES = {
    "training arguments": "trainer",
    "llama factory": "llama-factory",
    "axolotl": "axolotl",
    "trl": "trl-sft",
    "accelerate": "accelerate",
}
"""Marker in imported-keys.md -> key of TOOLS; all of TRL's trainers have one table."""

Schema = dict[str, Any]
"""JSON Schema, as pydantic writes it for the recipe."""

# Pattern of a text -> description in the column "range". The docstring of a field explains other patterns.
PATTERNS = {IMPORT_PATH: "an import path"} | dict.fromkeys(
    (RUN_NAME, SOURCE_NAME), "letters, digits, `_`, `.`, `-`"
)
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {"interval": "steps or epochs", "steps or share": "steps or a share of the run"}
TYPES |= {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false"}


def build_documents() -> dict[Path, str]:
    """Return path -> text of each page, with new tables between its markers."""
    tables = {
        "recipe": "\n".join(_format_recipe()),
        "adopted": _format_pairs("in the recipe", {key: f"`{name}`" for key, name in keys.ADOPTED.items()}),
        "ignored": _format_pairs("why", keys.IGNORED),
        "refused": _format_pairs("instead", keys.UNSUPPORTED),
        "commands": "\n".join(_format_commands()),
        "training": _format_columns(columns.TRAINING),
        "objectives": _format_columns(columns.OBJECTIVE_METRICS),
        "evaluation": _format_columns(columns.EVALUATION),
        "performance": _format_columns(columns.PERFORMANCE),
        "time": _format_columns(columns.TIME),
        "memory": _format_columns(columns.MEMORY),
        "alerts": _format_rows(
            ("event", "when", "first step"),
            [(f"`{name}`", alert.condition, alert.first) for name, alert in ALERTS.items()],
        ),
    }
    tables |= {marker: _format_mapped_keys(tool) for marker, tool in IMPORT_TABLES.items()}
    tables["left open"] = _format_unmapped_keys("what to do", NO_EXACT_COUNTERPART)
    tables["without effect"] = _format_unmapped_keys("why", NO_EFFECT)
    tables |= {"features": f"{format_features_table()}\n", "rules": f"{format_rules_table()}\n"}
    pages = {REFERENCE / name: "" for name in PAGES}
    for path in pages:
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
            if begin in text:
                before, _, rest = text.partition(begin)
                text = before + begin + table + end + rest.partition(end)[2]
        pages[path] = text
    return pages


def _format_commands() -> Iterator[str]:
    """Yield the heading, purpose and arguments of each command, in Markdown."""
    parsers = {"train": (train.HELP, train.build_parser("ds-pipeline train"))}
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(f"ds-pipeline {name}")
        command.add_arguments(parser)
        parsers[name] = command.HELP, parser
    for name, (purpose, parser) in parsers.items():
        yield f"## {name}\n"
        yield f"{purpose[0].upper()}{purpose[1:]}.\n"
        formatter = parser._get_formatter()
        rows = []
        for action in parser._actions:
            if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
                continue
            values = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
            value = action.metavar or values or (action.dest.upper() if action.nargs != 0 else "")
            words = [*action.option_strings[-1:], f"{value}"]
            rows.append((f"`{' '.join(words).strip()}`", formatter._expand_help(action)))
        yield _format_rows(("argument", "meaning"), rows)


def _format_columns(described: Mapping[str, columns.Column]) -> str:
    """Return the table of some columns of metrics.jsonl."""
    rows = [(f"`{name}`", column.unit, column.meaning) for name, column in described.items()]
    return _format_rows(("metric", "unit", "meaning"), rows)


def _format_recipe() -> Iterator[str]:
    """Yield the heading, paragraph and table of each section of the recipe, in Markdown."""
    recipe = RunConfig.model_json_schema()
    defined = recipe["$defs"]
    top = {name: field for name, field in recipe["properties"].items() if not _list_sections(field)}
    yield "## The run\n"
    yield _format_table("", recipe | {"properties": top}, defined)
    for name, field in recipe["properties"].items():
        members = [defined[section] for section in _list_sections(field)]
        if not members:
            continue
        yield f"## {name}\n"
        for section in members:
            if len(members) > 1:
                yield f"### {_format_kind(section)}\n"
            yield _format_paragraph(section["description"])
            yield _format_table(f"{name}.", section, defined)
        for item, parents in _find_items(name, members).items():
            yield f"### Each of {' and '.join(f'`{parent}`' for parent in parents)}\n"
            yield _format_paragraph(defined[item]["description"])
            yield _format_table("", defined[item], defined)


def list_own_rows(tool: str) -> dict[str, KeyMapping]:
    """Return the rows of a tool that transformers' TrainingArguments do not have, or all of the latter.

    Args:
        tool: Key of TOOLS.
    """
    shared = {} if tool == "trainer" else training_arguments.ROWS
    return {key: row for key, row in TOOLS[tool].rows.items() if shared.get(key) != row}


def _format_mapped_keys(tool: str) -> str:
    """Return a table of keys that are imported, one row for each key or pair of keys here."""
    theirs_of: dict[str, list[str]] = {}
    for key, row in list_own_rows(tool).items():
        theirs_of.setdefault(row.ours, []).append(key)
    return _format_rows(
        ("their key", "key here"),
        [(_quote(theirs), _format_ours(ours)) for ours, theirs in theirs_of.items()],
    )


def _format_unmapped_keys(heading: str, reasons: Mapping[str, str]) -> str:
    """Return a table of keys that are not imported, one row for each reason."""
    keys_of: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        keys_of.setdefault(reason, []).append(key)
    return _format_rows(
        ("their key", heading), [(_quote(names), _link_pages(reason)) for reason, names in keys_of.items()]
    )


def _link_pages(reason: str) -> str:
    """Return the text with a link in place of each page that it names."""
    return re.sub(r"docs/([\w/-]+\.md)", r"[docs/\1](../\1)", reason)


def _format_ours(ours: str) -> str:
    """Return `KeyMapping.ours` in Markdown."""
    names = ours.removeprefix("JSON: ")
    prefix = "" if names == ours else "JSON: "
    return prefix + _quote(names.split(", "))


def _quote(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _format_pairs(heading: str, table: dict[str, str]) -> str:
    return _format_rows(("key", heading), [(f"`{key}`", text) for key, text in table.items()])


def _format_paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False) + "\n"


def _list_sections(field: Schema) -> list[str]:
    """Return the names of the sections that a field may have as its value; empty if it has a plain value."""
    return [
        each["$ref"].rpartition("/")[2]
        for each in field.get("oneOf", _list_alternatives(field))
        if "$ref" in each
    ]


def _list_alternatives(field: Schema) -> list[Schema]:
    """Return the types that a value may have, except null."""
    return [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]


def _find_items(name: str, members: list[Schema]) -> dict[str, dict[str, None]]:
    """Return name of each section within lists and mappings -> keys that contain it.

    Args:
        name: Key of the section whose lists and mappings are searched.
        members: Schemas that this section may have.
    """
    items: dict[str, dict[str, None]] = {}
    for section in members:
        for key, field in section["properties"].items():
            for each in _list_alternatives(field):
                elements = [each.get("items", {}), *each.get("patternProperties", {}).values()]
                for item in (item for element in elements for item in _list_sections(element)):
                    items.setdefault(item, {})[f"{name}.{key}"] = None
    return items


def _format_kind(section: Schema) -> str:
    return f"kind: {section['properties']['kind'].get('const', 'package.module:function')}"


def _format_table(prefix: str, section: Schema, defined: Schema) -> str:
    return _format_rows(
        ("key", "type", "default", "range", "meaning"), list(_make_field_rows(prefix, section, defined))
    )


def _make_field_rows(prefix: str, section: Schema, defined: Schema) -> Iterator[tuple[str, ...]]:
    fields = section["properties"].items()
    for name, field in sorted(fields, key=lambda item: item[0] != "kind"):  # `kind` is the first row
        if inner := _list_sections(field):
            yield from _make_field_rows(f"{prefix}{name}.", defined[inner[0]], defined)
            continue
        meaning = " ".join(field.get("description", "Kind of this section.").split())
        # The kind of these two is read before its section is validated, so its default has no effect.
        default = "required" if name == "kind" and prefix in ("model.", "data.") else _format_default(field)
        yield f"`{prefix}{name}`", _format_type(field), default, ", ".join(_list_limits(field)), meaning


def _format_rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _format_type(field: Schema) -> str:
    return " or ".join(map(_format_one_type, _list_alternatives(field)))


def _format_one_type(value: Schema) -> str:
    if "const" in value or "enum" in value:
        return ", ".join(f"`{word}`" for word in value.get("enum", [value.get("const")]))
    if "prefixItems" in value:
        return f"list of {len(value['prefixItems'])} x {_format_type(value['prefixItems'][0])}"
    if "items" in value:
        return f"list of {_format_type(value['items'])}"
    if "$ref" in value:
        return "sections"
    if value["type"] == "object":
        return "sections by name" if "patternProperties" in value else "keys and values"
    return TYPES[value["type"]]


def _format_default(field: Schema) -> str:
    if "default" not in field:
        return "required"
    if field["default"] is None:
        return "none"
    return f"`{json.dumps(field['default'])}`".replace('"', "")


def _list_limits(field: Schema) -> Iterator[str]:
    """Yield the limits of a number, the length of a list, the pattern of a text."""
    for value in _list_alternatives(field):
        yield from (f"{sign} {value[name]:,}" for name, sign in LIMITS.items() if name in value)
        if "minItems" in value and "prefixItems" not in value:
            yield f"at least {value['minItems']}"
        patterns = [value.get("pattern"), *value.get("patternProperties", ())]
        yield from (PATTERNS[pattern] for pattern in patterns if pattern in PATTERNS)
        if item := value.get("prefixItems", [value.get("items")])[0]:  # all items have the same limits
            yield from _list_limits(item)


if __name__ == "__main__":
    for path, text in build_documents().items():
        path.write_text(text, encoding="utf-8")
