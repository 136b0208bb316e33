"""Interface of alerts: they see each row with what is behind it, and may report something or end the run.

Losses and norms are those of all ranks, and every rank has what all ranks measure of themselves, so alerts
answer alike on all ranks without a collective. `perf/` and `memory/` columns are a rank's own: no Stop may
depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from pipeline.errors import PipelineError
from pipeline.monitoring.events import Event

EmitEvent = Callable[[int, Event], None]
"""Takes what happened at a step."""


@dataclass(frozen=True)
class RollbackRequested:
    """The run is to resume from a checkpoint before a bad step."""

    step: int
    """The bad step."""
    why: Event


HandleAlert = Callable[[int, Event], RollbackRequested | None]
"""Takes an alert at a step, and answers whether the run is to roll back."""

CONTENDED_LOAD = 1.5  # processes that want to run, a core


@dataclass(frozen=True)
class RowDetails:
    """A row, and the steps since the row before; only the row of an evaluation."""

    row: dict[str, float]
    """Row as it is written."""
    losses: Sequence[float] = ()
    """Loss of each step, the exact mean over its global batch."""
    grad_norms: Sequence[float] = ()
    """Gradient norm of each step before clipping; empty if the engine has none."""
    skipped: Sequence[bool] = ()
    """Whether the gradient of each step was not finite."""
    target_counts: Sequence[float] = ()
    """Number (or sum of weights) of the targets in each step's global batch."""
    per_rank: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name -> number of every rank, in order. Seconds a step (on a GPU those of the row before): `step`, its
    parts `data` and, if they wait for no other rank, `forward` and `backward`. GiB in use: `device`, `host`.
    On a CPU `load`: runnable processes on the machine per core."""

    @cached_property
    def steps(self) -> int:
        """Number of training steps behind the row; 0 for an evaluation."""
        return len(self.losses)

    @property
    def load(self) -> float:
        """Highest load of all ranks; 0 unless a CPU trains."""
        return max(self.per_rank.get("load", [0.0]))

    @property
    def is_cpu_contended(self) -> bool:
        """Whether other processes use a CPU that trains: they make steps slow."""
        return self.load > CONTENDED_LOAD


@dataclass(frozen=True)
class StopRequested:
    """Request to end the run by this error and its exit code, without a further checkpoint."""

    error: PipelineError


class Alert(Protocol):
    """Rule that every rank asks about every row of training and of evaluation, in the order of the steps."""

    def __call__(self, step: int, seen: RowDetails) -> Event | StopRequested | None:
        """Return the alert of a row. The answer depends only on what is alike on all ranks."""
        ...


@runtime_checkable
class StatefulAlert(Protocol):
    """An alert whose answers rest on earlier steps: checkpoints keep its state."""

    name: str
    """Name of its state in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, alike on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, or begin anew if it does not hold for this process."""
        ...


def collect_alert_state(alerts: Iterable[Alert]) -> dict[str, Any]:
    """Return the state of the alerts for a checkpoint."""
    return {each.name: each.state_dict() for each in alerts if isinstance(each, StatefulAlert)}


def restore_alerts(alerts: Iterable[Alert], state: Mapping[str, Any]) -> None:
    """Restore the alerts that a checkpoint has the state of."""
    for each in alerts:
        if isinstance(each, StatefulAlert) and each.name in state:
            each.load_state_dict(state[each.name])


def check_row(
    alerts: Iterable[Alert], step: int, seen: RowDetails, handle_alert: HandleAlert
) -> RollbackRequested | None:
    """Show a row to each alert, and hand on what it says.

    Returns:
        The first request to roll back; no further alert is asked then.

    Raises:
        PipelineError: an alert ends the run.
    """
    for alert in alerts:
        answer = alert(step, seen)
        if isinstance(answer, StopRequested):
            raise answer.error
        if answer is not None and (rollback := handle_alert(step, answer)) is not None:
            return rollback
    return None
