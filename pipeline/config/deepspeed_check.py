"""Checks every key and value of a DeepSpeed JSON against the installed DeepSpeed.

DeepSpeed silently ignores many unknown keys, and reads many values only in the middle of a run. Importing
DeepSpeed's pydantic models would import torch, which takes seconds. So deepspeed_schema.json lists the
fields of these models (tests/config/deepspeed_schema.py writes that file), and deepspeed_keys.py adds the
rules of this trainer.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from pipeline.config import deepspeed_keys as keys
from pipeline.config.loading import ConfigFile, Tree, did_you_mean, get_dotted, is_comment
from pipeline.errors import ConfigError

MASTER_WEIGHT_KEYS = tuple(f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16"))
OPTIMIZER_STATES_KEY = "bf16.bf16_optimizer_states"
SCHEMA = Path(__file__).with_name("deepspeed_schema.json")
MAX_NUMBER = 2**63 - 1
"""Largest absolute value of a number in the file. Integers in it are counts or bytes; all fit 64 bits."""

# Type of JSON Schema -> Python type, and its name in errors.
TYPES: dict[str, tuple[Any, str]] = {
    "boolean": (bool, "true or false"),
    "integer": (int, "a whole number"),
    "number": (int | float, "a number"),
    "string": (str, "a text"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
}
BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "up to",
    "exclusiveMaximum": "below",
}


def has_16bit_optimizer_states(filled: Tree) -> bool:
    """Return whether the optimizer's states are stored in bf16, according to a resolved JSON."""
    return bool(get_dotted(filled, OPTIMIZER_STATES_KEY))


def has_16bit_master_weights(filled: Tree) -> bool:
    """Return whether a resolved JSON has bf16 or fp16 master weights, and so no fp32 weights."""
    return any(get_dotted(filled, key) for key in MASTER_WEIGHT_KEYS)


@functools.cache
def load_key_rules() -> dict[str, dict[str, Any]]:
    """Return dotted key -> its type, bounds and choices, as JSON Schema.

    They are DeepSpeed's, except where `deepspeed_keys.LIMITS` of this trainer overrides them.
    """
    rules: dict[str, dict[str, Any]] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for dotted, limits in keys.LIMITS.items():
        rules[dotted] = rules.get(dotted, {}) | limits
        if "exclusiveMinimum" in limits:
            rules[dotted].pop("minimum", None)
    return rules


@functools.cache
def _list_key_names(section: str) -> dict[str, str]:
    """Return accepted name -> name in DeepSpeed's documentation, of each key of this section.

    `section` is its dotted key, empty for the whole file.
    """
    names: dict[str, str] = {}
    for dotted, rule in load_key_rules().items():
        parent, _, key = dotted.rpartition(".")
        if parent == section:
            names |= dict.fromkeys((key, *rule.get("names", ())), key)
    for dotted, key in keys.SYNONYMS.items():
        parent, _, other = dotted.rpartition(".")
        if parent == section:
            names[other] = key
    read_keys = keys.READ_KEYS.get(section)  # `None`: all of them
    return {name: key for name, key in names.items() if read_keys is None or key in read_keys}


def check_deepspeed_json(file: ConfigFile) -> None:
    """Replace the file's tree by checked values under the names of DeepSpeed's documentation.

    Nulls, which mean DeepSpeed's default, are left out. So are comments, features that are switched off, and
    keys that have no effect; `file.notes` gets a line for each of these.

    Raises:
        ConfigError: A key is unknown or not supported, or a value has a wrong type or is out of range.
    """
    file.tree = _check_section(file, file.tree, "")


def _check_section(file: ConfigFile, section: Tree, prefix: str) -> Tree:
    """Return the checked values of a section; see `check_deepspeed_json`.

    Args:
        file: File for notes and errors. It gets locations for keys under their names in DeepSpeed's
            documentation.
        section: Values of the section.
        prefix: Dotted key of the section with a dot at its end; empty for the whole file.
    """
    checked: Tree = {}
    names = _list_key_names(prefix.removesuffix("."))
    for key_name, value in section.items():
        written = f"{prefix}{key_name}"
        if is_comment(key_name) and key_name not in names:
            file.notes.append(f"{file.describe_key(written)}: ignored; it is a comment")
            continue
        if written in keys.UNSUPPORTED:
            if not _is_off(written, value):
                raise ConfigError(f"{file.describe_key(written)}: not supported; {keys.UNSUPPORTED[written]}")
            if value is not None:
                file.notes.append(f"{file.describe_key(written)}: ignored; it is switched off")
            continue
        if key_name not in names:
            raise ConfigError(f"{file.describe_key(written)}: {_explain_unknown(written, key_name, names)}")
        if value is None:
            continue
        name = names[key_name]
        dotted = f"{prefix}{name}"
        if name in checked or (name != key_name and section.get(name) is not None):
            raise ConfigError(
                f"{file.describe_key(written)}: another name of {name}, which is given too; remove one of "
                "them"
            )
        if written != dotted:
            file.locations |= {
                dotted + key[len(written) :]: file.locations[key] for key in file.keys_within(written)
            }
        checked_value = _check_value(file, dotted, value, written)
        if dotted not in keys.IGNORED:
            checked[name] = checked_value
        elif not _is_off(dotted, value):
            file.notes.append(f"{file.describe_key(written)}: ignored; {keys.IGNORED[dotted]}")
    return checked


def _explain_unknown(written: str, given: str, names: dict[str, str]) -> str:
    """Return the error text for a key that its section does not have."""
    if written in keys.ALIASES:
        return f"unknown key; {keys.ALIASES[written]}"
    if "." in given and given in load_key_rules():
        return f"unknown key; write {_format_nested(given)}"
    section = written.rpartition(".")[0]
    if written in load_key_rules():
        read_keys = ", ".join(sorted(set(names.values())))
        return f"not supported; of {section} this trainer reads {read_keys}"
    valid = set(names)
    if not section:
        valid |= {key for key in keys.UNSUPPORTED if "." not in key}
    hint = did_you_mean(given, valid)
    lists_all = "did you mean" not in hint
    return "unknown key" if lists_all and len(valid) > 12 else f"unknown key{hint}"


def _format_nested(dotted: str) -> str:
    """Return `"a": {"b": ...}` for `a.b`."""
    first, _, rest = dotted.partition(".")
    return f'"{first}": ' + ("{" + _format_nested(rest) + "}" if rest else "...")


def _is_off(dotted: str, value: Any) -> bool:
    """Return whether the value of a key switches it off, or is DeepSpeed's default."""
    if isinstance(value, dict) and dotted not in keys.ON_IF_PRESENT:
        if "enabled" in value:
            return value["enabled"] in (False, "auto")
        return bool(value) and all(_is_off(f"{dotted}.{key}", each) for key, each in value.items())
    return value is None or value is False or value == load_key_rules().get(dotted, {}).get("default")


def _check_value(file: ConfigFile, dotted: str, value: Any, written: str) -> Any:
    """Return the checked value, with 1e9 as an integer.

    Args:
        file: File for errors, and for the notes of a section.
        dotted: Key under its name in DeepSpeed's documentation.
        value: Value to check.
        written: Key as the file has it, for errors.

    Raises:
        ConfigError: The value is not of the type that DeepSpeed reads, or out of its range.
    """
    rule = load_key_rules()[dotted]
    types = rule.get("type", [])  # JSON Schema's names; empty for any type
    if isinstance(types, str):
        types = [types]
    may_be_auto = "object" not in types and dotted not in keys.NEVER_AUTO
    if value == "auto" and may_be_auto:
        return value  # resolve_deepspeed fills it, or raises
    given = value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):  # an integer for Python, but not for JSON
        has_type = not types or "boolean" in types
    else:
        has_type = not types or any(isinstance(value, TYPES[name][0]) for name in types)
    if not has_type or not _is_in_range(rule, value):
        advice = f"; {rule['advice']}" if "advice" in rule else ""
        expected = _describe_expected(dotted, rule, types)
        raise ConfigError(f"{file.describe_key(written)}: expected {expected}, given {given!r}{advice}")
    if isinstance(value, dict) and _list_key_names(dotted):
        return _check_section(file, value, f"{dotted}.")
    return value


def _is_in_range(rule: dict[str, Any], value: Any) -> bool:
    """Return whether a value of the right type is one of the rule's choices, or within its bounds."""
    if isinstance(value, list) and rule.get("items") == "string":
        return all(isinstance(each, str) for each in value)
    if "enum" in rule:
        if rule.get("anyCase") and isinstance(value, str):  # DeepSpeed ignores the case of such a value
            return value.lower() in rule["enum"] or value.upper() in rule["enum"]
        return value in rule["enum"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return (
        math.isfinite(value)
        and abs(value) <= MAX_NUMBER
        and rule.get("minimum", value) <= value <= rule.get("maximum", value)
        and rule.get("exclusiveMinimum", -math.inf) < value < rule.get("exclusiveMaximum", math.inf)
        and ("multipleOf" not in rule or value % rule["multipleOf"] == 0)
    )


def _describe_expected(dotted: str, rule: dict[str, Any], types: list[str]) -> str:
    """Return the text that follows "expected" in an error: the types, choices and bounds of a key."""
    if "enum" in rule:
        words = [str(each).lower() if isinstance(each, bool) else str(each) for each in rule["enum"]]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if dotted in keys.DEVICE_DECIDES_AUTO and types == ["boolean"]:
        return 'true, false or "auto"'
    bounds = [f" {word} {rule[bound]:,}" for bound, word in BOUNDS.items() if bound in rule]
    multiple = f", a multiple of {rule['multipleOf']}" if "multipleOf" in rule else ""
    items = " of texts" if "items" in rule else ""
    names = " or ".join(TYPES[name][1] for name in types) or "a finite number"
    return names + items + " and".join(bounds) + multiple
