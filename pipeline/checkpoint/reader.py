"""Verifies a checkpoint's files, and reads values of whole-model tensors from them.

Sizes are compared first, then the checksum of every byte. A reported damage names the file and the tensors. A
read copies only the requested values, from whichever files hold them, directly into the receiving tensor.
"""

from __future__ import annotations

import errno
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipeline.checkpoint.manifest import TABLE, FileRecord, Manifest
from pipeline.checkpoint.shard_file import DTYPES, as_bytes, hash_stretch, open_for_reading, read_exactly
from pipeline.checkpoint.shards import BUFFER, WEIGHT, Integers, Region, Shard, copy_runs, overlap
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import CheckpointError
from pipeline.files import open_regular_file
from pipeline.models.weights import TensorEntry

THREADS = 4


def ignore_progress(_: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Damage:
    """Damage of one file."""

    file: str
    what: str
    host: str = ""
    """Machine that wrote the file; empty if it is not known."""
    tensors: tuple[str, ...] = ()
    """Damaged tensors, such as `exp_avg of embed.weight`; empty if the damage is outside of tensors."""

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        tensors = f" ({', '.join(self.tensors[:3])}{more})" if self.tensors else ""
        written = f"; written on {self.host}" if self.host else ""
        return f"{self.file}: {self.what}{tensors}{written}"


@tag_errors(Phase.WEIGHTS)
def check_content(
    manifest: Manifest,
    files: Collection[str] | None = None,
    kinds: Collection[str] | None = None,
    advance: Callable[[int], object] = ignore_progress,
) -> list[Damage]:
    """Compare every byte of the files in this folder with the checksums, and return the damages.

    Args:
        manifest: Manifest of the checkpoint.
        files: Names of the files to read; `None` for all.
        kinds: Kinds of the shards to read; `None` for all.
        advance: Called with the number of bytes compared since the last call, on several threads.
    """
    try:
        _ = manifest.table
    except CheckpointError as error:
        return [Damage(TABLE, str(error))]
    chosen = [file for file in manifest.files if files is None or file.name in files]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda file: _check_content(manifest, file, kinds, advance), chosen)
        return [damage for damage in found if damage is not None]


def check_file_sizes(manifest: Manifest) -> list[Damage]:
    """Return the damages visible without reading: missing files, wrong sizes, and links or devices.

    If nodes share no file system, a folder holds only the files of its own place. A place without any file
    in this folder is no damage.
    """
    damages, absent = inspect_files(manifest)
    here = {file.place for file in manifest.files if file.name not in absent}
    for file in manifest.files:
        if file.name in absent and (file.place in here or not here):
            damages.append(Damage(file.name, "missing", file.host))
    try:
        what = _find_size_difference(manifest.folder / TABLE, manifest.shard_table.bytes)
    except OSError as error:
        what = "missing" if isinstance(error, FileNotFoundError) else str(error)
    return damages if what is None else [Damage(TABLE, what)]


def inspect_files(manifest: Manifest) -> tuple[list[Damage], set[str]]:
    """Return damages of files in this folder (wrong size, not a plain file) and names of absent files."""
    damages = []
    absent = set()
    for file in manifest.files:
        try:
            what = _find_size_difference(manifest.folder / file.name, file.bytes)
        except FileNotFoundError:
            absent.add(file.name)
            continue
        except OSError as error:
            what = error.strerror or str(error)
        if what is not None:
            damages.append(Damage(file.name, what, file.host))
    return damages, absent


def _find_size_difference(path: Path, written: int) -> str | None:
    """Return a message if a plain file has another size, else `None`."""
    with open_for_reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
    return None if size == written else f"{size} bytes, {written} were written"


def _check_content(
    manifest: Manifest, file: FileRecord, kinds: Collection[str] | None, advance: Callable[[int], object]
) -> Damage | None:
    """Return the damage of a file; `None` if it is intact or absent."""
    try:
        with open_for_reading(manifest.folder / file.name) as descriptor:
            layout = manifest.layout_of(file)
            header = _read(descriptor, 0, len(layout.header))
            whole = xxhash.xxh3_128(header)
            damaged = list[str]()
            end = len(header)
            advance(0 if kinds else end)
            for shard, offset in zip(layout.shards, layout.offsets, strict=True):
                if kinds is None or shard.kind in kinds:
                    own = hash_stretch(descriptor, offset, shard.num_bytes)
                    whole.update(_read(descriptor, end, offset - end) + own.digest())
                    if own.hexdigest() != shard.checksum:
                        damaged.append(shard.title)
                    advance(offset - end + shard.num_bytes)
                end = offset + shard.num_bytes
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damage(file.name, error.strerror or str(error), file.host)
    except CheckpointError as error:
        return Damage(file.name, str(error), file.host)
    right_header = header == layout.header
    if right_header and not damaged and (kinds is not None or whole.hexdigest() == file.xxh3_128):
        return None
    part = "the content" if right_header else "the header"
    what = f"{part} is damaged, by its checksum"
    return Damage(file.name, what, file.host, tuple(dict.fromkeys(damaged)))


def _read(descriptor: int, offset: int, length: int) -> bytes:
    content = bytearray(length)
    read_exactly(descriptor, offset, memoryview(content))
    return bytes(content)


MAX_OPEN = 64
MODEL_KINDS = (WEIGHT, BUFFER)
"""Kinds of tensors in a model's state dict."""


class CheckpointReader:
    """ShardSource of one checkpoint. Use it as a context manager, because it keeps files open."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.scalars: Mapping[str, Any] = manifest.scalars
        self._open: OrderedDict[str, int] = OrderedDict()
        self._offsets: dict[str, Integers] = {}  # of closed files too, since computing them takes long

    def names(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """Return the shape of each whole tensor by (name, kind)."""
        return self.manifest.table.shapes

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None:
        """Fill `out` (1-D, region.length values, any dtype and device) from whichever files hold the values.

        This takes host memory for at most one shard, and for the region if `out` is on a device.

        Raises:
            CheckpointError: Some values are missing or cannot be read.
        """
        assert tuple(out.shape) == (region.length,), f"{tuple(out.shape)} for {region}"
        table = self.manifest.table
        rows = table.rows_of(name, kind, region)
        shape = table.shapes.get((name, kind), ())
        if rows is None:
            raise CheckpointError(
                f"{self.manifest.folder} holds no {kind} of {name}; it belongs to another model: resume with "
                "the model that was saved"
            )
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
        # The check of the manifest proved that every value is stored once.
        assert filled == region.length, f"{region} is not inside {kind} of {name}"
        if not in_place:
            out.copy_(target)

    def _fill(self, row: int, shard: Shard, runs: Integers, target: Tensor) -> None:
        """Copy runs (offset in the shard, offset in the target, length) from the shard's file."""
        dtype = shard.dtype
        number = bisect_right(self.manifest.first_rows, row) - 1
        file = self.manifest.files[number]
        try:
            descriptor = self._get_descriptor(file)
            offset = int(self._offsets[file.name][row - self.manifest.first_rows[number]])
            if len(runs) == 1 and target.dtype == dtype:
                begin, into, length = runs[0].tolist()
                straight = as_bytes(target[into : into + length]).numpy().data
                read_exactly(descriptor, offset + begin * dtype.itemsize, straight)
                return
            for few in _batches(runs):
                begin = int(few[0, 0])
                end = int(few[-1, 0] + few[-1, 2])
                values = torch.empty(end - begin, dtype=dtype)
                read_exactly(descriptor, offset + begin * dtype.itemsize, as_bytes(values).numpy().data)
                copy_runs(values, target, few - np.array([begin, 0, 0]))
        except OSError as error:
            path = self.manifest.folder / file.name
            why = error.strerror or error
            raise CheckpointError(
                f"{path} with {shard.title} cannot be read: {why}; rank {file.rank} wrote it on {file.host}; "
                "bring it here, or use a folder all nodes share"
            ) from None

    def _get_descriptor(self, file: FileRecord) -> int:
        descriptor = self._open.pop(file.name, None)
        if descriptor is None:
            descriptor = open_regular_file(self.manifest.folder / file.name, follow_links=False)
            try:
                if file.name not in self._offsets:
                    self._offsets[file.name] = self._find_offsets(descriptor, file)
            except (OSError, CheckpointError):
                os.close(descriptor)
                raise
        self._open[file.name] = descriptor  # at the end, as the last one used
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _find_offsets(self, descriptor: int, file: FileRecord) -> Integers:
        """Return the offset of each shard, after comparing the file's header with the manifest.

        Raises:
            OSError: The header differs.
        """
        layout = self.manifest.layout_of(file)
        if _read(descriptor, 0, len(layout.header)) != layout.header:
            raise OSError(errno.EINVAL, "its header is not the manifest's")
        return np.array(layout.offsets, np.int64)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _batches(runs: Integers) -> list[Integers]:
    """Group runs into reads: a single read if they cover a fourth of their span, else one for each run."""
    span = int(runs[-1, 0] + runs[-1, 2] - runs[0, 0])
    dense = int(runs[:, 2].sum()) * 4 >= span
    return [runs] if dense else list(runs[:, None])


class CheckpointWeights:
    """Reads weights and buffers of a checkpoint by name; see pipeline.models.weights.WeightFile.

    Args:
        manifest: Manifest of the checkpoint.
        names: Name in the checkpoint for each name to offer; `None` to offer all under their own names.
    """

    files: Sequence[Path] = ()
    dtype = torch.float32
    """Dtype in which weights are exported by default."""
    rounding_error: float | None = None
    """Relative error of rounding to 4 bits, always `None` here; see MergedWeights in adapters.py."""

    def __init__(self, manifest: Manifest, names: Mapping[str, str] | None = None):
        self._reader = CheckpointReader(manifest)
        saved = {
            name: (kind, TensorEntry(shape, DTYPES[dtype]))
            for name, kind, dtype, shape in manifest.table.entries
            if kind in MODEL_KINDS
        }
        self._saved_names = names or {name: name for name in saved}
        self._kinds = {name: saved[own][0] for name, own in self._saved_names.items()}
        self.entries: Mapping[str, TensorEntry] = {
            name: saved[own][1] for name, own in self._saved_names.items()
        }
        self.buffers = {name for name, kind in self._kinds.items() if kind == BUFFER}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in the dtype in which it was saved."""
        shape, dtype = self.entries[name]
        assert isinstance(dtype, torch.dtype)
        values = torch.empty(math.prod(shape), dtype=dtype)
        region = Region(shape, None, 0, len(values))
        self._reader.read(self._saved_names[name], self._kinds[name], region, values)
        return values.view(shape)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
