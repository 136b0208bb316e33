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
from pipeline.config.loading import ConfigFile, Tree, did_you_mean, get_dotted, is_comment
from pipeline.errors import ConfigError

MASTERS = {name: f"{name}.{name}_master_weights_and_grads" for name in ("bf16", "fp16")}
STATES = "bf16.bf16_optimizer_states"


def has_half_states(filled: Tree) -> bool:
    """Whether what the optimizer keeps of each parameter is bf16 as well."""
    return bool(get_dotted(filled, STATES))


def has_half_masters(filled: Tree) -> bool:
    """Whether there are no fp32 weights."""
    return any(get_dotted(filled, key) for key in MASTERS.values())


def refuse_half_masters(file: ConfigFile, filled: Tree, kind: str, precision: str) -> None:
    """Check them against the rest of a file that is filled in, and was checked before.

    Args:
        kind: Of optimizer.
        precision: What the run computes in.

    Raises:
        ConfigError: they cannot stand beside it.
    """
    for name, key in MASTERS.items():
        if not get_dotted(filled, key):
            continue
        if wrong := _wrong(filled, name, kind, precision):
            raise ConfigError(f"{file.at(key)}: {wrong}")


def _wrong(filled: Tree, name: str, kind: str, precision: str) -> str | None:
    if precision != name:
        return f"this run computes in {precision}; set {name}.enabled: true, or drop the key"
    if (get_dotted(filled, "pipeline.stages") or 1) > 1:
        return "pipeline stages keep their masters in fp32; drop it, or take ZeRO without stages"
    stage = get_dotted(filled, "zero_optimization.stage")
    if name == "bf16" and stage == 1 and get_dotted(filled, "data_types.grad_accum_dtype") == "fp32":
        return (
            "ZeRO 1 that sums gradients in fp32 keeps its masters in fp32; set zero_optimization.stage 2, or "
            "drop data_types.grad_accum_dtype"
        )
    device = get_dotted(filled, "zero_optimization.offload_optimizer.device")
    if device == "nvme":
        return "what is swapped to a disk is fp32; set zero_optimization.offload_optimizer.device: cpu"
    if device != "cpu" and not has_half_states(filled):
        more = f"{STATES}: true beside it, or " if name == "bf16" else ""
        return (
            "DeepSpeed steps it with fp32 states in host memory alone; set "
            f"{more}zero_optimization.offload_optimizer.device: cpu"
        )
    if device == "cpu" and kind != "adamw":
        return "in host memory it is stepped by DeepSpeed's CPU Adam alone; set optimizer.kind: adamw"
    ratio = get_dotted(filled, "zero_optimization.offload_optimizer.ratio")
    if device == "cpu" and ratio not in (None, 1):
        key = "zero_optimization.offload_optimizer.ratio"
        return f"the part that stays on the device has fp32 states; drop {key}"
    return None


def refuse_conflicts(file: ConfigFile) -> None:
    """Holds a checked file to the table below.

    Raises:
        ConfigError: a key that cannot stand beside the others.
    """
    for dotted, wrong, message in _TOGETHER:
        if wrong(file.tree):
            raise ConfigError(f"{file.at(dotted)}: {message}")


def _get(tree: Tree, dotted: str) -> Any:
    default = rules()[dotted].get("default")
    value = get_dotted(tree, dotted)
    return default if value is None or value == "auto" else value


def _stage(tree: Tree) -> int:
    return int(_get(tree, "zero_optimization.stage"))


def _no_path(section: str) -> tuple[str, Any, str]:
    at = f"zero_optimization.{section}"
    return (
        f"{at}.device",
        lambda tree: get_dotted(tree, f"{at}.device") == "nvme" and not get_dotted(tree, f"{at}.nvme_path"),
        f"nvme needs a folder on a local NVMe disk; set {at}.nvme_path",
    )


def _no_master_weights(dotted: str) -> tuple[str, Any, str]:
    return (
        dotted,
        lambda tree: _get(tree, dotted) and not _stage(tree),
        "only ZeRO has master weights; set zero_optimization.stage 1, 2 or 3",
    )


def _scatters(tree: Tree, stage: int) -> bool:
    return _stage(tree) == stage and bool(_get(tree, "zero_optimization.reduce_scatter"))


# (key, whether it is wrong with the others, what to change).
_TOGETHER = [
    _no_path("offload_optimizer"),
    _no_path("offload_param"),
    (
        "zero_optimization.compute_grad_norm",
        lambda tree: not _get(tree, "zero_optimization.compute_grad_norm"),
        "the norm is logged, and without one nothing guards against gradients that are not finite; drop it",
    ),
    (
        "zero_optimization.offload_optimizer.ratio",
        lambda tree: _get(tree, "zero_optimization.offload_optimizer.ratio") < 1 and _stage(tree) < 3,
        "only ZeRO 3 offloads a part; set zero_optimization.stage 3, or drop it",
    ),
    _no_master_weights("bf16.bf16_master_weights_and_grads"),
    _no_master_weights("fp16.fp16_master_weights_and_grads"),
    (
        "bf16.bf16_optimizer_states",
        lambda tree: (
            _get(tree, "bf16.bf16_optimizer_states") and not _get(tree, "bf16.bf16_master_weights_and_grads")
        ),
        "needs bf16.bf16_master_weights_and_grads: true",
    ),
    (
        "prescale_gradients",
        lambda tree: _get(tree, "prescale_gradients") and _scatters(tree, 2),
        "DeepSpeed does not scale gradients beforehand where ZeRO 2 scatters them; set "
        "zero_optimization.stage 1, or zero_optimization.reduce_scatter: false",
    ),
    (
        "prescale_gradients",
        lambda tree: _get(tree, "prescale_gradients") and _scatters(tree, 3),
        "DeepSpeed does not scale gradients beforehand with ZeRO 3; drop it, or set "
        "zero_optimization.stage 1",
    ),
    (
        "gradient_predivide_factor",
        lambda tree: _get(tree, "gradient_predivide_factor") != 1 and _scatters(tree, 2),
        "DeepSpeed does not divide gradients beforehand where ZeRO 2 scatters them; set "
        "zero_optimization.stage 1, or zero_optimization.reduce_scatter: false",
    ),
    (
        "gradient_predivide_factor",
        # Without reduce_scatter it starts, and never multiplies by a factor that is the number of ranks.
        lambda tree: _get(tree, "gradient_predivide_factor") != 1 and _stage(tree) == 3,
        "DeepSpeed does not divide gradients beforehand with ZeRO 3; drop it, or set "
        "zero_optimization.stage 1",
    ),
]


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
