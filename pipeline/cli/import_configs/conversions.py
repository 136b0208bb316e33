"""Parses the tables of other trainers' keys, and converts values of those keys to values of the recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Conversion = Callable[[Any], Any]
"""Function that converts a value of the imported file to one of the recipe; `None` leaves the key unset.

It raises a TypeError whose message is the expected type, or a LeftOpenError."""


class LeftOpenError(Exception):
    """A value has no exact counterpart here. The message says what the user can do."""


@dataclass(frozen=True)
class KeyMapping:
    """Keys here to which a key of another trainer is mapped."""

    ours: str
    """Dotted keys of the recipe, separated by commas; `JSON: ...` for a key of the DeepSpeed JSON."""
    convert: Conversion | None
    """Conversion of the value; `None` if `TrainerTable.import_values` reads the key together with others."""


def parse_reasons(table: str) -> dict[str, str]:
    """Parse lines `reason: key key` into key -> reason. An indented line continues the one before."""
    reasons: dict[str, str] = {}
    for line in table.strip().replace("\n  ", " ").splitlines():
        reason, _, keys = line.rpartition(": ")
        reasons |= dict.fromkeys(keys.split(), reason)
    return reasons


def parse_table(table: str) -> dict[str, KeyMapping]:
    """Parse lines `ours as conversion: theirs theirs` into key of theirs -> mapping.

    `ours` is as in KeyMapping, and `conversion` is a name in CONVERSIONS. Without `as conversion`,
    `TrainerTable.import_values` reads the keys. An indented line continues the one before.
    """
    mappings = {}
    for key, target in parse_reasons(table).items():
        ours, _, conversion = target.partition(" as ")
        mappings[key] = KeyMapping(ours, CONVERSIONS[conversion] if conversion else None)
    return mappings


def to_number(value: Any) -> float | int:
    """Return a number, also from a text: YAML reads `1e-5` as a text.

    Raises:
        TypeError: The value is no number.
    """
    try:
        value = float(value) if isinstance(value, str) else value
    except ValueError:
        raise TypeError("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    return value


def to_int(value: Any) -> int:
    """Return a whole number, also from a text or from a float such as 3.0.

    Raises:
        TypeError: The value is no whole number.
    """
    number = to_number(value)
    if not float(number).is_integer():
        raise TypeError("a whole number")
    return int(number)


def to_bool(value: Any) -> bool:
    """Return the value if it is true or false.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def to_text(value: Any) -> str:
    """Return the value if it is a text.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def to_names(value: Any) -> list[str]:
    """Return a list of names, also from names separated by commas.

    Raises:
        TypeError: The value is neither a text nor a list of texts.
    """
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("a list of names")
    return value


def _convert_recomputation(value: Any) -> str:
    """Return the kind of activation checkpointing."""
    if value == "offload":
        raise LeftOpenError("write model.activation_checkpointing: full and model.activation_offload: true")
    return "full" if to_bool(value) else "none"


def _convert_four_bits(value: Any) -> str | None:
    """Return the quantization of a base whose weights have this number of bits; `None` for none."""
    if value not in (False, True, 4):
        raise LeftOpenError(
            "a base has the precision of the run, or 4 bits; for 4 bits, write adapter.quantize: nf4"
        )
    return "nf4" if value else None


def _convert_targets(value: Any) -> list[str] | None:
    """Return the names of the layers that get an adapter; `None` for all linear layers, the default here."""
    names = to_names(value)
    return None if {"all", "all-linear"} & set(names) else names


def _convert_one_adapter(value: Any) -> str:
    """Return the path of the adapter to load."""
    names = to_names(value)
    if len(names) != 1:
        raise TypeError("one adapter (merge the others into the model first)")
    return names[0]


# By the name that follows `as` in a table.
CONVERSIONS: dict[str, Conversion] = {
    "number": to_number,
    "integer": to_int,
    "boolean": to_bool,
    "text": to_text,
    "names": to_names,
    "true, false or auto": lambda value: value if value == "auto" else to_bool(value),
    "name": lambda value: re.sub(r"[^\w.-]+", "-", to_text(value))[:128],
    "recomputation": _convert_recomputation,
    "no recomputation": lambda value: _convert_recomputation(not to_bool(value)),
    "attention": lambda value: "eager" if value in ("eager", "disabled", False) else "auto",
    "device": lambda value: None if value in (None, "none", False) else {"device": to_text(value)},
    "4 bits": _convert_four_bits,
    "targets": _convert_targets,
    "one adapter": _convert_one_adapter,
    "LoRA+": lambda value: [{"patterns": ["*.lora_B.*"], "learning_rate_factor": to_number(value)}],
}
