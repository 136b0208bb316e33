"""YAML recipe + command-line overrides -> RunConfig. Every error names the file, the line and the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.config.aliases import ALIASES
from pipeline.config.consistency import contradictions
from pipeline.config.schema import RunConfig
from pipeline.config.yaml_loader import Loader
from pipeline.errors import ConfigError
from pipeline.foreign import CONFIGURATION, read_plain

Tree = dict[str, Any]

# What people look for in the recipe but DeepSpeed's JSON decides.
DEEPSPEED_OWNS = {
    "zero_optimization", "zero_stage", "stage", "fp16", "bf16", "precision", "dtype", "offload",
    "offload_optimizer", "offload_param", "loss_scale", "tensor_parallel", "pipeline",
}  # fmt: skip


# Plain words that YAML 1.1 takes for a value: on, off, yes, no, ~
_NOT_TEXT = {"tag:yaml.org,2002:bool": "true or false", "tag:yaml.org,2002:null": "nothing"}


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """` (did you mean "..."?)`, or the valid names where none is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(given, options, n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else f" (valid: {', '.join(options)})"


def read_yaml(path: Path) -> tuple[Tree, dict[str, str]]:
    """The mapping in a YAML file, and the place (`file:line`) of each of its dotted keys.

    Raises:
        ConfigError: missing, unreadable, malformed or a key given twice (line and column), not a mapping.
    """
    text = read_text(path)
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


def read_text(path: Path) -> str:
    """The UTF-8 text of a configuration file; a ConfigError names what is near when it is missing."""
    try:
        # Some editors begin a file with a byte order mark.
        return read_plain(path, CONFIGURATION).decode("utf-8-sig")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) if siblings else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{path}: cannot be read: {error}") from None


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


def override(tree: Tree, places: dict[str, str], parts: list[str], value: Any) -> None:
    """Sets what the command line says, and that it stands there; `places` as read_yaml returns them."""
    dotted = ".".join(parts)
    set_dotted(tree, parts, value, "command line")
    for at in [at for at in places if f"{at}.".startswith(f"{dotted}.")]:
        del places[at]
    for length in range(1, len(parts)):
        places.setdefault(".".join(parts[:length]), "command line")
    places[dotted] = "command line"


def validate_recipe(tree: Tree, source: Path, places: Mapping[str, str]) -> RunConfig:
    """The typed recipe.

    Args:
        tree: What the recipe and the command line say.
        source: The recipe's file.
        places: Where each dotted key stands.

    Raises:
        ConfigError: one line a problem, each with file, line, key, what was given and what is valid.
    """
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(problem, source, places) for problem in error.errors()]
        unique = list(dict.fromkeys(problems))
        raise ConfigError("\n".join(unique)) from None
    for keys, message in contradictions(config):
        found = [place_of(key, source, places) for key in keys]
        place = "command line" if "command line" in found else found[0]
        raise ConfigError(f"{place}: {message}")
    return config


def place_of(dotted: str, source: Path, places: Mapping[str, str]) -> str:
    """`command line`, `file:line` of the key or of the section it is missing in, or the recipe's file."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if (place := places.get(".".join(parts[:length]))) is not None:
            return place
    return str(source)


def _explain(problem: Any, source: Path, places: Mapping[str, str]) -> str:
    parts, section = _locate(problem["loc"])
    kind, given = problem["type"], problem["input"]
    if kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(given, dict):
        parts.append("kind")
    dotted = ".".join(parts)
    place = place_of(dotted, source, places)
    if kind == "value_error" and any(
        at.startswith(f"{dotted}.") and there == "command line" for at, there in places.items()
    ):
        place = "command line"  # keys of a section that exclude each other, one of them given there
    start = f"{place}: {_visible(dotted)}: "
    if kind == "extra_forbidden":
        return start + _unknown(parts[-1], dotted, section)
    if kind == "union_tag_invalid":
        tag, expected = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'custom'", "")
        hint = did_you_mean(tag, re.findall(r"'(\w+)'", expected))
        return f"{start}{tag!r} is no known kind{hint}; your own: package.module:function"
    if kind == "missing" or (kind == "union_tag_not_found" and isinstance(given, dict)):
        return start + "missing"
    if kind in ("model_type", "model_attributes_type", "union_tag_not_found"):
        return f"{start}expected a section of keys and values, given {given!r}"
    if kind == "value_error":  # one of our own, which says what was given
        return start + str(problem["ctx"]["error"])
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{start}{message}, given {given!r}"


def _unknown(key: str, dotted: str, section: type[BaseModel] | None) -> str:
    """What is said of a key that its section does not have."""
    if not key.isprintable():
        return "unknown key; what is escaped here does not show: type the line anew, with plain spaces"
    if key in ("deepspeed", "deepspeed_config"):
        return "unknown key; the DeepSpeed JSON is an option of the command: --deepspeed FILE"
    if key in DEEPSPEED_OWNS:
        return "the DeepSpeed JSON decides this (--deepspeed FILE, or ds.KEY=VALUE)"
    if ALIASES.get(key, dotted) != dotted:  # the same: a key of another kind of this section
        return f"unknown key; here it is {ALIASES[key]}"
    hint = did_you_mean(key, section.model_fields if section else {})
    if "did you mean" not in hint and (kinds := _kinds_with(key, dotted)):
        hint = f"; it goes with kind {' or '.join(kinds)}"
    return f"unknown key{hint}"


def _kinds_with(key: str, dotted: str) -> list[str]:
    """Of a section whose kind chooses its keys: the kinds that have this one."""
    top = RunConfig.model_fields.get(dotted.removesuffix(f".{key}"))
    members = _sections_in(top.annotation)[2] if top else {}
    return [kind for kind, member in members.items() if key in member.model_fields and kind != "auto"]


def _visible(text: str) -> str:
    """The text with what does not show, as a no-break space, written out: `\\xa0`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _locate(loc: tuple[Any, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """Dotted parts of a pydantic location without the union tags, and the section the last part is in."""
    parts: list[str] = []
    section: type[BaseModel] | None = RunConfig
    inside: Any = None  # annotation of what a list or dict of sections holds
    members: dict[str, type[BaseModel]] = {}
    for item in loc[:-1]:
        if item in members:
            section, members = members[item], {}
            continue
        parts.append(str(item))
        field = section.model_fields.get(str(item)) if section is not None else None
        annotation = inside if inside is not None else field.annotation if field is not None else None
        section, inside, members = _sections_in(annotation)
    last = [] if loc[-1] in members else [str(loc[-1])]
    return parts + last, section


def _sections_in(annotation: Any) -> tuple[type[BaseModel] | None, Any, dict[str, type[BaseModel]]]:
    """The section an annotation is; or what its list or dict holds; or its union's members by tag."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, None, {}
    if get_origin(annotation) in (list, dict):
        return None, get_args(annotation)[-1], {}
    members = {}
    for member in get_args(annotation):
        tagged = get_args(member)
        if len(tagged) == 2 and hasattr(tagged[1], "tag"):
            members[tagged[1].tag] = tagged[0]
        elif get_origin(member) in (list, dict):  # or None
            return None, get_args(member)[-1], {}
    return None, None, members
