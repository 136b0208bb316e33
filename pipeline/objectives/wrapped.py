"""An objective around another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.objectives.interface import Batch, LossSum, Objective


class WrappedObjective:
    """Is the other one, but for what a subclass has of its own."""

    def __init__(self, objective: Objective):
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        return self._objective(model, batch)
