"""Memory of a rank by what holds it, measured and planned, and changes that make it smaller. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True)
class EngineStates:
    """Bytes of a kind of device by what holds them: of an engine, each storage counted once, and besides."""

    parameters: int
    gradients: int
    optimizer: int
    """What it keeps of what it steps, and the fp32 masters."""
    buffers: int
    """The engine's own: buckets, flat copies."""
    activations: int = 0
    """What none of the others is, where memory was out: activations, logits and temporaries."""
    before: int = 0
    """What there was before the model: libraries and data on a CPU."""

    @property
    def total(self) -> int:
        """All of it."""
        engines = self.parameters + self.gradients + self.optimizer + self.buffers
        return engines + self.activations + self.before

    def __str__(self) -> str:
        named = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "engine's buffers": self.buffers,
            "activations and temporaries": self.activations,
            "libraries and data": self.before,
        }
        return ", ".join(f"{format_bytes(each)} {name}" for name, each in named.items() if each)


@dataclass(frozen=True)
class Planned:
    """What the plan says of a run."""

    peak: int
    """Bytes of the fullest rank."""
    there: int
    """That it has for them."""
    changes: Sequence[Change] = ()
    """What would take less."""

    def __str__(self) -> str:
        return f"the plan had said {format_bytes(self.peak)} of {format_bytes(self.there)}"
