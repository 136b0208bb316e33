"""What a rank's memory is held by, as measured, and what the plan had said of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.files import format_bytes
from pipeline.planning.changes import Change


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
