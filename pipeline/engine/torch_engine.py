"""Plain PyTorch in one process, on the CPU or one GPU: for small models, and the oracle for every split."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.config.schema import OptimizerConfig
from pipeline.engine.interface import StepResult, count_and_vote, count_parameters, to_device
from pipeline.engine.normalize import backward_scale
from pipeline.errors import CheckpointError
from pipeline.objectives import Batch, LossSum, Objective
from pipeline.optim import build_adamw, parameter_groups


class TorchEngine:
    """fp32 parameters; `bf16` computes under autocast."""

    dp_rank = 0
    dp_world_size = 1
    seed_rank = 0

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig, precision: str, device: torch.device):
        self.device = device
        self.precision = precision
        self.module = model.to(device)
        self.num_parameters = count_parameters(model)
        self._max_grad_norm = optimizer.max_grad_norm
        groups = parameter_groups(model.parameters(), optimizer.weight_decay)
        self._parameters = [p for group in groups for p in group["params"]]
        self._optimizer = build_adamw(groups, optimizer)

    def generator(self) -> nn.Module | None:
        """See Engine.generator."""
        return self.module

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def train_step(
        self, micro_batches: Sequence[Batch], objective: Objective, learning_rate: float, stop_requested: bool
    ) -> StepResult:
        """See Engine.train_step."""
        if not self.module.training:
            self.module.train()
        totals = count_and_vote(micro_batches, objective, stop_requested, self.device)
        scale = backward_scale(totals[0], self.dp_world_size).float()
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), device=self.device)
        for cpu_batch in micro_batches:
            batch = to_device(cpu_batch, self.device, None)
            with self._autocast():
                loss = objective(self.module, batch)
            (loss.loss_sum * scale).backward()
            loss_sum += loss.loss_sum.detach()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        grad_norm = clip_and_guard(self._optimizer, self._parameters, self._max_grad_norm)
        self._optimizer.step()
        skipped = self._optimizer.found_inf  # type: ignore[attr-defined]
        return StepResult(loss_sum, totals[0], grad_norm, skipped, totals[1], None)

    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step."""
        if self.module.training:
            self.module.eval()
        with self._autocast():
            return objective(self.module, to_device(batch, self.device, None))

    def save(self, folder: Path) -> None:
        """See Engine.save."""
        state = {"model": self.module.state_dict(), "optimizer": self._optimizer.state_dict()}
        with open(folder / "state.pt", "wb") as file:  # a full disk is then an OSError
            torch.save(state, file)

    def load(self, folder: Path) -> None:
        """See Engine.load."""
        file = folder / "state.pt"
        if not file.exists():
            raise CheckpointError(
                f"{folder} was not saved by plain PyTorch; resume it with the --deepspeed it had"
            )
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


def clip_and_guard(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float
) -> torch.Tensor:
    """Clips the gradients and tells the fused optimizer on the device to skip a non-finite step.

    Returns:
        The global gradient norm before clipping, 0-dim. No host sync.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    # torch's fused kernels read this attribute (the one GradScaler sets) and leave everything alone at 1.
    optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    return norm
