"""A copy of this rank's shards in host memory, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.files import LayoutChangedError, as_bytes
from pipeline.checkpoint.layout import Layout
from pipeline.shards import Shard

CHUNK = 1 << 26  # a power of two: torch rounds pinned memory up to one
# torch's threads meet after every copy: on a busy processor the waiting took 17 times as long as the copying.
BY_ONE_THREAD = 1 << 24


class Snapshot:
    """Buffers for one layout, filled at every save and kept between them: pinning is slow.

    Args:
        layout: What will be copied.
        device: Where it comes from; for CUDA the buffers are pinned, and a copy runs at the bus's speed.

    Raises:
        MemoryError: there is not enough host memory.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self.layout = layout
        self._device = device
        total = sum(shard.num_bytes for shard in layout.shards)
        pinned = device.type == "cuda"
        try:
            self._chunks = [
                torch.empty(min(CHUNK, total - start), dtype=torch.uint8, pin_memory=pinned)
                for start in range(0, total, CHUNK)
            ]
        except RuntimeError as error:
            raise MemoryError(str(error)) from None

    def fill(self, shards: Iterator[Shard]) -> None:
        """Copies all shards. When it returns they may change.

        Raises:
            LayoutChangedError: they are not those laid out.
        """
        position = 0
        for expected in self.layout.shards:
            shard = next(shards, None)
            if shard is None or shard.values is None or shard != expected:
                raise LayoutChangedError(expected.title)
            source = as_bytes(shard.values)
            done = 0
            for part in self._parts(position, expected.num_bytes):
                piece = source[done : done + len(part)]
                if piece.device.type == "cpu" and len(piece) < BY_ONE_THREAD:
                    np.copyto(part.numpy(), piece.numpy())
                else:
                    part.copy_(piece, non_blocking=True)
                done += len(part)
            position += expected.num_bytes
        if next(shards, None) is not None:
            raise LayoutChangedError("more shards than before")
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def views(self) -> Iterator[list[memoryview]]:
        """The bytes of each shard, in order."""
        position = 0
        for expected in self.layout.shards:
            yield [part.numpy().data for part in self._parts(position, expected.num_bytes)]
            position += expected.num_bytes

    def _parts(self, position: int, length: int) -> Iterator[Tensor]:
        end = position + length
        while position < end:
            index, start = divmod(position, CHUNK)
            stop = min(CHUNK, start + end - position)
            yield self._chunks[index][start:stop]
            position += stop - start
