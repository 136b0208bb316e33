"""Buffers that a module changes by itself in its forward: alike on all ranks after every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pipeline.models.batch_norm import is_synchronised

BUCKET_BYTES = 2**28
# What gloo and NCCL send; of other types (16-bit integers, fp8) the bytes go.
SENT = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class ChangingBuffers:
    """After a step rank 0's are everybody's, as DistributedDataParallel has it before the next one.

    So evaluation, checkpoint and a run that goes on see the same values. Synchronised batch normalisation has
    equal ones already, and what is in no checkpoint is each rank's own.
    """

    def __init__(self, module: nn.Module):
        """Notes where they are; a module may put another tensor there later."""
        self._places = [
            (layer, name)
            for layer in module.modules()
            if not is_synchronised(layer)
            for name in layer._buffers
            if name not in layer._non_persistent_buffers_set
        ]

    def share(self) -> None:
        """Collective over all ranks. No host sync."""
        buffers = [buffer for layer, name in self._places if (buffer := layer._buffers[name]) is not None]
        tensors = [
            buffer if buffer.dtype in SENT else buffer.view(-1).view(torch.uint8) for buffer in buffers
        ]
        everyone = dist.group.WORLD if dist.is_initialized() else None
        if tensors and everyone is not None and everyone.size() > 1:
            dist._broadcast_coalesced(everyone, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined]
