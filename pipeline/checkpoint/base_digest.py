"""The digest of an adapter's base: of every byte of its weights, tensor by tensor, wherever their files lie.

The checkpoint also records size, time of last change and inode of each file, so that unchanged files are not
read again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from pipeline.data.documents.digests import SETTLED_NANOSECONDS
from pipeline.models.weight_files import WeightFile

BASE, FILES = "base", "base_files"  # of what a checkpoint says of its adapter
_WHOLE = "whole "  # digests without it are of an older release
_FIRST = 1 << 20  # bytes of a tensor that went into those
_PIECE = 1 << 26  # bytes hashed in one call, which holds Python's lock
_QUIET_SECONDS = 3.0
log = logging.getLogger(__name__)


def stamps_of(files: Sequence[Path]) -> list[list[Any]]:
    """Return path, size, time of last change and inode of each file; nothing if one changed just now."""
    stats = [(str(path.absolute()), path.stat()) for path in files]
    if any(time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS for _, stat in stats):
        return []  # it may change again within the same tick of the clock
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats]


def digest_of(file: WeightFile, known: Mapping[str, Any]) -> str:
    """Return the digest of names, shapes, dtypes and values.

    Args:
        file: Is read, unless its files are those that `known` lists.
        known: What a checkpoint says of its adapter. Its digest's release is followed.
    """
    before = str(known.get(BASE, {}).get("digest") or "")
    if before and known.get(FILES) and known[FILES] == stamps_of(file.files):
        return before
    if before and not before.startswith(_WHOLE):
        return _read(file, _FIRST)
    return _WHOLE + _read(file, None)


def _read(file: WeightFile, most: int | None) -> str:
    digest, begin, done, is_told = xxhash.xxh3_128(), time.monotonic(), 0, False
    for name in sorted(file.entries):
        entry = file.entries[name]
        digest.update(f"{name} {list(entry.shape)} {entry.dtype}".encode())
        values = file.read(name).flatten()
        values = values[: None if most is None else most // values.element_size()].contiguous()
        for piece in values.view(torch.uint8).split(_PIECE):
            digest.update(piece.numpy().data)
            done += len(piece)
            if not is_told and time.monotonic() - begin > _QUIET_SECONDS:
                is_told = True
                size = sum(
                    math.prod(each.shape) * each.dtype.itemsize
                    for each in file.entries.values()
                    if isinstance(each.dtype, torch.dtype)
                )
                log.info(
                    "reading all weights of the adapter's base to detect changes: %.1f of %.1f GB",
                    done / 1e9,
                    size / 1e9,
                )
    return digest.hexdigest()
