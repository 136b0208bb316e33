"""Each step's numbers between two rows of the log, kept on the device until the row takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.engine.interface import StepResult

CHUNK = 64  # steps whose numbers lie one by one; a tensor of one number takes a hundred times its memory


class StepNumbers:
    """Of a few steps or of thousands. Nothing waits for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._single: dict[str, list[Tensor]] = {}
        self._stacked: dict[str, list[Tensor]] = {}

    def add(self, result: StepResult) -> None:
        """The next step's."""
        numbers = {"loss share": result.loss_sum, "count": result.global_count, "skipped": result.skipped}
        norm = result.grad_norm
        if norm is not None:
            given = norm if isinstance(norm, Tensor) else torch.full((), norm, device=self._device)
            numbers["norm"] = given
        for name, number in numbers.items():
            self._single.setdefault(name, []).append(number)
        if len(self._single["skipped"]) == CHUNK:
            self._stack()

    def _stack(self) -> None:
        for name, numbers in self._single.items():
            self._stacked.setdefault(name, []).append(torch.stack(numbers))
        self._single = {}

    def take(self) -> dict[str, Tensor]:
        """(steps,) each: `loss share` (see StepResult.loss_sum), `count`, `skipped` and, where there is one,
        `norm`."""
        if self._single:
            self._stack()
        stacked, self._stacked = self._stacked, {}
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in stacked.items()}
