"""Steps that are not to be taken: decided on the device between backward and the optimizer, alike on all
ranks. Of a refused step nothing stays: parameters, optimizer state and buffers are those before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Limits
from pipeline.engine.normalize import mean_loss
from pipeline.optim import reads_found_inf


class Refusal:
    """Holds a step's loss and gradient norm to limits. Where a step has none, it costs nothing.

    Args:
        module: This rank's; its buffers are put back.
    """

    def __init__(self, job: Job, module: nn.Module):
        self._job = job
        self._layers = [layer for layer in module.modules() if layer._buffers]
        self._limits: Limits | None = None
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._is_refused: Tensor | None = None
        self.loss: Tensor | None = None
        """Mean of the global batch, 0-dim, fp64; None: the step has no limits, or is not so far."""

    @property
    def has_limits(self) -> bool:
        """Whether this step may be refused."""
        return self._limits is not None

    def begin(self, limits: Limits | None) -> None:
        """Before a step's first forward: keeps the buffers."""
        self._limits, self._is_refused, self.loss = limits, None, None
        self._kept = []
        if limits is not None:
            self._kept = [
                (layer, name, buffer, buffer.clone())
                for layer in self._layers
                for name, buffer in layer._buffers.items()
                if buffer is not None
            ]

    def look(self, loss_sum: Tensor, count: Tensor) -> None:
        """After a step's last forward. Collective over all ranks, where there are limits.

        Args:
            loss_sum: This rank's share.
            count: Of the global batch.
        """
        if self._limits is not None and self.loss is None:
            self.loss = mean_loss(self._job.all_reduce_sum(loss_sum.double()), count)

    def __call__(self, norm: Tensor | float) -> Tensor | None:
        """Whether the step is refused, bool, 0-dim; None: there are no limits. After `look`.

        Args:
            norm: Of all gradients together, the same on all ranks.
        """
        if self._limits is None:
            return None
        if self._is_refused is None:
            high = self.is_loss_high()
            self._is_refused = high | ~(torch.as_tensor(norm, device=high.device) <= self._limits.grad_norm)
        return self._is_refused

    def is_loss_high(self) -> Tensor:
        """Whether the loss alone exceeds the limits, bool, 0-dim. After `look`, where there are some."""
        assert self._limits is not None
        assert self.loss is not None
        return ~(self.loss.isfinite() & (self.loss <= self._limits.loss))

    def before(self, optimizer: Optimizer, norm: Tensor | float) -> None:
        """Before a step of an optimizer whose norm is DeepSpeed's: where refused, it moves nothing.

        Waits for the device where the optimizer's kernels read no flag.
        """
        if (refused := self(norm)) is None:
            return
        if reads_found_inf(optimizer):
            optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
        elif bool(refused):  # what has no gradient is passed over
            self._gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for p, _ in self._gradients:
                p.grad = None

    def after(self, optimizer: Optimizer) -> None:
        """After that step: no later one reads its flag, and gradients lie where they lay, for offloaded ones
        are buffers of the engine."""
        vars(optimizer).pop("found_inf", None)
        for p, gradient in self._gradients:
            p.grad = gradient
        self._gradients = []

    def end(self, skipped: Tensor, counts: bool = False) -> Tensor:
        """After the step: puts the buffers back, if it was not taken.

        Args:
            skipped: 1 where the engine left it out, else 0.
            counts: It was left out and is a step all the same: buffers stay as its forward left them.

        Returns:
            1 where it was left out or refused.
        """
        if self._limits is None:
            return skipped
        if self._is_refused is not None:
            skipped = torch.maximum(skipped, self._is_refused.to(skipped))
        is_skipped = torch.zeros_like(skipped, dtype=torch.bool) if counts else skipped > 0
        with torch.no_grad():
            for layer, name, buffer, before in self._kept:
                after: Any = layer._buffers[name]
                buffer.copy_(torch.where(is_skipped, before, buffer if after is None else after))
                layer._buffers[name] = buffer
        self._kept = []
        return skipped
