"""What is known of a run's memory while it runs: what holds it, as measured, and what the plan had said.

Filled as the run is built, and read when it is out of memory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.files import format_bytes
from pipeline.planning.changes import Change


@dataclass(frozen=True)
class EngineStates:
    """Bytes that an engine holds on a kind of device, each storage counted once."""

    parameters: int
    gradients: int
    optimizer: int
    """What it keeps of what it steps, and the fp32 masters."""
    buffers: int
    """The engine's own: buckets, flat copies."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class HeldMemory:
    """What a device held when its memory was out."""

    states: EngineStates
    total: int
    """Allocated on a GPU; of a CPU what the process had resident."""
    before: int = 0
    """Of that, what there was before the model: libraries and data on a CPU."""

    @property
    def activations(self) -> int:
        """What none of the others is: activations, logits and temporaries."""
        return max(0, self.total - self.states.total - self.before)

    def __str__(self) -> str:
        named = {
            "parameters": self.states.parameters,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "engine's buffers": self.states.buffers,
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


@dataclass
class Account:
    """Of one rank."""

    before: int = 0
    """Bytes that the process had resident before there was a model."""
    states: Callable[[str], EngineStates] | None = None
    """What the engine holds on `cuda` or `cpu`; None: there is none yet."""
    plan: Callable[[], Planned | None] | None = None
    """None, or gives it: nothing is known of such a run."""
