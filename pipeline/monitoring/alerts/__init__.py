"""Interface of alerts: rules that check each row with its details, and report an event or end the run.

Every rank has the losses and norms of the global batch and the measurements of all ranks. So an alert returns
the same result on all ranks without a collective. A StopRequested must not depend on `perf/` and `memory/`
columns, which differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from pipeline.errors import PipelineError
from pipeline.monitoring.events import Event

EmitEvent = Callable[[int, Event], None]
"""Function that reports an event at a step."""


@dataclass(frozen=True)
class RollbackRequested:
    """Request to resume from a checkpoint before a bad step."""

    step: int
    """Number of the bad step, which may be earlier than the row that reported it."""
    why: Event
    """Alert that led to the request."""


HandleAlert = Callable[[int, Event], RollbackRequested | None]
"""Function that handles an alert at a step and may request a rollback."""

CONTENDED_LOAD = 1.5  # runnable processes per core above which a run counts as slowed by others


@dataclass(frozen=True)
class RowDetails:
    """A row, and the numbers of each step since the previous row. For an evaluation: only the row."""

    row: dict[str, float]
    """Columns of the row as they are written, without `step`."""
    losses: Sequence[float] = ()
    """Loss of each step: the exact mean over its global batch."""
    grad_norms: Sequence[float] = ()
    """Gradient norm of each step before clipping; empty if the engine has none."""
    skipped: Sequence[bool] = ()
    """Whether the gradient of each step was not finite."""
    target_counts: Sequence[float] = ()
    """Number, or sum of weights, of the targets in each step's global batch."""
    per_rank: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name -> number of every rank, in order of rank.

    `step`: seconds per step. `data`: seconds of it in which the rank waits for data. `forward` and
    `backward`: seconds of these phases; missing if ranks wait for each other in them. On a GPU all seconds
    are those of the previous row, so the first row has none.

    `host`: GiB of private memory of the rank's process. On a GPU `device`: peak GiB allocated since the
    previous row. On a CPU `load`: runnable processes per core of the rank's machine."""

    @cached_property
    def steps(self) -> int:
        """Number of training steps that the row covers; 0 for an evaluation."""
        return len(self.losses)

    @property
    def load(self) -> float:
        """Runnable processes per core of the busiest machine; 0 unless the run trains on CPUs."""
        return max(self.per_rank.get("load", [0.0]))

    @property
    def is_cpu_contended(self) -> bool:
        """Return whether other processes compete for the CPUs of the run and slow its steps."""
        return self.load > CONTENDED_LOAD


@dataclass(frozen=True)
class StopRequested:
    """Request to end the run without another checkpoint."""

    error: PipelineError
    """Error that ends the run, with its exit code."""


class Alert(Protocol):
    """Rule that every rank applies to every row of training or evaluation, in the order of the steps."""

    def __call__(self, step: int, details: RowDetails) -> Event | StopRequested | None:
        """Check a row. The result may depend only on numbers that are equal on all ranks.

        Args:
            step: Step of the row.
            details: The row, and the steps since the previous row.

        Returns:
            An event to report, a request to end the run, or `None` if there is nothing to report.
        """
        ...


@runtime_checkable
class StatefulAlert(Protocol):
    """An alert that depends on earlier steps; checkpoints include its state."""

    name: str
    """Key of the alert's state in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, equal on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        ...


def collect_alert_state(alerts: Iterable[Alert]) -> dict[str, Any]:
    """Return the state of all stateful alerts by name, for a checkpoint."""
    return {each.name: each.state_dict() for each in alerts if isinstance(each, StatefulAlert)}


def restore_alerts(alerts: Iterable[Alert], state: Mapping[str, Any]) -> None:
    """Restore the alerts whose state is in the checkpoint; the others start afresh.

    Args:
        alerts: Alerts of this process.
        state: Result of `collect_alert_state` in the checkpoint; empty for a new run.
    """
    for each in alerts:
        if isinstance(each, StatefulAlert) and each.name in state:
            each.load_state_dict(state[each.name])


def check_row(
    alerts: Iterable[Alert], step: int, details: RowDetails, handle_alert: HandleAlert
) -> RollbackRequested | None:
    """Apply each alert to a row, and handle the events that they return.

    Args:
        alerts: Alerts in the order in which they are applied.
        step: Step of the row.
        details: The row and its steps.
        handle_alert: Handles the events.

    Returns:
        The first request to roll back. The alerts after it are not applied.

    Raises:
        PipelineError: An alert ends the run.
    """
    for alert in alerts:
        result = alert(step, details)
        if isinstance(result, StopRequested):
            raise result.error
        if result is None:
            continue
        rollback = handle_alert(step, result)
        if rollback is not None:
            return rollback
    return None
