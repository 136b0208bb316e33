"""Finds what no token shows of a row: strings in any field, and numbers in unknown fields of turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipeline.data.chat_layouts import WEIGHTS

# Fields whose value says what something is. They choose how the rest is written.
STRUCTURE = frozenset({"role", "from", "type"})


def unwritten_fields(record: Any, text: str) -> list[str]:
    """Return the fields of a row whose strings are not, or not wholly, in a text, and turns' unknown numbers.

    A string counts as written if each of its lines is there, as it is or as JSON has it. A string that holds
    JSON counts as the strings in it, or as the names of its fields where it has no strings.

    Args:
        record: The row, as it was read.
        text: What the model is given of it.

    Returns:
        Names such as `messages[].tool_calls[].id`, each once, in the row's order.
    """
    found: dict[str, None] = {}
    for name, value in _strings(record, ""):
        if name not in found and (value is None or not _is_written(value, text)):
            found[name] = None
    return list(found)


def _strings(value: Any, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield field and string; None is a number, or true or false, in a field of a turn that nothing reads."""
    if isinstance(value, str):
        inside = _json_inside(value)
        if inside is None:
            yield name, value
            return
        found = list(_strings(inside, name))
        yield from found or ((name, key) for key in _keys(inside))
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each, f"{name}[]")
    elif isinstance(value, dict):
        is_turn = name.endswith("[]") and "." not in name and ("role" in value or "from" in value)
        for key, each in value.items():
            place = f"{name}.{key}" if name else str(key)
            if is_turn and isinstance(each, int | float) and key not in WEIGHTS:
                yield place, None
            elif key not in STRUCTURE or not isinstance(each, str):
                yield from _strings(each, place)


def _keys(value: Any) -> Iterator[str]:
    inside: list[Any] = []
    if isinstance(value, dict):
        yield from value
        inside = list(value.values())
    elif isinstance(value, list):
        inside = value
    for each in inside:
        yield from _keys(each)


def _json_inside(value: str) -> Any:
    """Return the list or object that a string of JSON holds; None for any other string."""
    if not value.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _is_written(value: str, text: str) -> bool:
    return value.strip() in text or all(_is_there(line, text) for line in value.splitlines())


def _is_there(line: str, text: str) -> bool:
    line = line.strip()
    if line in text:
        return True
    for is_ascii in (False, True):
        once = _escaped(line, is_ascii)
        if once in text or _escaped(once, is_ascii) in text:  # twice: arguments as text in a call
            return True
    return False


def _escaped(line: str, is_ascii: bool) -> str:
    return json.dumps(line, ensure_ascii=is_ascii)[1:-1]
