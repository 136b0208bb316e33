"""Parses the tables of other trainers' keys, and converts values as the tables say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Conversion = Callable[[Any], Any]
"""Converts a value of the imported file to the recipe's; `None` sets nothing.

It raises a TypeError whose message is the expected type, or a LeftOpenError."""


class LeftOpenError(Exception):
    """Reports a value that has no exact counterpart here; its message says what to do."""


@dataclass(frozen=True)
class KeyMapping:
    """Target of a key of another trainer."""

    ours: str
    """Dotted keys of the recipe, separated by commas; `JSON: ...` for a key of the DeepSpeed JSON."""
    convert: Conversion | None
    """Conversion of the value; `None` if `import_values` of the trainer's table reads the key with others."""


def parse_reasons(table: str) -> dict[str, str]:
    """Parse lines `reason: key key` into key -> reason. An indented line continues the one before."""
    found: dict[str, str] = {}
    for line in table.strip().replace("\n  ", " ").splitlines():
        reason, _, keys = line.rpartition(": ")
        found |= dict.fromkeys(keys.split(), reason)
    return found


def parse_table(table: str) -> dict[str, KeyMapping]:
    """Parse lines `target as conversion: key key` into key -> mapping.

    Without `as conversion`, the trainer's `import_values` reads the keys.
    """
    found = {}
    for key, words in parse_reasons(table).items():
        ours, _, name = words.partition(" as ")
        found[key] = KeyMapping(ours, CONVERSIONS[name] if name else None)
    return found


def to_number(value: Any) -> float | int:
    """Return a number, also from a text: YAML reads `1e-5` as one."""
    try:
        value = float(value) if isinstance(value, str) else value
    except ValueError:
        raise TypeError("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    return value


def to_int(value: Any) -> int:
    """Return a whole number."""
    given = to_number(value)
    if not float(given).is_integer():
        raise TypeError("a whole number")
    return int(given)


def to_bool(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def to_text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def to_names(value: Any) -> list[str]:
    """Return a list of names, also from names separated by commas."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("names")
    return value


def _optimizer(value: Any) -> str:
    name = to_text(value).lower()
    if name in ("adafactor", "sgd"):
        return name
    if re.fullmatch(r"adamw(_torch|_torch_fused|_hf|_apex_fused|_anyprecision)?", name):
        return "adamw"
    raise LeftOpenError("the recipe has AdamW in fp32 until you write another optimizer.kind")


def _recomputing(value: Any) -> str:
    if value == "offload":
        raise LeftOpenError("write model.activation_checkpointing: full and model.activation_offload: true")
    return "full" if to_bool(value) else "none"


def _four_bits(value: Any) -> str | None:
    if value not in (False, True, 4):
        raise LeftOpenError(
            "a base is held in the precision of the run, or in 4 bits; write adapter.quantize for that"
        )
    return "nf4" if value else None


def _targets(value: Any) -> list[str] | None:
    given = to_names(value)
    return None if {"all", "all-linear"} & set(given) else given


def _one_adapter(value: Any) -> str:
    given = to_names(value)
    if len(given) != 1:
        raise TypeError("one adapter (merge the others into the model first)")
    return given[0]


CONVERSIONS: dict[str, Conversion] = {
    "number": to_number,
    "whole": to_int,
    "flag": to_bool,
    "text": to_text,
    "names": to_names,
    "optimizer": _optimizer,
    "switch": lambda value: value if value == "auto" else to_bool(value),
    "name": lambda value: re.sub(r"[^\w.-]+", "-", to_text(value))[:128],
    "recomputing": _recomputing,
    "recomputing unless": lambda value: _recomputing(not to_bool(value)),
    "attention": lambda value: "eager" if value in ("eager", "disabled", False) else "auto",
    "device": lambda value: None if value in (None, "none", False) else {"device": to_text(value)},
    "4 bits": _four_bits,
    "targets": _targets,
    "one adapter": _one_adapter,
    "LoRA+": lambda value: [{"patterns": ["*.lora_B.*"], "learning_rate_factor": to_number(value)}],
}
