"""Reads a configuration file, YAML or JSON, with the command line's overrides.

The result is a tree and the place of each key. Every error names the file, the line and the key.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from pipeline.files import CONFIGURATION_LIMIT, read_regular_file

Tree = dict[str, Any]

MOST_VALUES, MOST_LEVELS = 100_000, 64
"""Bounds of a recipe."""


class YamlLoader(yaml.SafeLoader):
    """SafeLoader with numbers as people write them (3e-4, and no octal 010), and with bounds.

    A few lines with aliases can stand for billions of values, so values are counted with aliases written out.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0
        self._level = 0
        self._deepest = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """id of a whole node -> number of values and of levels within it."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one value, and refuse what no recipe needs before seconds are spent on it."""
        event = self.peek_event()
        before, deepest_before = self._composed, self._deepest
        self._composed += 1
        self._level += 1
        self._deepest = self._level
        self._refuse(self._composed > MOST_VALUES, f"more than {MOST_VALUES:,} values", event)
        self._refuse(self._level > MOST_LEVELS, "nested too deeply", event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            self._refuse(id(node) not in self._sizes, "the value holds itself", event)
            values, levels = self._sizes[id(node)]
            self._composed += values - 1
            self._deepest += levels
            self._refuse(self._composed > MOST_VALUES, f"stands for more than {MOST_VALUES:,} values", event)
            self._refuse(self._deepest > MOST_LEVELS, "nested too deeply", event)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse("\0" in event.value, "a NUL character, which no name and no path can have", event)
        self._sizes.setdefault(id(node), (self._composed - before, self._deepest - self._level))
        self._level -= 1
        self._deepest = max(self._deepest, deepest_before)
        return node

    @staticmethod
    def _refuse(is_wrong: bool, problem: str, event: Any) -> None:
        if is_wrong:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def construct_yaml_int(self, node: Any) -> int:
        """Return an integer of at most 64 bits: Python cannot write out all others."""
        try:
            value = int(super().construct_yaml_int(node))
        except ValueError:  # more digits than Python converts
            value = 1 << 64
        if abs(value) >= 1 << 64:
            problem = f"a number of {len(node.value):,} digits, more than 64 bits hold"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_yaml_int)
# YAML 1.1 reads 010 as 8 and 1:30 as 90, which nobody means: here both stay texts.
_NUMBERS = {
    "int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    "float": r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_TAG = "tag:yaml.org,2002:"
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in each if tag.removeprefix(_TAG) not in _NUMBERS]
    for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    YamlLoader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


class YamlDumper(yaml.SafeDumper):
    """SafeDumper that also quotes the texts which this loader alone takes for numbers: '1e3'."""


YamlDumper.yaml_implicit_resolvers = {
    first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
    + YamlLoader.yaml_implicit_resolvers.get(first, [])
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *YamlLoader.yaml_implicit_resolvers}
}

# Plain words that YAML 1.1 takes for a value: on, off, yes, no, ~
_NOT_TEXT = {"tag:yaml.org,2002:bool": "true or false", "tag:yaml.org,2002:null": "nothing"}

# JSON has no comments: keys that people write for each other.
_COMMENT = re.compile(r"(?i)[_/#$].*|(?:.*_)?comments?\d*|descriptions?|notes?")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


@dataclass
class ConfigFile:
    """Tree of a file, and where each key stands."""

    path: Path
    tree: Tree
    locations: dict[str, str] = field(default_factory=dict)
    """Dotted key -> `file:line` or `command line`."""
    notes: list[str] = field(default_factory=list)
    """One line for each key that was taken and that nothing reads."""

    def location_of(self, dotted: str) -> str:
        """Return where the key stands, or the section that it is missing in, or the file."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            if (place := self.locations.get(".".join(parts[:length]))) is not None:
                return place
        return str(self.path)

    def describe_key(self, dotted: str) -> str:
        """Return `file:line: key` or `command line: ds.key`, as errors about the DeepSpeed JSON begin."""
        place = self.location_of(dotted)
        return f"{place}: {'ds.' * (place == 'command line')}{dotted}"

    def keys_within(self, dotted: str) -> list[str]:
        """Return this key and those within it, if their place is known."""
        return [at for at in self.locations if f"{at}.".startswith(f"{dotted}.")]

    def override(self, parts: list[str], value: Any) -> None:
        """Set what the command line says, and that it says so."""
        dotted = ".".join(parts)
        set_dotted(self.tree, parts, value, "command line")
        for at in self.keys_within(dotted):
            del self.locations[at]
        for length in range(1, len(parts)):
            self.locations.setdefault(".".join(parts[:length]), "command line")
        self.locations[dotted] = "command line"


def read_yaml(path: Path) -> ConfigFile:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: The file is missing or malformed, repeats a key (line and column), or is no mapping.
    """
    tree, places = _parsed(path, read_text(path))
    return ConfigFile(path, copy.deepcopy(tree), dict(places))


@lru_cache(maxsize=4)  # a plan asks for the same recipe with other overrides, again and again
def _parsed(path: Path, text: str) -> tuple[Tree, dict[str, str]]:
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        places = _key_places(node, path)
        tree = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 45th day of a month
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found a {type(tree).__name__}")
    return tree, places


def _key_places(node: Any, path: Path, prefix: str = "") -> dict[str, str]:
    places: dict[str, str] = {}
    if isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            places[f"{prefix}{number}"] = f"{path}:{value.start_mark.line + 1}"
            places.update(_key_places(value, path, f"{prefix}{number}."))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
            if (word := _NOT_TEXT.get(key.tag)) is not None:
                problem = f"the key {key.value!r} is read as {word}, not as a text; write it in quotes"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            dotted = f"{prefix}{key.value}"
            if dotted in places:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            places[dotted] = f"{path}:{key.start_mark.line + 1}"
            places.update(_key_places(value, path, dotted + "."))
    return places


def read_json(path: Path) -> ConfigFile:
    """Return the object in a JSON file.

    Raises:
        ConfigError: The file is missing or malformed, repeats a key (file and line), or is no object.
    """
    text = read_text(path)
    try:
        # Python refuses to convert thousands of digits; as a float they are refused as out of range.
        tree = json.loads(text, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected an object of keys to values, found a {type(tree).__name__}")
        return ConfigFile(path, tree, dict(_JsonPlaces(path, text).within("")))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None


class _JsonPlaces:
    """Finds the line of each key of a valid JSON object."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._tokens = _TOKEN.finditer(text)
        self._line_ends = [found.start() for found in re.finditer("\n", text)]
        next(self._tokens)

    def within(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield each dotted key of the object whose `{` was the last token, and its `file:line`."""
        keys = set()
        for token in self._tokens:
            if token[0] == "}":
                return
            if token[0] == ",":
                continue
            key = json.loads(token[0])
            place = f"{self._path}:{bisect(self._line_ends, token.start()) + 1}"
            if key in keys and not is_comment(key):
                raise ConfigError(f"{place}: {prefix}{key}: the key {key!r} is given twice")
            keys.add(key)
            yield f"{prefix}{key}", place
            next(self._tokens)  # the colon
            opened = next(self._tokens)[0]
            if opened == "{":
                yield from self.within(f"{prefix}{key}.")
            elif opened == "[":  # what a list holds has the place of the list's key
                num_open = 1
                while num_open:
                    bracket = next(self._tokens)[0]
                    num_open += (bracket in "[{") - (bracket in "]}")


def is_comment(key: Any) -> bool:
    """Return whether people write such a key for each other: `_comment`, `//`, `$schema`."""
    return isinstance(key, str) and _COMMENT.fullmatch(key) is not None


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a configuration file.

    Raises:
        ConfigError: It cannot be read. The message names what is near if it is missing.
    """
    try:
        # Some editors begin a file with a byte order mark.
        return read_regular_file(path, CONFIGURATION_LIMIT).decode("utf-8-sig")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) if siblings else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: cannot be read: Is a directory; name a file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def parse_override(argument: str) -> tuple[list[str], Any]:
    """Return `model.num_layers=4` as (["model", "num_layers"], 4). The value is read as YAML.

    Raises:
        ConfigError: There is no `=` or no value, a part of the key is empty, or the value is no YAML.
    """
    key, equals, value = argument.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or parts == ["ds"]:
        raise ConfigError(f"command line: {argument!r} is not an override; write section.key=value")
    try:
        loader = YamlLoader(value)
        node = loader.get_single_node()
        if node is None:  # a variable of the shell that was not set, or a comment
            raise ConfigError(f"command line: {argument} has no value; write {key}=null to unset it")
        return parts, loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        reason = f" ({error.problem})" if isinstance(error, yaml.MarkedYAMLError) and error.problem else ""
        raise ConfigError(f"command line: the value of {key} is not valid YAML{reason}: {value!r}") from None


def set_dotted(tree: Tree, parts: list[str], value: Any, place: str) -> None:
    """Set one value in nested mappings, and make those that are missing. Errors begin with `place`."""
    for position, part in enumerate(parts[:-1]):
        if tree.get(part) is None:  # absent, or a section whose keys are all commented out
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            section = ".".join(parts[: position + 1])
            raise ConfigError(f"{place}: {'.'.join(parts)}: {section} is a value, not a section")
    tree[parts[-1]] = value


def get_dotted(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at `a.b.c`, or `None` if any part is absent."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean "..."?)`, or the valid names if none is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(given, options, n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else f" (valid: {', '.join(options)})"
