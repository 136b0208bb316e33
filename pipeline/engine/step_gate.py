"""What an optimizer's next step waits for before it changes anything that a checkpoint is being made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class StepGate:
    """Calls once, in the first of some optimizers' next steps, what it was given to wait with.

    Args:
        optimizers: All that step the model, each in its own `step`; they are what writes weights and states.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer):
        self._waits: list[Callable[[], None]] = []
        # Such an embedding rescales its rows in its forward.
        self._forward_writes = any(getattr(each, "max_norm", None) is not None for each in model.modules())
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._open)

    def hold(self, wait: Callable[[], None]) -> None:
        """See EngineState.hold_step."""
        self._waits.append(wait)
        if self._forward_writes:
            self._open()

    def _open(self, *_: Any) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
