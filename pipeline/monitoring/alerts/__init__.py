"""What looks at each row and may say something of it, or end the run, and what comes with a row.

Losses and norms are of all ranks, and of what ranks measure of themselves all have everyone's: their alerts
answer alike without a further collective. `perf/` and `memory/` columns are its own: no Stop rests on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from pipeline.errors import PipelineError
from pipeline.monitoring.events import Event

Tell = Callable[[int, Event], None]
"""Takes what happened at a step."""


@dataclass(frozen=True)
class RollbackRequested:
    """The run is to resume from a checkpoint before a bad step."""

    step: int
    """The bad step."""
    why: Event


HandleAlert = Callable[[int, Event], RollbackRequested | None]
"""Takes an alert at a step, and answers whether the run is to roll back."""

CROWDED = 1.5  # processes that want to run, a core


@dataclass(frozen=True)
class Seen:
    """A row, and what is behind it of the steps since the row before; of an evaluation the row alone."""

    row: dict[str, float]
    """Of the last of them, as it is written: `train/loss`, or `eval/loss`."""
    losses: Sequence[float] = ()
    """Of each step, the exact mean over its global batch."""
    norms: Sequence[float] = ()
    """Of each step's gradient, before clipping; empty where the engine has none."""
    skipped: Sequence[bool] = ()
    """Of each step: the gradient was not finite."""
    counts: Sequence[float] = ()
    """Number (or sum of weights) of the targets in each step's global batch."""
    own: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of every rank, in order. Seconds a step (on a GPU of the row before): `step`, its parts `data` and,
    where they wait for nobody, `forward` and `backward`. GiB in use: `device`, `host`. Where a CPU trains,
    `load`: processes that want to run on the machine, a core of it."""

    @cached_property
    def steps(self) -> int:
        """Number of training steps behind the row; 0 for an evaluation."""
        return len(self.losses)

    @property
    def load(self) -> float:
        """The highest of all ranks'; 0 where no CPU trains."""
        return max(self.own.get("load", [0.0]))

    @property
    def is_crowded(self) -> bool:
        """A CPU trains that others use too: what takes long takes long for their sake."""
        return self.load > CROWDED


@dataclass(frozen=True)
class Stop:
    """The run ends here, without a further checkpoint, by this error and with its exit code."""

    error: PipelineError


class Alert(Protocol):
    """Asked on every rank about every row of training and of evaluation, in the order of the steps."""

    def __call__(self, step: int, seen: Seen) -> Event | Stop | None:
        """The answer depends on what all ranks are given alike: the step, the rows so far, the recipe."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """An alert whose answers rest on what was long before, wherever the run goes on: checkpoints keep it."""

    name: str
    """Under which they do."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values, alike on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, or anew where that does not hold for this process."""
        ...


def state_of(alerts: Iterable[Alert]) -> dict[str, Any]:
    """What a checkpoint keeps of them."""
    return {each.name: each.state_dict() for each in alerts if isinstance(each, Remembers)}


def restore(alerts: Iterable[Alert], state: Mapping[str, Any]) -> None:
    """Those that a checkpoint knows go on from there. One of an earlier version has nothing of them."""
    for each in alerts:
        if isinstance(each, Remembers) and each.name in state:
            each.load_state_dict(state[each.name])


def check_row(
    alerts: Iterable[Alert], step: int, seen: Seen, handle_alert: HandleAlert
) -> RollbackRequested | None:
    """Show a row to each alert, and hand on what it says.

    Returns:
        The first request to roll back; no further alert is asked then.

    Raises:
        PipelineError: an alert ends the run.
    """
    for alert in alerts:
        answer = alert(step, seen)
        if isinstance(answer, Stop):
            raise answer.error
        if answer is not None and (rollback := handle_alert(step, answer)) is not None:
            return rollback
    return None
