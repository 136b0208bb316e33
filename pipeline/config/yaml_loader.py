"""YAML as recipes use it, by a loader that a few lines cannot keep busy for ever. See loading.py."""

from __future__ import annotations

import re
from typing import Any

import yaml

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
