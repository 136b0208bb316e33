"""A single change of a run, as words for its command line, with what it gains and costs; which come first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.config.loading import parse_override
from pipeline.errors import ConfigError
from pipeline.files import format_bytes


@dataclass(frozen=True)
class Change:
    """One thing that takes less memory, everything else staying as it is."""

    name: str
    """In a few words: `smaller micro-batch`."""
    overrides: tuple[str, ...]
    """Put behind the command that was typed: `model.activation_checkpointing=full`, `--deepspeed`, `FILE`."""
    gain: int | None
    """Bytes a rank; None: not known."""
    slower: float | None
    """A step takes so many times as long; None: not known."""
    why: str
    """What else it changes, such as the curve; empty: nothing."""
    other_curve: bool = False
    """Whether the loss follows another one then."""

    def __str__(self) -> str:
        gain = [] if self.gain is None else [f"-{format_bytes(self.gain)}"]
        price = [] if self.slower in (None, 1.0) else [f"{self.slower:.3g} times as long"]
        return (
            f"{' '.join(self.overrides) or self.name} ({', '.join([*gain, *price, self.why or self.name])})"
        )


def ranked(changes: Iterable[Change], enough: Callable[[Change], bool]) -> list[Change]:
    """Those that are enough by themselves first, the cheapest of them at the front; then by what they gain;
    of both those behind the others that give another curve. Last what is not known, as it comes.

    Args:
        enough: Of a change whose gain is known.
    """

    def key(change: Change) -> tuple[int, bool, float]:
        if change.gain is None:
            return 2, False, 0.0
        if enough(change):
            return 0, change.other_curve, change.slower or 1.0
        return 1, change.other_curve, -float(change.gain)

    return sorted(changes, key=key)


def word(key: str, value: Any) -> str:
    """`key=value`, as the command line reads it."""
    if isinstance(value, str):
        try:
            is_plain = parse_override(f"{key}={value}")[1] == value
        except ConfigError:
            is_plain = False
        return f"{key}={value if is_plain else json.dumps(value, ensure_ascii=False)}"
    return f"{key}={json.dumps(value)}"
