"""An objective whose part of a step is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.distributed.phases import Phases
from pipeline.objectives.interface import Batch, GlobalBatch, LossSum, Objective


class TimedObjective:
    """An objective whose forwards are measured."""

    def __init__(self, objective: Objective, phases: Phases):
        self._objective = objective
        self._phases = phases

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        with self._phases.measured("forward"):
            return self._objective(model, batch)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective. Not `forward`, which ranks are compared by: it waits for them."""
        with self._phases.measured("routing"):
            self._objective.prepare_step(batch)
