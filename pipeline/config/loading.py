"""A configuration file, YAML or JSON, with the command line's overrides: a tree, and where each key stands.

Every error names the file, the line and the key.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pipeline.errors import ConfigError
from pipeline.files import CONFIGURATION_LIMIT, read_plain

MOST_NODES, MOST_LEVELS = 100_000, 64  # of a recipe, aliases written out


class Loader(yaml.SafeLoader):
    """SafeLoader that reads numbers as people write them (3e-4, and no octal 010), nothing without bounds."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._composed += 1
        if self._composed > MOST_NODES:  # before seconds are spent on the rest
            raise yaml.MarkedYAMLError(
                problem=f"more than {MOST_NODES:,} values", problem_mark=self.get_mark()
            )
        return super().compose_node(parent, index)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _count_nodes(node, {}, 1)
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """An integer of at most 64 bits: nothing here takes more, and Python does not write out all."""
        try:
            value = int(super().construct_yaml_int(node))
        except ValueError:  # more digits than Python converts
            value = 1 << 64
        if abs(value) >= 1 << 64:
            problem = f"a number of {len(node.value):,} digits, more than 64 bits hold"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


def _count_nodes(node: Any, known: dict[int, tuple[int, int]], level: int) -> tuple[int, int]:
    """How many values a node stands for when its aliases are written out, and how many levels.

    Raises:
        MarkedYAMLError: too many, or one that holds itself: a few lines can stand for billions.
    """
    if id(node) not in known:
        known[id(node)] = (0, 0)  # while its own values are counted
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        found = [_count_nodes(each, known, level + 1) for each in inner]
        known[id(node)] = 1 + sum(n for n, _ in found), 1 + max((depth for _, depth in found), default=0)
    count, levels = known[id(node)]
    problem = "the value holds itself" if count == 0 else None
    if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        problem = "a NUL character, which no name and no path can have"
    if count > MOST_NODES:
        problem = f"stands for more than {MOST_NODES:,} values"
    elif level + levels > MOST_LEVELS:
        problem = "nested too deeply"
    if problem is not None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return count, levels


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
# YAML 1.1 reads 010 as 8 and 1:30 as 90, which nobody means: here both stay texts.
_NUMBERS = {
    "int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    "float": r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_TAG = "tag:yaml.org,2002:"
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in each if tag.removeprefix(_TAG) not in _NUMBERS]
    for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


class Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes the texts which this loader alone takes for numbers: '1e3'."""


Dumper.yaml_implicit_resolvers = {
    first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
    + Loader.yaml_implicit_resolvers.get(first, [])
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *Loader.yaml_implicit_resolvers}
}


Tree = dict[str, Any]

# Plain words that YAML 1.1 takes for a value: on, off, yes, no, ~
_NOT_TEXT = {"tag:yaml.org,2002:bool": "true or false", "tag:yaml.org,2002:null": "nothing"}

# Keys that people write for each other: JSON has no comments.
_COMMENT = re.compile(r"(?i)[_/#$].*|(?:.*_)?comments?\d*|descriptions?|notes?")
LARGEST = 2**63 - 1
"""No whole number in a configuration is larger: it counts, or measures memory."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


@dataclass
class ConfigFile:
    """What a file says, and where: `places` has `file:line` or `command line` for each dotted key."""

    path: Path
    tree: Tree
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """A line for each key that was taken, and that nobody reads."""

    def place(self, dotted: str) -> str:
        """`command line`, `file:line` of the key or of the section it is missing in, or the file."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            if (place := self.places.get(".".join(parts[:length]))) is not None:
                return place
        return str(self.path)

    def at(self, dotted: str) -> str:
        """`file:line: key` or `command line: ds.key`, as errors about the DeepSpeed JSON begin."""
        place = self.place(dotted)
        return f"{place}: {'ds.' * (place == 'command line')}{dotted}"

    def below(self, dotted: str) -> list[str]:
        """Of the keys whose place is known: this one, and all within it."""
        return [at for at in self.places if f"{at}.".startswith(f"{dotted}.")]

    def override(self, parts: list[str], value: Any) -> None:
        """Sets what the command line says, and that it stands there."""
        dotted = ".".join(parts)
        set_dotted(self.tree, parts, value, "command line")
        for at in self.below(dotted):
            del self.places[at]
        for length in range(1, len(parts)):
            self.places.setdefault(".".join(parts[:length]), "command line")
        self.places[dotted] = "command line"


def read_yaml(path: Path) -> ConfigFile:
    """The mapping in a YAML file.

    Raises:
        ConfigError: missing, unreadable, malformed or a key given twice (line and column), not a mapping.
    """
    tree, places = _parsed(path, read_text(path))
    return ConfigFile(path, copy.deepcopy(tree), dict(places))


@lru_cache(maxsize=4)  # a plan asks for the same recipe with other overrides, again and again
def _parsed(path: Path, text: str) -> tuple[Tree, dict[str, str]]:
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        places = _key_places(node, path)
        tree = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 45th day of a month
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
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
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected an object of keys to values, found a {type(tree).__name__}")
        words = _words(text)
        return ConfigFile(path, tree, dict(_json_places(next(words)[0], words, path)))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None


def _words(text: str) -> Iterator[tuple[str, int]]:
    """Each token of a JSON text, and its line."""
    line, counted = 1, 0
    for token in _TOKEN.finditer(text):
        line, counted = line + text.count("\n", counted, token.start()), token.start()
        yield token[0], line


def _json_places(
    opening: str, words: Iterator[tuple[str, int]], path: Path, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """(dotted key, `file:line`) of each key within the value that begins with `opening`, in valid JSON."""
    if opening == "{":
        keys = set()
        for word, line in words:
            if word == "}":
                return
            if word == ",":
                continue
            key = json.loads(word)
            if key in keys and not is_comment(key):
                raise ConfigError(f"{path}:{line}: {prefix}{key}: the key {key!r} is given twice")
            keys.add(key)
            yield f"{prefix}{key}", f"{path}:{line}"
            next(words)  # the colon
            yield from _json_places(next(words)[0], words, path, f"{prefix}{key}.")
    elif opening == "[":
        number = 0
        for word, _ in words:
            if word == "]":
                return
            if word == ",":
                number += 1
            else:
                yield from _json_places(word, words, path, f"{prefix}{number}.")


def is_comment(key: Any) -> bool:
    """Whether a key is one that people write for each other: `_comment`, `//`, `$schema`."""
    return isinstance(key, str) and _COMMENT.fullmatch(key) is not None


def read_text(path: Path) -> str:
    """The UTF-8 text of a configuration file; a ConfigError names what is near when it is missing."""
    try:
        # Some editors begin a file with a byte order mark.
        return read_plain(path, CONFIGURATION_LIMIT).decode("utf-8-sig")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) if siblings else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        inside = sorted(each.name for each in path.glob("*") if each.suffix in (".yaml", ".yml", ".json"))
        hint = f": {', '.join(inside[:5])}" if inside else ""
        raise ConfigError(f"{path}: cannot be read: Is a directory; name a file in it{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_override(argument: str) -> tuple[list[str], Any]:
    """`model.num_layers=4` -> (["model", "num_layers"], 4). The value is read as YAML.

    Raises:
        ConfigError: no `=`, an empty part in the key, no value, or one that is not YAML.
    """
    key, equals, value = argument.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or parts == ["ds"]:
        raise ConfigError(f"command line: {argument!r} is not an override; write section.key=value")
    try:
        loader = Loader(value)
        node = loader.get_single_node()
        if node is None:  # a variable of the shell that was not set, or a comment
            raise ConfigError(f"command line: {argument} has no value; write {key}=null to unset it")
        return parts, loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = f" ({error.problem})" if isinstance(error, yaml.MarkedYAMLError) and error.problem else ""
        raise ConfigError(f"command line: the value of {key} is not valid YAML{reason}: {value!r}") from None


def set_dotted(tree: Tree, parts: list[str], value: Any, place: str) -> None:
    """Sets one value in nested mappings, making those that are missing; errors begin with `place`."""
    for position, part in enumerate(parts[:-1]):
        if tree.get(part) is None:  # absent, or a section whose keys are all commented out
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            section = ".".join(parts[: position + 1])
            raise ConfigError(f"{place}: {'.'.join(parts)}: {section} is a value, not a section")
    tree[parts[-1]] = value


def get_dotted(tree: Mapping[str, Any], dotted: str) -> Any:
    """The value at `a.b.c`, or None where any part is absent."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """` (did you mean "..."?)`, or the valid names where none is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(given, options, n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else f" (valid: {', '.join(options)})"
