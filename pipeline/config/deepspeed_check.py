"""Checks a DeepSpeed JSON against the installed DeepSpeed: every key of every section, and its value.

DeepSpeed silently ignores many unknown keys, and reads many values only in the middle of a run.
deepspeed_schema.json lists its keys (python -m pipeline.engine.deepspeed_schema writes it), so that nothing
slow is imported here; deepspeed_keys.py has what this trainer adds.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import deepspeed_keys as keys
from pipeline.config.loading import ConfigFile, Tree, did_you_mean, is_comment
from pipeline.errors import ConfigError

SCHEMA = Path(__file__).with_name("deepspeed_schema.json")

# JSON Schema's types: what Python reads them as, and what errors call them.
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


@functools.cache
def rules() -> dict[str, dict[str, Any]]:
    """Dotted key -> its type, bounds and choices: DeepSpeed's, with this trainer's on top."""
    found: dict[str, dict[str, Any]] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for dotted, more in keys.LIMITS.items():
        found[dotted] = found.get(dotted, {}) | more
        if "exclusiveMinimum" in more:
            found[dotted].pop("minimum", None)
    return found


@functools.cache
def _names(section: str) -> dict[str, str]:
    """Every name of a key of this section ("" is the top level) -> the name in DeepSpeed's documentation."""
    found: dict[str, str] = {}
    for dotted, rule in rules().items():
        parent, _, key = dotted.rpartition(".")
        if parent == section:
            found |= dict.fromkeys((key, *rule.get("names", ())), key)
    for dotted, key in keys.OTHER_NAMES.items():
        parent, _, other = dotted.rpartition(".")
        if parent == section:
            found[other] = key
    own = keys.SECTIONS.get(section)
    return {name: key for name, key in found.items() if own is None or key in own}


def check(file: ConfigFile) -> None:
    """Turns the file's tree into the keys that DeepSpeed documents, with a note for each that is left out.

    Left out are nulls (they stand for DeepSpeed's default), comments, sections that are switched off and keys
    that nothing reads; other names of a key become the documented one.

    Raises:
        ConfigError: a key that is unknown, dropped or not read here; a value of another type or out of range.
    """
    file.tree = _section(file, file.tree, "")


def _section(file: ConfigFile, section: Tree, prefix: str) -> Tree:
    clean: Tree = {}
    names = _names(prefix.removesuffix("."))
    for given, value in section.items():
        full = f"{prefix}{given}"
        if is_comment(given) and given not in names:
            file.notes.append(f"{file.at(full)}: a comment, passed over")
            continue
        _refuse_key(file, full, given, value, names)
        if value is None or full in keys.REMOVED or full in keys.NOT_HERE:
            continue
        name = names[given]
        name, renewed = _renewed(file, f"{prefix}{name}", value)
        dotted = f"{prefix}{name}"
        if name in clean or (name != given and section.get(name) is not None):
            raise ConfigError(f"{file.at(full)}: another name of {name}, which is given too; drop one")
        if full != dotted:
            file.places |= {dotted + at[len(full) :]: file.places[at] for at in file.below(full)}
        final = _value(file, dotted, renewed, full)
        if dotted in keys.IGNORED:
            file.notes.append(f"{file.at(full)}: passed over; {keys.IGNORED[dotted]}")
        else:
            clean[name] = final
    return clean


def _refuse_key(file: ConfigFile, full: str, given: str, value: Any, names: dict[str, str]) -> None:
    """Refuses what is unknown, dropped or not read here, unless it is switched off."""
    reason = keys.REMOVED.get(full) or keys.NOT_HERE.get(full)
    if reason is not None:
        if value is None:
            return
        if not _says_nothing(full, value):
            why = "DeepSpeed no longer has this" if full in keys.REMOVED else "not read here"
            raise ConfigError(f"{file.at(full)}: {why}; {reason}")
        if isinstance(value, dict) and full in keys.NOT_HERE and _names(full):
            _section(replace(file, notes=[]), value, f"{full}.")  # one note for all of it
        file.notes.append(f"{file.at(full)}: switched off, passed over")
    elif given not in names:
        section = full.rpartition(".")[0]
        if full in keys.ALIASES:
            raise ConfigError(f"{file.at(full)}: unknown key; {keys.ALIASES[full]}")
        if "." in given and given in rules():
            raise ConfigError(f"{file.at(full)}: unknown key; write {_nested(given)}")
        if full in rules():
            raise ConfigError(
                f"{file.at(full)}: not read here; of {section} this trainer reads "
                f"{', '.join(sorted(set(names.values())))}"
            )
        known = set(names) | ({key for key in keys.NOT_HERE if "." not in key} if not section else set())
        near = did_you_mean(given, known)
        if len(known) > 12 and "mean" not in near:
            near = ""
        raise ConfigError(f"{file.at(full)}: unknown key{near}")


def _nested(dotted: str) -> str:
    first, _, rest = dotted.partition(".")
    return f'"{first}": ' + ("{" + _nested(rest) + "}" if rest else "...")


def _says_nothing(dotted: str, value: Any) -> bool:
    """Whether a key that is not read here asks for nothing: switched off, or what DeepSpeed does anyway."""
    if isinstance(value, dict):
        if dotted in keys.ON_IF_THERE:
            return False
        if "enabled" in value:
            return value["enabled"] in (False, "auto")
        default = {key: rules().get(f"{dotted}.{key}", {}).get("default") for key in value}
        return bool(value) and all(each is None or each == default[key] for key, each in value.items())
    return value is False or value == rules().get(dotted, {}).get("default")


def _renewed(file: ConfigFile, dotted: str, value: Any) -> tuple[str, Any]:
    """The key (without its section) and value that replace a deprecated one."""
    section, _, name = dotted.rpartition(".")
    new = rules()[dotted].get("deprecated")
    if new is None or dotted in keys.IGNORED:
        return name, value
    _value(file, dotted, value, dotted)
    new = _names(section)[new]
    if rules()[f"{section}.{new}"].get("type") != "object":
        return new, value
    file.notes.append(f"{file.at(dotted)}: DeepSpeed's old word for {new}: {{device: cpu}}")
    return new, {"device": "cpu" if value is True else "none"}


def _value(file: ConfigFile, dotted: str, value: Any, said: str) -> Any:
    """The checked value, 1e9 as an integer; `said` is the key as the file has it, for errors.

    Raises:
        ConfigError: not of the type that DeepSpeed reads, or out of its range.
    """
    rule = rules()[dotted]
    kinds = [rule["type"]] if isinstance(rule.get("type"), str) else rule.get("type", [])
    if value == "auto" and "object" not in kinds and dotted not in _NEVER_AUTO:
        return value  # filled in later, or told
    given = value
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = not kinds or any(_is(kind, value) for kind in kinds)
    if not fits or not _in_range(rule, value):
        expected = _expected(dotted, rule, kinds)
        raise ConfigError(f"{file.at(said)}: expected {expected}, given {given!r}")
    if isinstance(value, dict) and _names(dotted):
        return _section(file, value, f"{dotted}.")
    return value


def _is(kind: str, value: Any) -> bool:
    return isinstance(value, TYPES[kind][0]) and (kind == "boolean" or not isinstance(value, bool))


def _in_range(rule: dict[str, Any], value: Any) -> bool:
    if isinstance(value, list) and rule.get("items") == "string":
        return all(isinstance(each, str) for each in value)
    if "enum" in rule:
        # DeepSpeed turns the letters of its own words to one case before it compares.
        words = (value.lower(), value.upper()) if rule.get("anyCase") and isinstance(value, str) else (value,)
        return any(word in rule["enum"] for word in words)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return (
        math.isfinite(value)
        and rule.get("minimum", value) <= value <= rule.get("maximum", value)
        and rule.get("exclusiveMinimum", -math.inf) < value < rule.get("exclusiveMaximum", math.inf)
        and ("multipleOf" not in rule or value % rule["multipleOf"] == 0)
    )


def _expected(dotted: str, rule: dict[str, Any], kinds: list[str]) -> str:
    if "enum" in rule:
        words = [str(each) for each in rule["enum"]]
    elif dotted in AUTO and kinds == ["boolean"]:
        words = ["true", "false", '"auto"']
    else:
        bounds = " and ".join(f"{word} {rule[bound]:,}" for bound, word in BOUNDS.items() if bound in rule)
        multiple = f", a multiple of {rule['multipleOf']}" if "multipleOf" in rule else ""
        items = " of texts" * ("items" in rule)
        types = " or ".join(TYPES[kind][1] for kind in kinds)
        return types + items + (f" {bounds}" if bounds else "") + multiple
    return f"{', '.join(words[:-1])} or {words[-1]}"


# Keys whose "auto" the device decides.
AUTO = {"bf16.enabled", "compile.enabled", "fp16.enabled", "tf32.enabled"}
_NEVER_AUTO = {"pipeline.partition", "zero_optimization.stage"}
