"""Which optimizer steps under DeepSpeed: torch's fused AdamW, or DeepSpeed's CPU Adam for offloaded state."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from pipeline.config.schema import OptimizerConfig
from pipeline.optim import build_adamw


def build_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig, config: dict[str, Any]
) -> torch.optim.Optimizer:
    """torch's fused AdamW; DeepSpeed's CPU Adam where the state lives in host memory.

    `native_ops.prepare_native_ops` has built it, or asked for torch's where it cannot be.
    """
    offload = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if offload in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        return deepspeed.ops.adam.DeepSpeedCPUAdam(
            groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, adamw_mode=True
        )
    return build_adamw(groups, optimizer)
