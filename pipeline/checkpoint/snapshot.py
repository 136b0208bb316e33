"""A copy of this rank's fragments in host memory, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.files import LayoutChangedError, as_bytes
from pipeline.checkpoint.layout import Layout, Slot
from pipeline.engine.fragments import Fragment

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
        total = sum(slot.num_bytes for slot in layout.slots)
        pinned = device.type == "cuda"
        try:
            self._chunks = [
                torch.empty(min(CHUNK, total - start), dtype=torch.uint8, pin_memory=pinned)
                for start in range(0, total, CHUNK)
            ]
        except RuntimeError as error:
            raise MemoryError(str(error)) from None

    def fill(self, fragments: Iterator[Fragment]) -> None:
        """Copies all fragments. When it returns they may change.

        Raises:
            LayoutChangedError: they are not those laid out.
        """
        position = 0
        for slot in self.layout.slots:
            fragment = next(fragments, None)
            if fragment is None or Slot.of(fragment) != slot:
                raise LayoutChangedError(f"{slot.kind} of {slot.name}")
            source = as_bytes(fragment.tensor)
            done = 0
            for part in self._parts(position, slot.num_bytes):
                piece = source[done : done + len(part)]
                if piece.device.type == "cpu" and len(piece) < BY_ONE_THREAD:
                    np.copyto(part.numpy(), piece.numpy())
                else:
                    part.copy_(piece, non_blocking=True)
                done += len(part)
            position += slot.num_bytes
        if next(fragments, None) is not None:
            raise LayoutChangedError("more fragments than before")
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def views(self) -> Iterator[list[memoryview]]:
        """The bytes of each slot, in order."""
        position = 0
        for slot in self.layout.slots:
            yield [part.numpy().data for part in self._parts(position, slot.num_bytes)]
            position += slot.num_bytes

    def _parts(self, position: int, length: int) -> Iterator[Tensor]:
        end = position + length
        while position < end:
            index, start = divmod(position, CHUNK)
            stop = min(CHUNK, start + end - position)
            yield self._chunks[index][start:stop]
            position += stop - start
