"""Files of a checkpoint at the level of the operating system: written in one pass, hashed beside it.

Nothing here holds more than one shard. Files are opened only where they are plain files: no links.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from pipeline import foreign
from pipeline.checkpoint.layout import Layout
from pipeline.shards import Shard

BLOCK = 1 << 24
FLUSH_EVERY = 1 << 26


class LayoutChangedError(Exception):
    """The shards are not those that the file was laid out for."""


@dataclass(frozen=True)
class Written:
    """Checksums of a file, taken from what was handed to the disk: every byte is hashed once."""

    xxh3_128: str
    """Of the header, then of what lies before each shard and the shard's own sum (8 bytes)."""
    shards: tuple[str, ...]
    """xxh3_64 of each shard, in order."""


def write_file(
    path: Path, layout: Layout, values: Iterable[Iterable[memoryview]], lasting: bool = False
) -> Written:
    """Writes a file of which nothing may exist yet, and returns once it is on the disk.

    Args:
        values: For each shard of the layout, in order, its bytes in one or more views.
        lasting: The views stay as they are until this returns. Otherwise until the next are asked for.

    Raises:
        OSError: it cannot be written: no room, an I/O error, fewer bytes than there should be.
        LayoutChangedError: the values are not as long as the layout says.
    """
    parts = map(list, values)
    kept = list(parts) if lasting else []
    sums: list[xxhash.xxh3_64] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # Hashing goes on while writes and the disk are waited for; all at once where that can be.
        with ThreadPoolExecutor(1, "checksums") as beside:
            of_kept = beside.submit(lambda: [hash_views(views) for views in kept])
            writer = _Writer(descriptor)
            writer.put(memoryview(layout.header))
            for shard, offset, views in zip(layout.shards, layout.offsets, kept or parts, strict=True):
                writer.put(memoryview(bytes(offset - writer.position)))
                hashed = None if lasting else beside.submit(hash_views, views)
                for view in views:
                    writer.put(view)
                if writer.position != offset + shard.num_bytes:
                    raise LayoutChangedError(shard.title)
                if hashed is not None:
                    sums.append(hashed.result())
            os.fsync(descriptor)
            if os.fstat(descriptor).st_size != layout.num_bytes:
                raise OSError(errno.EIO, "fewer bytes are in the file than were written")
            return _written(layout, of_kept.result() or sums)
    finally:
        os.close(descriptor)


def hash_views(views: Iterable[memoryview]) -> xxhash.xxh3_64:
    """The checksum of a shard, in one or more views."""
    checksum = xxhash.xxh3_64()
    for view in views:
        checksum.update(view)
    return checksum


def _written(layout: Layout, sums: list[xxhash.xxh3_64]) -> Written:
    whole, at = xxhash.xxh3_128(layout.header), len(layout.header)
    for shard, offset, own in zip(layout.shards, layout.offsets, sums, strict=True):
        whole.update(bytes(offset - at))
        whole.update(own.digest())
        at = offset + shard.num_bytes
    return Written(whole.hexdigest(), tuple(own.hexdigest() for own in sums))


class _Writer:
    """Appends to a file."""

    def __init__(self, descriptor: int):
        self.position = 0
        self._descriptor = descriptor
        self._flushed = 0

    def put(self, view: memoryview) -> None:
        while len(view):
            taken = os.write(self._descriptor, view[:BLOCK])  # may be less: the next call then says why
            if taken == 0:
                raise OSError(errno.EIO, "the file takes no more bytes")
            view = view[taken:]
            self.position += taken
            if self.position - self._flushed >= FLUSH_EVERY and hasattr(os, "posix_fadvise"):
                # Linux starts to write what is given up: the disk works while the next shard is fetched,
                # and the checkpoint does not push the training data out of the page cache.
                os.posix_fadvise(
                    self._descriptor, self._flushed, self.position - self._flushed, os.POSIX_FADV_DONTNEED
                )
                self._flushed = self.position


def streamed(layout: Layout, shards: Iterator[Shard]) -> Iterator[list[memoryview]]:
    """The bytes of each shard, fetched to the host one at a time.

    Raises:
        LayoutChangedError: a shard is not the one laid out at its place, or there are more of them.
    """
    for expected in layout.shards:
        shard = next(shards, None)
        if shard is None or shard.values is None or shard != expected:
            raise LayoutChangedError(expected.title)
        yield [as_bytes(shard.values).cpu().numpy().data]
    if next(shards, None) is not None:
        raise LayoutChangedError("more shards than before")


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes (n,) uint8, where it is; a copy only where it is not contiguous."""
    flat = tensor.detach().reshape(-1).contiguous()
    # One value at a stride of two counts as contiguous, but cannot be viewed as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read a plain file with.

    Raises:
        OSError: there is none, or it is a link, a pipe or a device.
    """
    descriptor = open_plain(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_plain(path: Path) -> int:
    """As `opened`, to be closed by the caller. A link is none: what lies outside the run is not read."""
    return foreign.open_plain(path, follow_links=False)


def read_exactly(descriptor: int, offset: int, target: memoryview) -> None:
    """Fills the target from the file.

    Raises:
        OSError: the file ends before that, or cannot be read.
    """
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done:]], offset + done)
        if got == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += got


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file of these parts and waits until it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
