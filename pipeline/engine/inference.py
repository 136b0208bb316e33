"""A whole trained model in one process, without an optimizer: what evaluates and writes text after a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.engine.interface import to_device
from pipeline.objectives import Batch, LossSum, Objective

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Inference:
    """Computes as the engine that trained the model does.

    Args:
        model: With its weights, in fp32.
        precision: The run's.
        under_deepspeed: In half precision the weights themselves are cast; without it bf16 is autocast.
    """

    dp_rank = 0
    dp_world_size = 1

    def __init__(self, model: nn.Module, precision: str, under_deepspeed: bool, device: torch.device):
        self.device = device
        self._float_dtype = DTYPES[precision] if under_deepspeed else None
        self._autocast: dict[str, Any] = {
            "device_type": device.type,
            "dtype": torch.bfloat16,
            "enabled": precision == "bf16" and not under_deepspeed,
        }
        self.module = model.to(device=device, dtype=self._float_dtype).eval()

    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step."""
        with torch.autocast(**self._autocast):
            return objective(self.module, to_device(batch, self.device, self._float_dtype))
