"""A whole trained model in one process, without an optimizer: what evaluates and writes text after a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeline.engine.interface import DTYPES, to_device, with_bounds
from pipeline.models.generation import GenerationSettings, generate
from pipeline.objectives import Batch, LossSum, Objective


class Inference:
    """Computes as the engine that trained the model does.

    Args:
        model: With its weights, in fp32.
        precision: The run's.
        casts: In half precision the parameters are cast, as DeepSpeed does it; buffers stay as they are.
        autocast: In half precision products are computed under torch.autocast.
    """

    dp_rank = 0
    dp_world_size = 1

    def __init__(
        self, model: nn.Module, precision: str, device: torch.device, *, casts: bool, autocast: bool
    ):
        self.device = device
        self.module = model.to(device).eval()
        self._dtype = DTYPES[precision]
        self._is_autocast = autocast and precision != "fp32"
        for p in model.parameters():
            if casts and p.is_floating_point():
                p.data = p.data.to(self._dtype)
        self._float_dtype = next(model.parameters()).dtype

    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step."""
        batch = with_bounds(batch)
        inputs = objective.inputs(self.module, batch)
        with torch.autocast(self.device.type, self._dtype, enabled=self._is_autocast):
            return objective(self.module, to_device(batch, self.device, self._float_dtype, inputs))

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[list[int]]:
        """See Generates.generate."""
        return generate(self.module, prompts, settings, self.device)
