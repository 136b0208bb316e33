"""A JSON file as a tree, with the line of every key: where things stand, for the errors about them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.loading import Tree, read_text
from pipeline.errors import ConfigError

# Keys that people write for each other: JSON has no comments.
COMMENT = re.compile(r"(?i)[_/#$].*|(?:.*_)?comments?\d*|descriptions?|notes?")
LARGEST = 2**63 - 1
"""No whole number in a configuration is larger: it counts, or measures memory."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


@dataclass
class JsonFile:
    """What the file says, and where: `places` has `file:line` or `command line` for each dotted key."""

    path: Path
    tree: Tree
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A line for each key that was taken, and that nobody reads."""

    def at(self, dotted: str) -> str:
        """`file:line: key` or `command line: ds.key`, as errors begin; a key that is absent: its section."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            place = self.places.get(".".join(parts[:length]))
            if place is not None:
                return f"{place}: {'ds.' * (place == 'command line')}{dotted}"
        return f"{self.path}: {dotted}"


def read_json(path: Path) -> JsonFile:
    """The object in a JSON file.

    Raises:
        ConfigError: missing, malformed, a key given twice, a number that is none (file and line).
    """
    text = read_text(path)

    def refuse(number: str, what: str) -> NoReturn:
        line = text.count("\n", 0, text.index(number)) + 1
        raise ConfigError(f"{path}:{line}: not valid JSON: {what}")

    def whole(number: str) -> int:
        if len(number) > 40 or abs(int(number)) > LARGEST:
            refuse(number, f"a number of {len(number.lstrip('-'))} digits; the largest is {LARGEST:,}")
        return int(number)

    def real(number: str) -> float:
        if not math.isfinite(float(number)):
            refuse(number, f"{number[:40]} is more than a number can hold")
        return float(number)

    try:
        tree = json.loads(
            text,
            parse_int=whole,
            parse_float=real,
            parse_constant=lambda word: refuse(word, f"{word} is not a number"),
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected an object of keys to values, found a {type(tree).__name__}")
    return JsonFile(path, tree, dict(_places(text, path)))


@dataclass
class _Open:
    """An object or a list that the scan is inside of."""

    prefix: str
    keys: set[str] | None
    """Keys so far; None in a list."""
    name: str = ""
    awaits_key: bool = True
    items: int = 0


def _places(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """(dotted key, `file:line`) for each key of an object in text that is valid JSON."""
    stack: list[_Open] = []
    line, counted = 1, 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        line, counted = line + text.count("\n", counted, token.start()), token.start()
        inside = stack[-1] if stack else None
        if word in ("}", "]"):
            stack.pop()
        elif word == "," and inside is not None:
            inside.awaits_key, inside.items = True, inside.items + 1
        elif inside is not None and inside.keys is not None and inside.awaits_key and word != ":":
            key = json.loads(word)
            if key in inside.keys and not COMMENT.fullmatch(key):
                raise ConfigError(f"{path}:{line}: {inside.prefix}{key}: the key {key!r} is given twice")
            inside.keys.add(key)
            inside.name, inside.awaits_key = f"{inside.prefix}{key}", False
            yield inside.name, f"{path}:{line}"
        elif word in ("{", "["):
            name = "" if inside is None else _name(inside)
            stack.append(_Open(f"{name}." if name else "", set() if word == "{" else None))


def _name(inside: _Open) -> str:
    return inside.name if inside.keys is not None else f"{inside.prefix}{inside.items}"


def is_comment(key: Any) -> bool:
    """Whether a key is one that people write for each other: `_comment`, `//`, `$schema`."""
    return isinstance(key, str) and COMMENT.fullmatch(key) is not None
