"""YAML recipe + command-line overrides -> RunConfig. Every error names the file, the line and the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

Tree = dict[str, Any]

# What people look for in the recipe but DeepSpeed's JSON decides.
DEEPSPEED_OWNS = {
    "zero_optimization", "zero_stage", "stage", "fp16", "bf16", "precision", "dtype", "offload",
    "offload_optimizer", "offload_param", "loss_scale", "tensor_parallel", "pipeline",
}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number (YAML 1.1 takes it for text) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """` (did you mean "..."?)`, or the valid names where none is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(given, options, n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else f" (valid: {', '.join(options)})"


def read_yaml(path: Path) -> tuple[Tree, dict[str, int]]:
    """The mapping in a YAML file, and the line of each of its dotted keys.

    Raises:
        ConfigError: missing, unreadable, malformed (with line and column), or not a mapping.
    """
    text = read_text(path)
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
        lines = _key_lines(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found a {type(tree).__name__}")
    return tree, lines


def read_text(path: Path) -> str:
    """The UTF-8 text of a configuration file; a ConfigError names what is near when it is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) if siblings else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _key_lines(node: Any, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            lines[dotted] = key.start_mark.line + 1
            lines.update(_key_lines(value, dotted + "."))
    return lines


def parse_override(argument: str) -> tuple[list[str], Any]:
    """`model.num_layers=4` -> (["model", "num_layers"], 4). The value is read as YAML.

    Raises:
        ConfigError: no `=`, an empty part in the key, or a value that is not YAML.
    """
    key, equals, value = argument.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"command line: {argument!r} is not an override; write section.key=value")
    try:
        return parts, yaml.load(value, Loader=_Loader)  # noqa: S506
    except yaml.YAMLError:
        raise ConfigError(f"command line: the value of {key} is not valid YAML: {value!r}") from None


def set_dotted(tree: Tree, parts: list[str], value: Any) -> None:
    """Sets one value in nested mappings, making those that are missing."""
    for position, part in enumerate(parts[:-1]):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"command line: {'.'.join(parts)}: {'.'.join(parts[: position + 1])} is a value, not a section"
            )
    tree[parts[-1]] = value


def get_dotted(tree: Mapping[str, Any], dotted: str) -> Any:
    """The value at `a.b.c`, or None where any part is absent."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def validate_recipe(tree: Tree, source: Path, lines: Mapping[str, int], overridden: set[str]) -> RunConfig:
    """The typed recipe.

    Raises:
        ConfigError: one line a problem, each with file, line, key, what was given and what is valid.
    """
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(problem, source, lines, overridden) for problem in error.errors()]
        unique = list(dict.fromkeys(problems))
        raise ConfigError("\n".join(unique)) from None
    if (config.max_steps is None) == (config.max_epochs is None):
        raise ConfigError(f"{source}: give exactly one of max_steps and max_epochs")
    return config


def _explain(problem: Any, source: Path, lines: Mapping[str, int], overridden: set[str]) -> str:
    parts, section = _locate(problem["loc"])
    dotted = ".".join(parts)
    if dotted in overridden:
        place = "command line"
    else:
        known = next(
            (".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in lines), ""
        )
        place = f"{source}:{lines[known]}" if known else str(source)
    kind = problem["type"]
    if kind == "extra_forbidden":
        if parts[-1] in DEEPSPEED_OWNS:
            return f"{place}: {dotted}: the DeepSpeed JSON decides this (--deepspeed FILE, or ds.KEY=VALUE)"
        valid = section.model_fields if section else {}
        return f"{place}: {dotted}: unknown key{did_you_mean(parts[-1], valid)}"
    if kind == "union_tag_invalid":
        given, expected = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'custom'", "")
        options = re.findall(r"'(\w+)'", expected)
        hint = did_you_mean(given, options)
        return f"{place}: {dotted}.kind: {given!r} is no known kind{hint}; your own: package.module:function"
    if kind == "union_tag_not_found":
        return f"{place}: {dotted}.kind: missing"
    if kind == "missing":
        return f"{place}: {dotted}: missing"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{place}: {dotted}: {message}, given {problem['input']!r}"


def _locate(loc: tuple[Any, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """Dotted parts of a pydantic location without the union tags, and the section the last part is in."""
    parts: list[str] = []
    section: type[BaseModel] | None = RunConfig
    members: dict[str, type[BaseModel]] = {}
    for item in loc:
        if item in members:
            section, members = members[item], {}
            continue
        parts.append(str(item))
        if section is not None and item is not loc[-1]:
            annotation = section.model_fields[item].annotation if item in section.model_fields else None
            members = {}
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                section = annotation
            else:
                for member in get_args(annotation):
                    tagged = get_args(member)
                    if len(tagged) == 2 and hasattr(tagged[1], "tag"):
                        members[tagged[1].tag] = tagged[0]
    return parts, section
