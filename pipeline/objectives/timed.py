"""An objective whose part of a step is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.distributed.phases import Phases
from pipeline.objectives.interface import Batch, GlobalBatch, LossSum, Objective
from pipeline.objectives.wrapped import WrappedObjective


class TimedObjective(WrappedObjective):
    """An objective whose forwards are measured."""

    def __init__(self, objective: Objective, phases: Phases):
        super().__init__(objective)
        self._phases = phases

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        with self._phases.measured("forward"):
            return super().__call__(model, batch)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective. Not `forward`, which ranks are compared by: it waits for them."""
        with self._phases.measured("routing"):
            self._objective.prepare_step(batch)
