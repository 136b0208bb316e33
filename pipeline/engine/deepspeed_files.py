"""DeepSpeed's checkpoint files without unpickling what they may hold besides tensors and plain values.

DeepSpeed reads its own files with weights_only=False: code in a file would run. Here only the few DeepSpeed
classes that its files name are let through.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

TRUSTED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's file engine with `weights_only=True` on the way in."""

    def __init__(self) -> None:
        super().__init__(config_params=None)

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(TRUSTED):
            return torch.load(path, map_location=map_location, weights_only=True)
