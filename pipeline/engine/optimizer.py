"""Which optimizer steps under DeepSpeed: torch's fused ones, or DeepSpeed's CPU Adam for offloaded state."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from pipeline.config.schema import OptimizerConfig
from pipeline.optim import build_torch_optimizer


def build_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig, config: dict[str, Any]
) -> torch.optim.Optimizer:
    """torch's; DeepSpeed's CPU Adam where AdamW's state lives in host memory.

    `native_ops.prepare_native_ops` has built it, or asked for torch's where it cannot be.
    """
    offload = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if offload in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        return deepspeed.ops.adam.DeepSpeedCPUAdam(
            groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, adamw_mode=True
        )
    return build_torch_optimizer(groups, optimizer)


def take_steps_again(adam: torch.optim.Optimizer, steps: int) -> None:
    """Brings what DeepSpeed's CPU Adam counts outside of its state to `steps`; other optimizers have nothing.

    It multiplies powers of the betas up, a factor a step. Computed at once, as it does for a step that does
    not follow its last one, they are rounded otherwise, and the run goes on next to the unbroken one.
    """
    kernel = getattr(adam, "ds_opt_adam", None)
    if kernel is None:
        return
    beta1, beta2 = adam.param_groups[0]["betas"]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):  # tens of microseconds each
        kernel.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *nothing)  # type: ignore[attr-defined]
