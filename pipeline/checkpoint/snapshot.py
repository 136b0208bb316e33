"""The values of this rank's shards on their way to the disk: fetched one at a time, or copied all at once.

A copy in host memory is written while training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.shard_file import Layout, LayoutChangedError, as_bytes
from pipeline.errors import one_line
from pipeline.shards import BUFFER, Shard

log = logging.getLogger(__name__)

CHUNK = 1 << 26  # a power of two: torch rounds pinned memory up to one
# torch's threads meet after every copy: on a busy processor the waiting took 17 times as long as the copying.
BY_ONE_THREAD = 1 << 24


def streamed(layout: Layout, shards: Iterator[Shard]) -> Iterator[list[memoryview]]:
    """The bytes of each shard, fetched to the host one at a time.

    Raises:
        LayoutChangedError: a shard is not the one laid out at its place, or there are more of them.
    """
    return ([source.cpu().numpy().data] for source, _ in _matched(layout, shards))


class Snapshot:
    """Buffers for one layout, filled at every save and kept between them.

    Memory is taken on a thread of its own: pinning takes seconds for gigabytes. What lies on a GPU is copied
    on a stream beside the main one: the host, a forward and a backward do not wait for it.

    Args:
        layout: What will be copied.
        device: Where it comes from; for CUDA the buffers are pinned, and a copy runs at the bus's speed.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self.layout = layout
        total = sum(shard.num_bytes for shard in layout.shards)
        sizes = [min(CHUNK, total - start) for start in range(0, total, CHUNK)]
        thread = ThreadPoolExecutor(1, "snapshot")
        self._chunks = thread.submit(_take_memory, sizes, device.type == "cuda")
        thread.shutdown(wait=False)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def fill(self, shards: Iterator[Shard]) -> None:
        """Copies all shards, once there is memory.

        When it returns, buffers may change, and the host's values; a GPU's others after `hold_device`.

        Raises:
            LayoutChangedError: they are not those laid out.
            MemoryError: there is not enough host memory.
        """
        self._chunks.result()
        self._copied = None
        position = 0
        for found, kind in _matched(self.layout, shards):
            done = 0
            with self._beside(found, kind) as source:
                for part in self._parts(position, len(source)):
                    piece = source[done : done + len(part)]
                    if piece.device.type == "cpu" and len(piece) < BY_ONE_THREAD:
                        np.copyto(part.numpy(), piece.numpy())
                    else:
                        part.copy_(piece, non_blocking=True)
                    done += len(part)
            position += done
        if self._stream is not None:
            self._copied = self._stream.record_event()

    @contextmanager
    def _beside(self, source: Tensor, kind: str) -> Iterator[Tensor]:
        """The values to copy, on the stream that copies them: not before what is at work on them is done."""
        if source.device.type != "cuda":
            yield source
            return
        if kind == BUFFER:
            source = source.clone()  # a forward changes these
        self._stream = self._stream or torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            yield source
        source.record_stream(self._stream)  # of some the engine made a copy, which nobody holds any longer

    def hold_device(self) -> None:
        """What the device is given from here on waits for the copy; the host does not."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def views(self) -> Iterator[list[memoryview]]:
        """The bytes of each shard, in order, once they are copied."""
        if self._copied is not None:
            self._copied.synchronize()
        position = 0
        for expected in self.layout.shards:
            yield [part.numpy().data for part in self._parts(position, expected.num_bytes)]
            position += expected.num_bytes

    def _parts(self, position: int, length: int) -> Iterator[Tensor]:
        chunks, end = self._chunks.result(), position + length
        while position < end:
            index, start = divmod(position, CHUNK)
            stop = min(CHUNK, start + end - position)
            yield chunks[index][start:stop]
            position += stop - start


def _take_memory(sizes: list[int], is_pinned: bool) -> list[Tensor]:
    """Pinned for as long as the system gives any."""
    chunks: list[Tensor] = []
    for size in sizes:
        if is_pinned:
            try:
                chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
                continue
            except RuntimeError as error:
                is_pinned, got = False, sum(map(len, chunks)) >> 20
                log.warning(
                    "the copy of a checkpoint is slower than it could be: %d of %d MiB of host memory are "
                    "pinned, then: %s",
                    got,
                    sum(sizes) >> 20,
                    one_line(error),
                )
        try:
            chunks.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
    return chunks


def _matched(layout: Layout, shards: Iterator[Shard]) -> Iterator[tuple[Tensor, str]]:
    """The bytes of each shard, where they are, and its kind, while they are those laid out."""
    for expected in layout.shards:
        shard = next(shards, None)
        if shard is None or shard.values is None or shard != expected:
            raise LayoutChangedError(expected.title)
        yield as_bytes(shard.values), shard.kind
    if next(shards, None) is not None:
        raise LayoutChangedError("more shards than before")
