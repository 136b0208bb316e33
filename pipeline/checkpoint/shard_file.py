"""Writes and reads one file of a checkpoint, a safetensors file with the shards of one rank.

The header follows from the shards' names, dtypes and lengths, so a file can be checked against its manifest
to the last byte. It is written and hashed in one pass, one shard at a time.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.checkpoint.shards import Shard
from pipeline.files import open_regular_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of a dtype in safetensors -> the dtype in torch. Shards may have these dtypes."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8  # the header's length is a multiple of this number of bytes
BLOCK_BYTES = 1 << 24  # bytes that are written or hashed at a time
FLUSH_BYTES = 1 << 26  # after so many bytes, Linux is asked to write them to the disk


@dataclass(frozen=True)
class FileLayout:
    """Layout of a file: its header, its shards, and the byte offset of each shard."""

    header: bytes
    """Header with its length before it, as it is in the file."""
    shards: tuple[Shard, ...]
    """Shards without their values, in the file's order."""
    offsets: tuple[int, ...]
    """Offset of each shard in bytes from the start of the file."""
    num_bytes: int
    """Size of the file."""

    @staticmethod
    def of(shards: Iterable[Shard]) -> FileLayout:
        """Return the layout of a file with these shards in their order.

        Raises:
            TypeError: A dtype has no name in safetensors.
        """
        shards = tuple(shard.without_values(shard.checksum) for shard in shards)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        counts: Counter[tuple[str, str]] = Counter()  # number of shards so far by (kind, name)
        begins: list[int] = []
        end = 0
        for shard in shards:
            if shard.dtype not in DTYPE_NAMES:
                raise TypeError(f"{shard.title}: {shard.dtype} has no name in the safetensors format")
            # The format allows no holes, and readers expect a tensor at a multiple of its element size.
            gap = -end % shard.dtype.itemsize
            if gap:
                entries[f"padding/{len(entries)}"] = _make_entry("U8", gap, end, gap)
                end += gap
            key = f"{shard.kind}/{shard.name}/{counts[shard.kind, shard.name]}"
            counts[shard.kind, shard.name] += 1
            entries[key] = _make_entry(DTYPE_NAMES[shard.dtype], shard.region.length, end, shard.num_bytes)
            begins.append(end)
            end += shard.num_bytes
        header = encode_header(entries)
        offsets = tuple(len(header) + begin for begin in begins)
        return FileLayout(header, shards, offsets, len(header) + end)


def encode_header(entries: Mapping[str, Any]) -> bytes:
    """Return the header of a safetensors file with its length before it.

    It is padded to a multiple of 8 bytes, so that values can lie at multiples of their size.
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _make_entry(dtype: str, length: int, begin: int, num_bytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [length], "data_offsets": [begin, begin + num_bytes]}


class LayoutChangedError(Exception):
    """Raised if shards differ from the layout of the file, for example in number, name or length."""


@dataclass(frozen=True)
class FileChecksums:
    """Checksums of a file, computed from the bytes that were passed to the operating system."""

    xxh3_128: str
    """Checksum over the header and, for each shard, the padding before it and the digest of its values.

    It is not the xxh3_128 of the file's bytes, so no value is hashed twice.
    """
    shards: tuple[str, ...]
    """Checksum (xxh3_64) of each shard, in order."""


def write_file(path: Path, layout: FileLayout, values: Iterable[list[memoryview]]) -> FileChecksums:
    """Write a new file and return once it is on the disk.

    Args:
        path: Path of the file, which must not exist.
        layout: Header and offsets of the file.
        values: Bytes of each shard of the layout, in order, in one or more views. Views may be reused when
            the next shard is requested.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
        LayoutChangedError: The values of a shard are not as long as the layout says.
    """
    file_checksum = xxhash.xxh3_128(layout.header)
    shard_checksums: list[str] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        writer = _Writer(descriptor)
        writer.write(memoryview(layout.header))
        for shard, offset, views in zip(layout.shards, layout.offsets, values, strict=True):
            padding = bytes(offset - writer.position)
            writer.write(memoryview(padding))
            checksum = hash_views(views)
            for view in views:
                writer.write(view)
            if writer.position != offset + shard.num_bytes:
                raise LayoutChangedError(shard.title)
            file_checksum.update(padding + checksum.digest())
            shard_checksums.append(checksum.hexdigest())
        os.fsync(descriptor)
        if os.fstat(descriptor).st_size != layout.num_bytes:
            raise OSError(errno.EIO, "fewer bytes are in the file than were written")
    finally:
        os.close(descriptor)
    return FileChecksums(file_checksum.hexdigest(), tuple(shard_checksums))


def hash_views(views: list[memoryview]) -> xxhash.xxh3_64:
    """Return the checksum of a shard in one or more views."""
    checksum = xxhash.xxh3_64()
    for view in views:
        checksum.update(view)
    return checksum


class _Writer:
    """Appends to a file and counts its bytes."""

    def __init__(self, descriptor: int):
        self.position = 0
        """Number of bytes written."""
        self._descriptor = descriptor
        self._flushed = 0  # position up to which Linux was asked to write to the disk

    def write(self, view: memoryview) -> None:
        while len(view):
            # On a full disk, a call may write a part of the bytes; the next one raises.
            num_written = os.write(self._descriptor, view[:BLOCK_BYTES])
            if num_written == 0:
                raise OSError(errno.EIO, "no more bytes can be written to the file")
            view = view[num_written:]
            self.position += num_written
            if self.position - self._flushed >= FLUSH_BYTES:
                # Linux then starts to write, so that the disk works while the next shard is fetched, and the
                # checkpoint does not push the training data out of the page cache.
                os.posix_fadvise(
                    self._descriptor, self._flushed, self.position - self._flushed, os.POSIX_FADV_DONTNEED
                )
                self._flushed = self.position


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor's bytes as (n,) uint8 on its device; copy only if it is not contiguous."""
    flat = tensor.detach().reshape(-1).contiguous()
    # One value with a stride of two counts as contiguous, but cannot be viewed as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


@contextmanager
def open_for_reading(path: Path) -> Iterator[int]:
    """Open a plain file for reading and yield its descriptor.

    Raises:
        OSError: The file does not exist, or it is a link, a pipe or a device.
    """
    descriptor = open_regular_file(path, follow_links=False)  # a link may lead out of the run directory
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, offset: int, target: memoryview) -> None:
    """Fill the target with the bytes of an open file from `offset` on.

    Raises:
        OSError: The file ends before the target is full, or cannot be read.
    """
    num_read = 0
    while num_read < len(target):
        new = os.preadv(descriptor, [target[num_read:]], offset + num_read)
        if new == 0:
            raise OSError(errno.EIO, "the file ends too early")
        num_read += new


def hash_range(descriptor: int, offset: int, length: int) -> xxhash.xxh3_64:
    """Return the checksum of `length` bytes of an open file from `offset` on.

    Raises:
        OSError: The file ends too early, or cannot be read.
    """
    checksum = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(length, BLOCK_BYTES)))
    for start in range(0, length, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, length - start)]
        read_exactly(descriptor, offset + start, block)
        checksum.update(block)
    return checksum
