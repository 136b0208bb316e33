"""What readers of other trainers' configurations share: tables of keys, and the draft of a recipe they fill.

A section records which of its keys were read. What nothing read is named in the list of what was not taken.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.loading import ConfigFile
from pipeline.errors import ConfigError

NEAR = 0.88  # similarity of two names from which one is taken for a slip of the other
OFF: tuple[Any, ...] = (False, 0, "none", "no", "", [], {})
FILL_IN = "FILL-IN"


class NotTakenError(Exception):
    """Says why a value has no counterpart here."""


@dataclass(frozen=True)
class Key:
    """What a key of theirs becomes."""

    ours: str
    """Dotted key of the recipe, or several with commas between them; `JSON: ...` of the DeepSpeed JSON."""
    convert: Callable[[Any], Any] | None = None
    """Their value -> ours; may raise NotTakenError or TypeError. None: the tool's `settle` reads the key."""


@dataclass(frozen=True)
class Tool:
    """A trainer whose configurations are read."""

    title: str
    keys: Mapping[str, Key]
    without: Mapping[str, str]
    """Keys without a counterpart, and why. One that is switched off means the same here."""
    marks: str
    """Words: keys that its files have, and those of the others do not."""
    defaults: Mapping[str, Any]
    """What holds there where a file says nothing, of keys that change the curve."""
    settle: Callable[[Draft], None]


@dataclass
class Section:
    """Keys of theirs at one place of their file.

    Attributes:
        file: Their file, for messages.
        tree: The keys and values of this place.
        at: Dotted place in the file, with a dot behind it; empty for the whole.
        not_taken: Dotted key -> why, of the whole file.
        defaults: Values that hold where the section says nothing.
        read: Keys that were read.
        below: Sections within this one that were opened.
    """

    file: ConfigFile
    tree: dict[str, Any]
    at: str = ""
    not_taken: dict[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    below: list[Section] = field(default_factory=list)

    def given(self, key: str, convert: Callable[[Any], Any] | None = None) -> Any:
        """Return their value or the default, and record that the key was read; None: neither.

        Raises:
            ConfigError: The value is of another type than `convert` takes.
        """
        self.read.add(key)
        value = self.tree.get(key)
        value = self.defaults.get(key) if value is None else value
        return value if value is None or convert is None else self.converted(key, convert, value)

    def converted(self, key: str, convert: Callable[[Any], Any], value: Any) -> Any:
        """Return the value as `convert` gives it, or raise a ConfigError that names the key."""
        try:
            return convert(value)
        except TypeError as error:
            raise self.refused(key, f"expected {error}, given {value!r}") from None

    def refused(self, key: str, why: str) -> ConfigError:
        """Return the error that refuses the import because of a key."""
        return ConfigError(f"{self.file.at(self.at + key)}: {why}")

    def drop(self, key: str, why: str) -> None:
        """Name a key as not taken, if the file has it."""
        self.read.add(key)
        if self.tree.get(key) is not None:
            self.not_taken[self.at + key] = why

    def sections(self, key: str) -> list[Section]:
        """Open the sections of a list (or a single one) of mappings; a plain name is a mapping of its `path`.

        Raises:
            ConfigError: An entry is neither.
        """
        given = self.given(key) or []
        is_list = isinstance(given, list)
        opened = []
        for number, each in enumerate(given if is_list else [given]):
            entry = {"path": each} if isinstance(each, str) else each
            if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
                raise self.refused(key, f"expected a mapping of keys to values, given {each!r}")
            place = f"{self.at}{key}.{f'{number}.' if is_list else ''}"
            opened.append(Section(self.file, entry, place, self.not_taken))
        self.below += opened
        return opened

    def unread(self) -> Iterator[tuple[Section, str]]:
        """Yield the keys with a value that nothing has read, those of opened sections included."""
        for key, value in self.tree.items():
            if key not in self.read and value is not None:
                yield self, key
        for section in self.below:
            yield from section.unread()


@dataclass
class Draft:
    """The recipe as far as it is known."""

    file: ConfigFile
    tool: Tool
    gpus: int
    folder: Path
    """Where recipe and JSON will be."""
    kind: str | None = None
    """Which of the tool's trainers was named on the command line."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """By dotted key, of two parts at most."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What was decided, by dotted key."""
    fill_in: list[str] = field(default_factory=list)
    """What is left to the user."""
    json: dict[str, Any] = field(default_factory=dict)
    """For the JSON: `bf16`, `fp16` (true, false, "auto"), `tf32`, `compile`, `theirs`, `split`."""
    files: dict[Path, str] = field(default_factory=dict)
    """Further files to write, by path."""
    has_recipe: bool = True
    """Whether their file says what is trained, not only how the work is split."""

    def __post_init__(self) -> None:
        self.top = Section(self.file, self.file.tree, defaults=self.tool.defaults)
        self.not_taken = self.top.not_taken
        self.given, self.drop = self.top.given, self.top.drop

    def put(self, ours: str, value: Any, remark: str = "") -> None:
        """Set a key of the recipe."""
        self.recipe[ours] = value
        if remark:
            self.remarks[ours] = remark

    def found(self, name: str) -> Path | None:
        """Return a file that theirs names, relative to this folder or to theirs."""
        places = (Path(name).expanduser(), self.file.path.parent / name)
        return next((path.absolute() for path in places if path.exists()), None)

    def fill(self) -> None:
        """Take their keys, the table's own conversions first, then what several keys make.

        Raises:
            ConfigError: A key looks like a slip of a known one, or has a value that cannot be imported.
        """
        for key in self.file.tree:
            if not isinstance(key, str):
                raise ConfigError(f"{self.file.path}: {key!r} is no name of a key")
        for key, row in self.tool.keys.items():
            if row.convert is not None and self.given(key) not in (None, ""):
                try:
                    self.put(row.ours, self.given(key, row.convert))
                except NotTakenError as reason:
                    self.drop(key, str(reason))
        self.tool.settle(self)
        for section, key in list(self.top.unread()):
            self._name(section, key)

    def _name(self, section: Section, key: str) -> None:
        """Name a key that nothing has read, unless it is switched off and means the same here."""
        if section is not self.top:
            section.drop(key, f"{self.tool.title}'s key has no counterpart here")
        elif key in self.tool.without:
            if section.tree[key] not in OFF or self.tool.without[key].startswith("not off: "):
                section.drop(key, self.tool.without[key].removeprefix("not off: "))
        elif key in self.tool.keys:
            if section.tree[key] not in OFF:
                section.drop(key, f"nothing in such a run reads it ({self.tool.keys[key].ours})")
        elif slip := meant(key, self.tool):
            raise section.refused(key, f'unknown to {self.tool.title} (did you mean "{slip}"?)')
        else:
            section.drop(key, f"not known to the tables of {self.tool.title}; read docs/configuration.md")


def meant(key: str, tool: Tool) -> str | None:
    """Return the key of the tool of which this one is a slip."""
    known = {*tool.keys, *tool.without}
    if key.removeprefix("no_") in known:  # how a command line switches off
        return None
    near = difflib.get_close_matches(key, known, n=1, cutoff=NEAR)
    return near[0] if near else None


def number(value: Any) -> float | int:
    """Return a number, also one that YAML reads as a text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise TypeError("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    return value


def numbers(value: Any) -> list[float]:
    """Return a list of numbers."""
    if not isinstance(value, list):
        raise TypeError("a list of numbers")
    return [float(number(each)) for each in value]


def whole(value: Any) -> int:
    """Return a whole number."""
    if number(value) not in (float("inf"), float("-inf")) and number(value) == int(number(value)):
        return int(number(value))
    raise TypeError("a whole number")


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def names(value: Any) -> list[str]:
    """Return a list of names, or names with commas between them."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("names")
    return value


def reasons(table: str) -> dict[str, str]:
    """Read their key -> why it has no counterpart from lines `why: key key`; an indented line goes on."""
    found: dict[str, str] = {}
    for line in table.strip().replace("\n  ", " ").splitlines():
        why, _, keys = line.rpartition(": ")
        found |= dict.fromkeys(keys.split(), why)
    return found


def keys(table: str) -> dict[str, Key]:
    """Read the keys that `settle` takes from lines `ours: theirs theirs`."""
    return {key: Key(ours) for key, ours in reasons(table).items()}


def as_markdown(tool: Tool) -> str:
    """Return what becomes of a tool's keys, as two tables."""
    ours: dict[str, list[str]] = {}
    for key, row in tool.keys.items():
        ours.setdefault(row.ours, []).append(f"`{key}`")
    why: dict[str, list[str]] = {}
    for key, reason in tool.without.items():
        why.setdefault(reason.removeprefix("not off: "), []).append(f"`{key}`")
    lines = ["| theirs | ours |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {_quoted(mine)} |" for mine, theirs in ours.items()]
    lines += ["", "| no counterpart | why |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {reason} |" for reason, theirs in why.items()]
    return "\n".join(lines)


def _quoted(ours: str) -> str:
    start = "JSON: " if ours.startswith("JSON: ") else ""
    return start + ", ".join(f"`{key}`" for key in ours.removeprefix("JSON: ").split(", "))


def listed(tools: Iterable[Tool]) -> str:
    """Return `LLaMA-Factory, Axolotl or TRL`."""
    *first, last = [tool.title for tool in tools]
    return f"{', '.join(first)} or {last}"
