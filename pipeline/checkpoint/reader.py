"""Verifies a checkpoint's files, and reads values of whole-model tensors from them.

check_file_sizes compares sizes. check_content compares checksums of every byte, and names damaged tensors. A
read takes the requested values from all files that have some of them. A single run of values of the same
dtype goes directly into the receiving tensor.
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
from pipeline.checkpoint.shard_file import DTYPES, as_bytes, hash_range, open_for_reading, read_exactly
from pipeline.checkpoint.shards import BUFFER, WEIGHT, Integers, Region, Shard, copy_runs, overlap
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import CheckpointError
from pipeline.files import open_regular_file
from pipeline.models.weights import TensorEntry

NUM_THREADS = 4  # threads that verify files, one file each
MAX_OPEN_FILES = 64  # files that a CheckpointReader keeps open
MODEL_KINDS = (WEIGHT, BUFFER)
"""Kinds of tensors in a model's state dict."""


def ignore_progress(_: int) -> None:
    """Do nothing. Default of arguments that receive progress."""


@dataclass(frozen=True)
class Damage:
    """Damage of one file."""

    file: str
    """Name of the file."""
    problem: str
    host: str = ""
    """Machine that wrote the file; empty if it is not known."""
    tensors: tuple[str, ...] = ()
    """Damaged tensors, such as `exp_avg of embed.weight`.

    Empty if the damage is outside of tensors, or if the file was not read to its end.
    """

    def __str__(self) -> str:
        text = f"{self.file}: {self.problem}"
        if self.tensors:
            more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
            text += f" ({', '.join(self.tensors[:3])}{more})"
        if self.host:
            text += f"; written on {self.host}"
        return text


@tag_errors(Phase.WEIGHTS)
def check_content(
    manifest: Manifest,
    files: Collection[str] | None = None,
    kinds: Collection[str] | None = None,
    advance: Callable[[int], object] = ignore_progress,
) -> list[Damage]:
    """Compare every byte of the files in the checkpoint's folder with the checksums, and return the damages.

    Missing files are no damage here; see check_file_sizes.

    Args:
        manifest: Manifest of the checkpoint.
        files: Names of the files to read; `None` for all.
        kinds: Kinds of the shards to read; `None` for all.
        advance: Called on several threads with a number of newly compared bytes; with `kinds`, headers are
            not counted.
    """
    try:
        _ = manifest.table
    except CheckpointError as error:
        return [Damage(TABLE, str(error))]
    chosen = [file for file in manifest.files if files is None or file.name in files]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        damages = threads.map(lambda file: _check_file(manifest, file, kinds, advance), chosen)
        return [damage for damage in damages if damage is not None]


def check_file_sizes(manifest: Manifest) -> list[Damage]:
    """Return the damages visible without reading: missing files, wrong sizes, and links or devices.

    If machines share no file system, a folder has only the files of one place (see FileRecord.place). So an
    absent file is a damage only if another file of its place is here, or if no file is here at all. If the
    table of shards is damaged, this is the only damage returned.
    """
    damages, absent = inspect_files(manifest)
    places = {file.place for file in manifest.files if file.name not in absent}
    for file in manifest.files:
        if file.name in absent and (file.place in places or not places):
            damages.append(Damage(file.name, "missing", file.host))
    try:
        problem = _find_size_difference(manifest.folder / TABLE, manifest.shard_table.bytes)
    except OSError as error:
        problem = "missing" if isinstance(error, FileNotFoundError) else str(error)
    return damages if problem is None else [Damage(TABLE, problem)]


def inspect_files(manifest: Manifest) -> tuple[list[Damage], set[str]]:
    """Return damages of files in the checkpoint's folder, and the names of absent files.

    A file is damaged if it has another size or is not a plain file. Contents are not read.
    """
    damages = []
    absent = set()
    for file in manifest.files:
        try:
            problem = _find_size_difference(manifest.folder / file.name, file.bytes)
        except FileNotFoundError:
            absent.add(file.name)
            continue
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is not None:
            damages.append(Damage(file.name, problem, file.host))
    return damages, absent


def _find_size_difference(path: Path, written: int) -> str | None:
    """Return a message if the file's size is not the number of bytes written, else `None`.

    Raises:
        OSError: The file does not exist, or is not a plain file.
    """
    with open_for_reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
    return None if size == written else f"{size} bytes, {written} were written"


def _check_file(
    manifest: Manifest, file: FileRecord, kinds: Collection[str] | None, advance: Callable[[int], object]
) -> Damage | None:
    """Return the damage of a file; `None` if it is intact or absent."""
    try:
        with open_for_reading(manifest.folder / file.name) as descriptor:
            layout = manifest.layout_of(file)
            header = _read(descriptor, 0, len(layout.header))
            file_checksum = xxhash.xxh3_128(header)
            damaged_tensors = list[str]()
            end = len(header)
            advance(end if kinds is None else 0)
            for shard, offset in zip(layout.shards, layout.offsets, strict=True):
                if kinds is None or shard.kind in kinds:
                    checksum = hash_range(descriptor, offset, shard.num_bytes)
                    padding = _read(descriptor, end, offset - end)
                    file_checksum.update(padding + checksum.digest())
                    if checksum.hexdigest() != shard.checksum:
                        damaged_tensors.append(shard.title)
                    advance(offset - end + shard.num_bytes)
                end = offset + shard.num_bytes
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damage(file.name, error.strerror or str(error), file.host)
    except CheckpointError as error:
        return Damage(file.name, str(error), file.host)
    titles = tuple(dict.fromkeys(damaged_tensors))
    if header != layout.header:
        return Damage(file.name, "the header is damaged: it differs from the manifest", file.host, titles)
    # The file's checksum can be compared only if all shards were read.
    differs = kinds is None and file_checksum.hexdigest() != file.xxh3_128
    if damaged_tensors or differs:
        return Damage(file.name, "the content is damaged: its checksum differs", file.host, titles)
    return None


def _read(descriptor: int, offset: int, length: int) -> bytes:
    content = bytearray(length)
    read_exactly(descriptor, offset, memoryview(content))
    return bytes(content)


class CheckpointReader:
    """Reads regions of a checkpoint's tensors. Implements checkpoint.shards.ShardSource.

    Use it as a context manager, because it keeps files open.
    """

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.scalars: Mapping[str, Any] = manifest.scalars
        """Saved numbers of the optimizer by name, see RankState.scalars."""
        self._descriptors: OrderedDict[str, int] = OrderedDict()  # by file name, the last one used at the end
        # Offset of each shard by file name, of closed files too, since computing them takes long.
        self._offsets: dict[str, Integers] = {}

    def get_shapes(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """Return the shape of each whole tensor by (name, kind)."""
        return self.manifest.table.shapes

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None:
        """Fill `out` with the values of a region, from all files that have some of them.

        This takes host memory for at most one shard, and for the region unless `out` is contiguous and on the
        CPU.

        Args:
            name: Name of the tensor.
            kind: Kind of the tensor.
            region: Region of the whole tensor.
            out: Tensor to fill: 1-D, region.length values, any dtype and device.

        Raises:
            CheckpointError: The checkpoint has no such tensor, or one of another shape, or a file cannot be
                read.
        """
        assert tuple(out.shape) == (region.length,), f"{tuple(out.shape)} for {region}"
        table = self.manifest.table
        rows = table.rows_of(name, kind, region)
        shape = table.shapes.get((name, kind), ())
        if rows is None:
            raise CheckpointError(
                f"{self.manifest.folder} has no {kind} of {name}, so it belongs to another model; resume "
                "with the model that was saved"
            )
        if shape != region.shape:
            raise CheckpointError(
                f"{self.manifest.folder}: {kind} of {name} has shape {list(shape)}, and in this model shape "
                f"{list(region.shape)}; resume with the model that was saved"
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
        # ShardTable.check has proved that every value is stored once.
        assert filled == region.length, f"{region} is not inside {kind} of {name}"
        if not in_place:
            out.copy_(target)

    def _fill(self, row: int, shard: Shard, runs: Integers, target: Tensor) -> None:
        """Copy runs of values from a shard's file.

        Args:
            row: Row of the shard in the table.
            shard: The shard.
            runs: Array of (offset in the shard, offset in the target, length) per run, in values.
            target: 1-D tensor on the CPU.

        Raises:
            CheckpointError: The file cannot be read.
        """
        dtype = shard.dtype
        file_index = bisect_right(self.manifest.first_rows, row) - 1
        file = self.manifest.files[file_index]
        try:
            descriptor = self._get_descriptor(file)
            offset = int(self._offsets[file.name][row - self.manifest.first_rows[file_index]])
            if len(runs) == 1 and target.dtype == dtype:  # read without another copy
                begin, target_begin, length = runs[0].tolist()
                view = as_bytes(target[target_begin : target_begin + length]).numpy().data
                read_exactly(descriptor, offset + begin * dtype.itemsize, view)
                return
            for group in _group_runs(runs):
                begin = int(group[0, 0])
                end = int(group[-1, 0] + group[-1, 2])
                values = torch.empty(end - begin, dtype=dtype)
                read_exactly(descriptor, offset + begin * dtype.itemsize, as_bytes(values).numpy().data)
                copy_runs(values, target, group - np.array([begin, 0, 0]))
        except OSError as error:
            path = self.manifest.folder / file.name
            reason = error.strerror or error
            advice = "restore it from a copy, or resume from another checkpoint"
            if isinstance(error, FileNotFoundError):
                advice = "copy it here, or set run_dir or runs_dir to a folder that all machines share"
            raise CheckpointError(
                f"{path} with {shard.title} cannot be read: {reason}; rank {file.rank} wrote it on "
                f"{file.host}; {advice}"
            ) from None

    def _get_descriptor(self, file: FileRecord) -> int:
        """Return the descriptor of an open file. Opens it if needed, and closes the least recently used one.

        Raises:
            OSError: The file cannot be opened, or its header differs from the manifest.
            CheckpointError: The file's size in the manifest does not match its shards.
        """
        descriptor = self._descriptors.pop(file.name, None)
        if descriptor is None:
            descriptor = open_regular_file(self.manifest.folder / file.name, follow_links=False)
            try:
                if file.name not in self._offsets:
                    self._offsets[file.name] = self._find_offsets(descriptor, file)
            except (OSError, CheckpointError):
                os.close(descriptor)
                raise
        self._descriptors[file.name] = descriptor
        if len(self._descriptors) > MAX_OPEN_FILES:
            _, least_recently_used = self._descriptors.popitem(last=False)
            os.close(least_recently_used)
        return descriptor

    def _find_offsets(self, descriptor: int, file: FileRecord) -> Integers:
        """Return the offset of each shard, after comparing the file's header with the manifest.

        Raises:
            OSError: The header differs.
        """
        layout = self.manifest.layout_of(file)
        if _read(descriptor, 0, len(layout.header)) != layout.header:
            raise OSError(errno.EINVAL, "its header differs from the manifest")
        return np.array(layout.offsets, np.int64)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _group_runs(runs: Integers) -> list[Integers]:
    """Group runs so that each group takes one read.

    All runs form one group if they cover at least a fourth of the range from the first to the last value.
    Else each run is a group.
    """
    span = int(runs[-1, 0] + runs[-1, 2] - runs[0, 0])
    is_dense = int(runs[:, 2].sum()) * 4 >= span
    return [runs] if is_dense else list(runs[:, None])


class CheckpointWeights:
    """Reads weights and buffers of a checkpoint by name. Implements pipeline.models.weights.WeightFile.

    Args:
        manifest: Manifest of the checkpoint.
        names: Name in the checkpoint for each name to offer; `None` to offer all under their own names.
    """

    files: Sequence[Path] = ()
    """Always empty; see WeightFile.files."""
    dtype = torch.float32
    """Default dtype of an export; `read` returns the saved dtype."""
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
        self._kinds = {name: saved[saved_name][0] for name, saved_name in self._saved_names.items()}
        self.entries: Mapping[str, TensorEntry] = {
            name: saved[saved_name][1] for name, saved_name in self._saved_names.items()
        }
        """Shape and saved dtype of each weight and buffer by name."""
        self.buffers = {name for name, kind in self._kinds.items() if kind == BUFFER}
        """Names of the buffers."""

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU, in the dtype in which it was saved.

        Raises:
            CheckpointError: A file cannot be read.
        """
        shape, dtype = self.entries[name]
        assert isinstance(dtype, torch.dtype)
        values = torch.empty(math.prod(shape), dtype=dtype)
        region = Region(shape, None, 0, len(values))  # the whole tensor
        self._reader.read(self._saved_names[name], self._kinds[name], region, values)
        return values.view(shape)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
