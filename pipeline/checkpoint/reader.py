"""Reads a checkpoint's files: whether they are what was written, and values of whole-model tensors.

Sizes are compared first, then every byte; a damage names file and tensors. Values come back whichever way
they were divided over files: only the stretches asked for are read, straight into the tensor that takes
them.
"""

from __future__ import annotations

import errno
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipeline.checkpoint.manifest import MANIFEST, TABLE, FileRecord, Manifest, read_manifest
from pipeline.checkpoint.shard_file import DTYPES as SAVED_DTYPES
from pipeline.checkpoint.shard_file import as_bytes, hash_stretch, opened, read_exactly
from pipeline.checkpoint.shards import BUFFER, WEIGHT, Integers, Region, Shard, copy_runs, overlap
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import CheckpointError
from pipeline.files import open_plain

THREADS = 4


@dataclass(frozen=True)
class Damage:
    """One file that is not what was written."""

    file: str
    what: str
    host: str = ""
    """Where it was written; empty: not known."""
    tensors: tuple[str, ...] = ()
    """Those that lie at the damaged place, such as `exp_avg of embed.weight`; none: not in a tensor."""

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        tensors = f" ({', '.join(self.tensors[:3])}{more})" if self.tensors else ""
        written = f"; written on {self.host}" if self.host else ""
        return f"{self.file}: {self.what}{tensors}{written}"


def verify(folder: Path) -> list[Damage]:
    """Reads a checkpoint through; an empty list: it is whole."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    return check_sizes(manifest) or check_content(manifest)


@phase(Phase.WEIGHTS)
def check_content(manifest: Manifest, files: Collection[str] | None = None) -> list[Damage]:
    """As verify, of the files that are there.

    Args:
        files: Names of those to read; None: all.
    """
    try:
        _ = manifest.table
    except CheckpointError as error:
        return [Damage(TABLE, str(error))]
    chosen = [file for file in manifest.files if files is None or file.name in files]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda file: _check_content(manifest, file), chosen)
        return [damage for damage in found if damage is not None]


def check_sizes(manifest: Manifest) -> list[Damage]:
    """What can be seen without reading: files that are missing, no plain files, or of another size.

    Where nodes share no file system, a folder holds the files of its own place: other places, none of whose
    files are here, are no damage.
    """
    damages, absent = look(manifest)
    here = {file.place for file in manifest.files if file.name not in absent}
    for file in manifest.files:
        if file.name in absent and (file.place in here or not here):
            damages.append(_whole_file(manifest, file, "missing"))
    return _look_at_table(manifest) or damages


def _look_at_table(manifest: Manifest) -> list[Damage]:
    try:
        what = _other_size(manifest.folder / TABLE, manifest.shard_table.bytes)
    except OSError as error:
        what = "missing" if isinstance(error, FileNotFoundError) else str(error)
    return [] if what is None else [Damage(TABLE, what)]


def look(manifest: Manifest) -> tuple[list[Damage], set[str]]:
    """The files here that are not what they should be, by their size; the names of those not here."""
    damages, absent = [], set()
    for file in manifest.files:
        try:
            what = _other_size(manifest.folder / file.name, file.bytes)
            if what is not None:
                damages.append(_whole_file(manifest, file, what))
        except FileNotFoundError:
            absent.add(file.name)
        except OSError as error:
            damages.append(_whole_file(manifest, file, error.strerror or str(error)))
    return damages, absent


def _other_size(path: Path, written: int) -> str | None:
    """What is wrong with the size of a plain file; None: nothing."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
    return None if size == written else f"{size} bytes, {written} were written"


def _whole_file(manifest: Manifest, file: FileRecord, what: str) -> Damage:
    try:
        titles = tuple(dict.fromkeys(shard.title for shard in manifest.shards_of(file)))
    except CheckpointError:  # the table is no better
        titles = ()
    return Damage(file.name, what, file.host, titles)


def _check_content(manifest: Manifest, file: FileRecord) -> Damage | None:
    """None: nothing is wrong, or the file is not here."""
    try:
        with opened(manifest.folder / file.name) as descriptor:
            layout = manifest.layout_of(file)
            header = bytearray(len(layout.header))
            read_exactly(descriptor, 0, memoryview(header))
            right_header = bytes(header) == layout.header
            whole, damaged, at = xxhash.xxh3_128(header), list[str](), len(header)
            for shard, offset in zip(layout.shards, layout.offsets, strict=True):
                between = bytearray(offset - at)
                read_exactly(descriptor, at, memoryview(between))
                whole.update(between)
                own = hash_stretch(descriptor, offset, shard.num_bytes)
                at = offset + shard.num_bytes
                whole.update(own.digest())
                if own.hexdigest() != shard.checksum:
                    damaged.append(shard.title)
            if whole.hexdigest() == file.xxh3_128 and right_header and not damaged:
                return None
            part = "not" if right_header else "its header is not"
            what = f"{part} what was written, by its checksum"
            return Damage(file.name, what, file.host, tuple(dict.fromkeys(damaged)))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damage(file.name, error.strerror or str(error), file.host)
    except CheckpointError as error:
        return Damage(file.name, str(error), file.host)


MAX_OPEN = 64
KINDS = (WEIGHT, BUFFER)  # of what a state dict would hold
VALUES_AT_ONCE = 1 << 22


def weights_of(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...], torch.dtype]]:
    """name -> (kind, shape, dtype as saved) of what a state dict would hold."""
    return {
        name: (kind, shape, SAVED_DTYPES[dtype])
        for name, kind, dtype, shape in manifest.table.entries
        if kind in KINDS
    }


class CheckpointReader:
    """A ShardSource over one checkpoint. Use it as a context: it holds files open."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.scalars: Mapping[str, Any] = manifest.scalars
        self._open: OrderedDict[str, int] = OrderedDict()
        self._offsets: dict[str, Integers] = {}  # kept when a file is closed: finding them out takes long

    def names(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """(name, kind) -> shape of the whole tensor, of all there is."""
        return self.manifest.table.shapes

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None:
        """Fills `out` (1-D, region.length values, any dtype and device), wherever they were written.

        Host memory: at most one shard, and the region once more where `out` is on a device.

        Raises:
            CheckpointError: some of them are missing or cannot be read.
        """
        assert tuple(out.shape) == (region.length,), f"{tuple(out.shape)} for {region}"
        table = self.manifest.table
        rows, shape = table.rows_of(name, kind, region), table.shapes.get((name, kind), ())
        if rows is None:
            raise CheckpointError(f"{self.manifest.folder} holds no {kind} of {name}; it is of another model")
        if shape != region.shape:
            raise CheckpointError(
                f"{self.manifest.folder}: {kind} of {name} has shape {list(shape)}, "
                f"this model's {list(region.shape)}; resume with the model that was saved"
            )
        in_place = out.device.type == "cpu" and out.is_contiguous()
        target = out if in_place else torch.empty(out.shape, dtype=out.dtype)
        filled = 0
        for row in rows:
            shard = table.shard(row)
            runs = overlap(shard.region, region)
            if len(runs):
                self._fill(row, shard, runs, target)
                filled += int(runs[:, 2].sum())
        # The manifest is known to have every value once.
        assert filled == region.length, f"{region} is not inside {kind} of {name}"
        if not in_place:
            out.copy_(target)

    def _fill(self, row: int, shard: Shard, runs: Integers, target: Tensor) -> None:
        """Copies runs (offset in the shard, offset in the target, length) out of its file."""
        dtype, number = shard.dtype, bisect_right(self.manifest.first_rows, row) - 1
        file = self.manifest.files[number]
        try:
            descriptor = self._opened(file)
            offset = int(self._offsets[file.name][row - self.manifest.first_rows[number]])
            if len(runs) == 1 and target.dtype == dtype:
                begin, into, length = runs[0].tolist()
                straight = as_bytes(target[into : into + length]).numpy().data
                read_exactly(descriptor, offset + begin * dtype.itemsize, straight)
                return
            for few in _batches(runs):
                begin, end = int(few[0, 0]), int(few[-1, 0] + few[-1, 2])
                values = torch.empty(end - begin, dtype=dtype)
                read_exactly(descriptor, offset + begin * dtype.itemsize, as_bytes(values).numpy().data)
                copy_runs(values, target, few - np.array([begin, 0, 0]))
        except OSError as error:
            path, why = self.manifest.folder / file.name, error.strerror or error
            raise CheckpointError(
                f"{path} with {shard.title} cannot be read: {why}; rank {file.rank} wrote it on {file.host}; "
                "bring it here, or use a folder all nodes share"
            ) from None

    def _opened(self, file: FileRecord) -> int:
        descriptor = self._open.pop(file.name, None)
        if descriptor is None:
            descriptor = open_plain(self.manifest.folder / file.name, follow_links=False)
            try:
                if file.name not in self._offsets:
                    self._offsets[file.name] = self._find_offsets(descriptor, file)
            except (OSError, CheckpointError):
                os.close(descriptor)
                raise
        self._open[file.name] = descriptor  # the last used are at the end
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _find_offsets(self, descriptor: int, file: FileRecord) -> Integers:
        """Of each shard, once the file is seen to have the header that follows from the manifest."""
        layout = self.manifest.layout_of(file)
        header = bytearray(len(layout.header))
        read_exactly(descriptor, 0, memoryview(header))
        if bytes(header) != layout.header:
            raise OSError(errno.EINVAL, "its header is not the manifest's")
        return np.array(layout.offsets, np.int64)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stretches(shape: tuple[int, ...]) -> Iterator[Region]:
    """A whole tensor, a few MB at a time."""
    size = math.prod(shape)
    for start in range(0, size, VALUES_AT_ONCE):
        yield Region(shape, None, start, min(VALUES_AT_ONCE, size - start))


def _batches(runs: Integers) -> list[Integers]:
    """Runs to be read at once: all of them where they are a fourth of their span or more, else each."""
    span = int(runs[-1, 0] + runs[-1, 2] - runs[0, 0])
    dense = int(runs[:, 2].sum()) * 4 >= span
    return [runs] if dense else list(runs[:, None])
