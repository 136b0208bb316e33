"""The values of this rank's shards on their way to the disk: fetched one at a time, or copied all at once.

A copy in host memory is written while training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.shard_file import Layout, LayoutChangedError, as_bytes
from pipeline.shards import Shard

CHUNK = 1 << 26  # a power of two: torch rounds pinned memory up to one
# torch's threads meet after every copy: on a busy processor the waiting took 17 times as long as the copying.
BY_ONE_THREAD = 1 << 24


def streamed(layout: Layout, shards: Iterator[Shard]) -> Iterator[list[memoryview]]:
    """The bytes of each shard, fetched to the host one at a time.

    Raises:
        LayoutChangedError: a shard is not the one laid out at its place, or there are more of them.
    """
    return ([source.cpu().numpy().data] for source in _matched(layout, shards))


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
        for source in _matched(self.layout, shards):
            done = 0
            for part in self._parts(position, len(source)):
                piece = source[done : done + len(part)]
                if piece.device.type == "cpu" and len(piece) < BY_ONE_THREAD:
                    np.copyto(part.numpy(), piece.numpy())
                else:
                    part.copy_(piece, non_blocking=True)
                done += len(part)
            position += done
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


def _matched(layout: Layout, shards: Iterator[Shard]) -> Iterator[Tensor]:
    """The bytes of each shard, where they are, while they are those laid out."""
    for expected in layout.shards:
        shard = next(shards, None)
        if shard is None or shard.values is None or shard != expected:
            raise LayoutChangedError(expected.title)
        yield as_bytes(shard.values)
    if next(shards, None) is not None:
        raise LayoutChangedError("more shards than before")
