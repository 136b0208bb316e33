"""What readers of other trainers' configurations share: tables of keys, and the draft of a recipe they fill.

A key of theirs is converted by itself, or put together with others by its tool's `settle`; what is left is
named with a reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.loading import ConfigFile
from pipeline.errors import ConfigError

NEAR = 0.88  # of two names of which one is taken for a slip of the other


class NotTakenError(Exception):
    """This value has no counterpart here; says why."""


@dataclass(frozen=True)
class Key:
    """What a key of theirs becomes."""

    ours: str
    """Dotted key of the recipe, or several with commas between them; `JSON: ...` of the DeepSpeed JSON."""
    convert: Callable[[Any], Any] | None = None
    """Their value -> ours; may raise NotTakenError or TypeError. None: `settle` looks at it."""


@dataclass(frozen=True)
class Tool:
    """A trainer whose configurations are read."""

    title: str
    keys: Mapping[str, Key]
    without: Mapping[str, str]
    """Keys without a counterpart, and why."""
    marks: str
    """Words: keys that its files have, and those of the others do not."""
    defaults: Mapping[str, Any]
    """What holds there where a file says nothing, of keys that change the curve."""
    settle: Callable[[Draft], None]


@dataclass
class Draft:
    """The recipe as far as it is known."""

    file: ConfigFile
    tool: Tool
    gpus: int
    folder: Path
    """Where recipe and JSON will lie."""
    kind: str | None = None
    """Which of the tool's trainers was named on the command line."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """By dotted key, of two parts at most."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What was decided, by dotted key."""
    not_taken: dict[str, str] = field(default_factory=dict)
    """Their key -> why."""
    fill_in: list[str] = field(default_factory=list)
    """What is left to the user."""
    json: dict[str, Any] = field(default_factory=dict)
    """For the JSON: `bf16`, `fp16` (true, false, "auto"), `tf32`, `compile`, `theirs`, `sharded`."""
    rows: int | None = None
    """Examples of an epoch, where they could be counted."""
    files: dict[Path, str] = field(default_factory=dict)
    """Data written anew, by path."""
    read: set[str] = field(default_factory=set)
    """Their keys that were looked at."""

    def put(self, ours: str, value: Any, remark: str = "") -> None:
        """Sets a key of the recipe."""
        self.recipe[ours] = value
        if remark:
            self.remarks[ours] = remark

    def given(self, key: str, convert: Callable[[Any], Any] | None = None) -> Any:
        """Their value or their tool's default; None: neither.

        Raises:
            ConfigError: it is of another type than `convert` takes.
        """
        self.read.add(key)
        value = self.file.tree.get(key)
        value = self.tool.defaults.get(key) if value is None else value
        return value if value is None or convert is None else self.converted(key, convert, value)

    def converted(self, key: str, convert: Callable[[Any], Any], value: Any) -> Any:
        try:
            return convert(value)
        except TypeError as error:
            raise ConfigError(f"{self.file.at(key)}: expected {error}, given {value!r}") from None

    def drop(self, key: str, why: str) -> None:
        """Names a key that was not taken, where the file has it."""
        if self.file.tree.get(key) is not None:
            self.not_taken[key] = why

    def found(self, name: str) -> Path | None:
        """A file that theirs names: from here, or from where theirs lies."""
        places = (Path(name).expanduser(), self.file.path.parent / name)
        return next((path for path in places if path.exists()), None)

    def fill(self) -> None:
        """Goes through their keys, the table's own conversions first.

        Raises:
            ConfigError: a key that looks like a slip of a known one, a value of another type.
        """
        tool = self.tool
        self.put("model.kind", "causal_lm")
        for key, value in (dict(tool.defaults) | self.file.tree).items():
            if not isinstance(key, str):
                raise ConfigError(f"{self.file.path}: {key!r} is no name of a key")
            row = tool.keys.get(key)
            if (value is None or value == "") and tool.defaults.get(key) is None:
                continue
            if row is not None:
                self._take(key, row)
            elif key in tool.without:
                if value not in (False, 0, "none", [], {}):
                    self.drop(key, tool.without[key])
            elif slip := meant(key, tool):
                raise ConfigError(f'{self.file.at(key)}: unknown to {tool.title} (did you mean "{slip}"?)')
            else:
                self.drop(key, f"not known to the tables of {tool.title}; read docs/configuration.md")
        if "model.pretrained" not in self.recipe:
            self.put("model.pretrained", "FILL-IN")
            self.fill_in.append("model.pretrained: the model's folder or name on the hub; theirs names none")
        tool.settle(self)
        for key in [key for key in self.file.tree if key in tool.keys and key not in self.read]:
            if key not in self.not_taken and self.file.tree[key] not in (False, "", []):
                self.drop(key, f"nothing in such a run reads it ({tool.keys[key].ours})")

    def _take(self, key: str, row: Key) -> None:
        if row.convert is not None:
            try:
                self.put(row.ours, self.given(key, row.convert))
            except NotTakenError as reason:
                self.drop(key, str(reason))


def meant(key: str, tool: Tool) -> str | None:
    """The key of the tool of which this one is a slip."""
    known = {*tool.keys, *tool.without}
    if key.removeprefix("no_") in known:  # how a command line switches off
        return None
    near = difflib.get_close_matches(key, known, n=1, cutoff=NEAR)
    return near[0] if near else None


def number(value: Any) -> float | int:
    """A number, also one that YAML reads as a text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise TypeError("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    return value


def whole(value: Any) -> int:
    """A whole number."""
    if number(value) != int(number(value)):
        raise TypeError("a whole number")
    return int(number(value))


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def names(value: Any) -> list[str]:
    """A list of names, or names with commas between them."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("names")
    return value


def reasons(table: str) -> dict[str, str]:
    """Their key -> why it has no counterpart, of lines `why: key key`; one behind spaces goes on."""
    found: dict[str, str] = {}
    for line in table.strip().replace("\n  ", " ").splitlines():
        why, _, keys = line.rpartition(": ")
        found |= dict.fromkeys(keys.split(), why)
    return found


def keys(table: str) -> dict[str, Key]:
    """Keys that `settle` puts together, of lines `ours: theirs theirs`."""
    return {key: Key(ours) for key, ours in reasons(table).items()}


def as_markdown(tool: Tool) -> str:
    """What becomes of a tool's keys, as two tables."""
    ours: dict[str, list[str]] = {}
    for key, row in tool.keys.items():
        ours.setdefault(row.ours, []).append(f"`{key}`")
    why: dict[str, list[str]] = {}
    for key, reason in tool.without.items():
        why.setdefault(reason, []).append(f"`{key}`")
    lines = ["| theirs | ours |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {_quoted(mine)} |" for mine, theirs in ours.items()]
    lines += ["", "| no counterpart | why |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {reason} |" for reason, theirs in why.items()]
    return "\n".join(lines)


def _quoted(ours: str) -> str:
    start = "JSON: " if ours.startswith("JSON: ") else ""
    return start + ", ".join(f"`{key}`" for key in ours.removeprefix("JSON: ").split(", "))


def listed(tools: Iterable[Tool]) -> str:
    """`LLaMA-Factory, Axolotl or TRL`."""
    *first, last = [tool.title for tool in tools]
    return f"{', '.join(first)} or {last}"
