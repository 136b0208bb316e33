"""Writes the tables of docs/reference/imported-keys.md from the tables of the command `import`.

python docs/write_imported_keys.py

The text around the tables is written by hand in docs/reference/imported-keys.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.cli.import_configs import training_arguments
from pipeline.cli.import_configs.conversions import KeyMapping
from pipeline.cli.import_configs.unmapped_keys import NO_EFFECT, NO_EXACT_COUNTERPART
from pipeline.cli.import_configs.writing import TOOLS

DOCUMENT = Path(__file__).parent / "reference" / "imported-keys.md"
TABLES = {
    "training arguments": "trainer",
    "llama factory": "llama-factory",
    "axolotl": "axolotl",
    "trl": "trl-sft",
    "accelerate": "accelerate",
}
"""Marker in the document -> key of TOOLS; all of TRL's trainers have one table."""


def build_document() -> str:
    """Return the text of the document with new tables between its markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = {marker: _format_mapped_keys(tool) for marker, tool in TABLES.items()}
    tables["left open"] = _format_unmapped_keys("what to do", NO_EXACT_COUNTERPART)
    tables["without effect"] = _format_unmapped_keys("why", NO_EFFECT)
    for name, table in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        text = before + begin + table + end + after
    return text


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
    return _format_table(
        ("their key", "key here"),
        {_quote(theirs): _format_ours(ours) for ours, theirs in theirs_of.items()},
    )


def _format_unmapped_keys(heading: str, reasons: Mapping[str, str]) -> str:
    """Return a table of keys that are not imported, one row for each reason."""
    keys_of: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        keys_of.setdefault(reason, []).append(key)
    return _format_table(
        ("their key", heading), {_quote(keys): _link_pages(reason) for reason, keys in keys_of.items()}
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


def _format_table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = [head, ("---", "---"), *rows.items()]
    return "".join(f"| {left} | {right} |\n" for left, right in lines)


if __name__ == "__main__":
    DOCUMENT.write_text(build_document(), encoding="utf-8")
