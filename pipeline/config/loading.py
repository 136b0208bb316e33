"""Reads YAML and JSON configuration files, and the overrides of the command line.

The result is a tree of values and the location of each key. Every error names the file, the line and the key.
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
from pipeline.files import MAX_CONFIGURATION_BYTES, read_regular_file

Tree = dict[str, Any]
"""Nested values of a configuration file, by key."""

MAX_VALUES = 100_000
"""Largest number of values in a YAML file."""
MAX_LEVELS = 64
"""Largest number of nested levels in a YAML file."""


class YamlLoader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and 010 as a text, and limits the number of values.

    A few lines with aliases can stand for billions of values. So each alias counts as many values as the
    node to which it refers.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0
        """Number of values so far, with those of aliases."""
        self._level = 0
        """Number of levels around the current value."""
        self._deepest = 0
        """Largest level within the node that was composed last."""
        self._sizes: dict[int, tuple[int, int]] = {}
        """`id` of a complete node -> number of values and of levels within it."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one value and count it.

        Raises:
            yaml.MarkedYAMLError: The file has too many values or levels, a value that contains itself, or a
                NUL character.
        """
        event = self.peek_event()
        before = self._composed
        deepest_before = self._deepest
        self._composed += 1
        self._level += 1
        self._deepest = self._level
        self._refuse(self._composed > MAX_VALUES, f"more than {MAX_VALUES:,} values", event)
        self._refuse(self._level > MAX_LEVELS, "nested too deeply", event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            self._refuse(id(node) not in self._sizes, "the value contains itself", event)
            values, levels = self._sizes[id(node)]
            self._composed += values - 1
            self._deepest += levels
            self._refuse(self._composed > MAX_VALUES, f"stands for more than {MAX_VALUES:,} values", event)
            self._refuse(self._deepest > MAX_LEVELS, "nested too deeply", event)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse("\0" in event.value, "a NUL character, which no name or path may contain", event)
        self._sizes.setdefault(id(node), (self._composed - before, self._deepest - self._level))
        self._level -= 1
        self._deepest = max(self._deepest, deepest_before)
        return node

    @staticmethod
    def _refuse(is_wrong: bool, problem: str, event: Any) -> None:
        if is_wrong:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def construct_yaml_int(self, node: Any) -> int:
        """Return an integer of at most 64 bits.

        Raises:
            yaml.MarkedYAMLError: The integer is longer. Python does not convert very long ones to text.
        """
        try:
            value = int(super().construct_yaml_int(node))
        except ValueError:  # more digits than Python converts
            value = 1 << 64
        if abs(value) >= 1 << 64:
            problem = f"a number of {len(node.value):,} digits, which does not fit into 64 bits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_yaml_int)
# YAML 1.1 reads 010 as 8 and 1:30 as 90. No user means that, so here both stay texts.
_NUMBERS = {
    "int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    "float": r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_TAG = "tag:yaml.org,2002:"
# First character of a text -> tags that the text may have, each with the pattern of the whole text.
YamlLoader.yaml_implicit_resolvers = {
    character: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) not in _NUMBERS]
    for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    YamlLoader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


class YamlDumper(yaml.SafeDumper):
    """SafeDumper that also quotes texts that `YamlLoader`, unlike SafeLoader, reads as numbers: '1e3'."""


YamlDumper.yaml_implicit_resolvers = {
    character: yaml.SafeDumper.yaml_implicit_resolvers.get(character, [])
    + YamlLoader.yaml_implicit_resolvers.get(character, [])
    for character in {*yaml.SafeDumper.yaml_implicit_resolvers, *YamlLoader.yaml_implicit_resolvers}
}

# Tags of plain words that YAML 1.1 does not read as texts (on, off, yes, no, ~) -> the value in an error.
_NOT_TEXT = {"tag:yaml.org,2002:bool": "true or false", "tag:yaml.org,2002:null": "null"}

# Keys that serve as comments, since JSON has none.
_COMMENT = re.compile(r"(?i)[_/#$].*|(?:.*_)?comments?\d*|descriptions?|notes?")
# Tokens of a valid JSON: texts, punctuation, and numbers or words.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


@dataclass
class ConfigFile:
    """Values of a configuration file, and the location of each key."""

    path: Path
    tree: Tree
    """Values, with overrides of the command line."""
    locations: dict[str, str] = field(default_factory=dict)
    """Dotted key -> `file:line` or `command line`. The key of a list's element ends with its number."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user, a line each: keys without effect, and differences from DeepSpeed."""

    def location_of(self, dotted: str) -> str:
        """Return the location of a key; if it is missing, that of its section or of the file."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            if (location := self.locations.get(".".join(parts[:length]))) is not None:
                return location
        return str(self.path)

    def describe_key(self, dotted: str) -> str:
        """Return `file:line: key` or `command line: ds.key`, to begin errors about the DeepSpeed JSON."""
        location = self.location_of(dotted)
        prefix = "ds." if location == "command line" else ""
        return f"{location}: {prefix}{dotted}"

    def keys_within(self, dotted: str) -> list[str]:
        """Return this key and all keys within it, as far as they have a location."""
        return [key for key in self.locations if f"{key}.".startswith(f"{dotted}.")]

    def override(self, parts: list[str], value: Any) -> None:
        """Set a value that the command line gives, and make the command line its location.

        Locations of keys within the old value are removed.

        Raises:
            ConfigError: A part of the key before the last is a value, not a section.
        """
        dotted = ".".join(parts)
        set_dotted(self.tree, parts, value, "command line")
        for key in self.keys_within(dotted):
            del self.locations[key]
        for length in range(1, len(parts)):
            self.locations.setdefault(".".join(parts[:length]), "command line")
        self.locations[dotted] = "command line"


def read_yaml(path: Path) -> ConfigFile:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: The file is missing or malformed, repeats a key (line and column), or is not a mapping.
    """
    tree, locations = _parse_yaml(path, read_text(path))
    return ConfigFile(path, copy.deepcopy(tree), dict(locations))  # callers may change the cached values


@lru_cache(maxsize=4)  # `plan --suggest` reads the same recipe many times, with other overrides
def _parse_yaml(path: Path, text: str) -> tuple[Tree, dict[str, str]]:
    """Return the values and locations of a YAML text. The caller must copy them, since they are cached."""
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        locations = _locate_keys(node, path)
        tree = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        location = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{location}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: for example the 45th day of a month
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found a {type(tree).__name__}")
    return tree, locations


def _locate_keys(node: Any, path: Path, prefix: str = "") -> dict[str, str]:
    """Return dotted key -> `file:line` of all keys within a YAML node."""
    locations: dict[str, str] = {}
    if isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            locations[f"{prefix}{number}"] = f"{path}:{value.start_mark.line + 1}"
            locations.update(_locate_keys(value, path, f"{prefix}{number}."))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
            if (word := _NOT_TEXT.get(key.tag)) is not None:
                problem = f"the key {key.value!r} is read as {word}, not as a text; write it in quotes"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            dotted = f"{prefix}{key.value}"
            if dotted in locations:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            locations[dotted] = f"{path}:{key.start_mark.line + 1}"
            locations.update(_locate_keys(value, path, dotted + "."))
    return locations


def read_json(path: Path) -> ConfigFile:
    """Return the object in a JSON file.

    Raises:
        ConfigError: The file is missing or malformed, repeats a key (file and line), or is not an object.
    """
    text = read_text(path)
    try:
        tree = json.loads(text, parse_int=_parse_json_integer)
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected an object of keys to values, found a {type(tree).__name__}")
        return ConfigFile(path, tree, dict(_JsonKeyFinder(path, text).find_keys("")))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None


def _parse_json_integer(digits: str) -> int | float:
    """Return an integer, or a float for 20 characters or more.

    Python refuses to convert thousands of digits to an integer. As a float, such a number is out of range.
    """
    return int(digits) if len(digits) < 20 else float(digits)


class _JsonKeyFinder:
    """Finds the line of each key of a valid JSON object."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._tokens = _TOKEN.finditer(text)
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        next(self._tokens)  # the brace that opens the object

    def find_keys(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield each dotted key and its `file:line`, of the object whose `{` was the last token."""
        keys = set()
        for token in self._tokens:
            if token[0] == "}":
                return
            if token[0] == ",":
                continue
            key = json.loads(token[0])
            location = f"{self._path}:{bisect(self._line_ends, token.start()) + 1}"
            if key in keys and not is_comment(key):
                raise ConfigError(f"{location}: {prefix}{key}: the key {key!r} is given twice")
            keys.add(key)
            yield f"{prefix}{key}", location
            next(self._tokens)  # the colon
            value = next(self._tokens)[0]
            if value == "{":
                yield from self.find_keys(f"{prefix}{key}.")
            elif value == "[":  # values in a list have the location of the list's key
                num_open = 1
                while num_open:
                    bracket = next(self._tokens)[0]
                    num_open += (bracket in "[{") - (bracket in "]}")


def is_comment(key: Any) -> bool:
    """Return whether a key of a JSON serves as a comment: `_comment`, `//`, `$schema`."""
    return isinstance(key, str) and _COMMENT.fullmatch(key) is not None


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a configuration file.

    Raises:
        ConfigError: The file cannot be read. If it is missing, the message names similar files beside it.
    """
    try:
        # Some editors begin a file with a byte order mark.
        return read_regular_file(path, MAX_CONFIGURATION_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) if siblings else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: cannot be read: Is a directory; name a file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 (byte {error.start}); convert the file (iconv -t UTF-8)"
        ) from None
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
        if node is None:  # for example an unset variable of the shell, or a comment
            raise ConfigError(f"command line: {argument} has no value; write {key}=null to unset it")
        return parts, loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        reason = f" ({error.problem})" if isinstance(error, yaml.MarkedYAMLError) and error.problem else ""
        raise ConfigError(f"command line: the value of {key} is not valid YAML{reason}: {value!r}") from None


def set_dotted(tree: Tree, parts: list[str], value: Any, location: str) -> None:
    """Set one value in nested mappings, and create the missing ones.

    Raises:
        ConfigError: A part of the key before the last is a value. The message begins with `location`.
    """
    for position, part in enumerate(parts[:-1]):
        if tree.get(part) is None:  # absent, or a section whose keys are all commented out
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            section = ".".join(parts[: position + 1])
            raise ConfigError(f"{location}: {'.'.join(parts)}: {section} is a value, not a section")
    tree[parts[-1]] = value


def get_dotted(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at `a.b.c`, or `None` if any part is absent."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean "..."?)` with the nearest valid name, or ` (valid: ...)` if none is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else f" (valid: {', '.join(options)})"
