"""Defines shards, which are contiguous pieces of the tensors of a whole model, independent of its split.

Each rank writes shards of the tensors that it has in memory: fp32 master weights and all optimizer state.
Over all ranks, each value is written once. Any other split reads the values that it needs, so no checkpoint
is ever converted.

Other formats did not fit. DeepSpeed's universal format needs a second job, unpickles, cannot go from ZeRO-2
to ZeRO-3, and does not cover plain PyTorch. torch.distributed.checkpoint needs DTensors, which DeepSpeed's
flat buffers are not, and pickles its index. Here only safetensors and JSON are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: a pair (start, stop) for each dimension."""
Integers = npt.NDArray[np.int64]
Scalars = dict[str, float | int | bool]

# Kinds of shards; see Shard.kind.
WEIGHT = "weight"
BUFFER = "buffer"
GRADIENT = "gradient"  # never in a checkpoint


@dataclass(frozen=True)
class Region:
    """Position of values in a whole tensor: a box of the tensor, and a range of the flattened box."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box | None
    """Box of the tensor; `None` for the whole tensor."""
    start: int
    """Index of the first value in the flattened box."""
    length: int
    """Number of values."""


@dataclass(frozen=True)
class Shard:
    """A region of a tensor of the whole model. Shards are equal if names, kinds, regions and dtypes are."""

    name: str
    """Name of the parameter or buffer in the whole model, as in named_parameters."""
    kind: str
    """Kind of values: `weight` (fp32 master weights if there are any), `buffer`, `gradient`, or the
    optimizer's name for an entry of its state, such as `exp_avg`."""
    region: Region
    """Position of the values in the whole tensor."""
    dtype: torch.dtype
    """Dtype of the values."""
    values: Tensor | None = field(default=None, compare=False, repr=False)
    """Tensor of shape (region.length,), row-major, or `None` if only the shard is described.

    It is the engine's own memory if possible, not a copy."""
    checksum: str | None = field(default=None, compare=False)
    """Checksum (xxh3_64) of the values' bytes; `None` until they are written."""
    is_frozen: bool = field(default=False, compare=False)
    """Whether the values are not trained, so that later checkpoints link the file instead of writing it."""

    @staticmethod
    def of(name: str, kind: str, region: Region, values: Tensor, is_frozen: bool = False) -> Shard:
        """Return a shard with its values.

        Raises:
            TypeError: The values are not 1-D, or not of the region's length.
        """
        if tuple(values.shape) != (region.length,):
            raise TypeError(f"{kind} of {name}: values of shape {tuple(values.shape)} for {region}")
        return Shard(name, kind, region, values.dtype, values, is_frozen=is_frozen)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.region.length * self.dtype.itemsize

    @property
    def title(self) -> str:
        """Name for messages, such as `exp_avg of embed.weight`."""
        return f"{self.kind} of {self.name}"

    def without_values(self, checksum: str | None = None) -> Shard:
        """Return the shard without its values and with this checksum."""
        return replace(self, values=None, checksum=checksum)


class ShardSource(Protocol):
    """Interface of a checkpoint that an engine of any split reads from."""

    scalars: Mapping[str, Any]
    """Scalars that `EngineState.scalars` returned at the save."""

    def get_shapes(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        """Return the shape of each whole tensor by (name, kind)."""
        ...

    def read(self, name: str, kind: str, region: Region, out: Tensor) -> None:
        """Fill `out` (1-D, region.length values, any dtype and device).

        Raises:
            CheckpointError: Some values are missing.
        """
        ...


class EngineState(Protocol):
    """Interface of an engine whose state is saved and restored."""

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this rank writes. Collective.

        Over all ranks, each value comes once. Shards of frozen parameters come first.
        """
        ...

    def scalars(self) -> Scalars:
        """Return the scalars of the optimizer and of the loss scale, equal on all ranks."""
        ...

    def hold_step(self, wait: Callable[[], None]) -> None:
        """Make the next step call `wait` before it changes values of `shards`, except for buffers."""
        ...

    def restore(self, source: ShardSource) -> None:
        """Fill weights, optimizer state, buffers and scalars in place. Collective.

        Raises:
            CheckpointError: The source belongs to another model.
        """
        ...


def overlap(a: Region, b: Region) -> Integers:
    """Return the overlap of two regions of one tensor as runs of consecutive values.

    The cost grows with the number of runs, not with the number of values.

    Returns:
        Array of shape (runs, 3): offset in a, offset in b, length. Offsets count from the start of each
        region and increase.
    """
    assert a.shape == b.shape, f"regions of tensors of shape {a.shape} and {b.shape}"
    a_start, a_length = _list_runs(a)
    b_start, b_length = _list_runs(b)
    a_end = a_start + a_length
    b_end = b_start + b_length
    # Both lists are sorted without overlap: run i of a overlaps with runs first[i] to last[i] - 1 of b.
    first = np.searchsorted(b_end, a_start, side="right")
    last = np.searchsorted(b_start, a_end, side="left")
    counts = np.maximum(last - first, 0)
    i = np.repeat(np.arange(len(a_start)), counts)
    j = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts) + first[i]
    start = np.maximum(a_start[i], b_start[j])
    length = np.minimum(a_end[i], b_end[j]) - start
    in_a = np.cumsum(a_length)[i] - a_length[i] + start - a_start[i]
    in_b = np.cumsum(b_length)[j] - b_length[j] + start - b_start[j]
    return np.stack([in_a, in_b, length], axis=1)


def _list_runs(region: Region) -> tuple[Integers, Integers]:
    """Return the runs of a region in the flattened whole tensor: sorted starts, and lengths."""
    if region.length == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if region.box is None:
        return np.array([region.start], np.int64), np.array([region.length], np.int64)
    sizes = [stop - start for start, stop in region.box]
    inner = len(sizes) - 1  # becomes the last dimension that the box cuts: a run covers all after it
    while inner > 0 and sizes[inner] == region.shape[inner]:
        inner -= 1
    strides = [math.prod(region.shape[d + 1 :]) for d in range(len(sizes))]
    row_length = math.prod(sizes[inner:])  # a row is a run of the whole box
    end = region.start + region.length
    rows = np.arange(region.start // row_length, (end - 1) // row_length + 1, dtype=np.int64)
    starts = np.full_like(rows, region.box[inner][0] * strides[inner])
    rest = rows
    for d in reversed(range(inner)):
        rest, index = np.divmod(rest, sizes[d])
        starts += (region.box[d][0] + index) * strides[d]
    lengths = np.full_like(rows, row_length)
    # The region may begin and end inside a row.
    skipped = region.start - rows[0] * row_length
    starts[0] += skipped
    lengths[0] -= skipped
    lengths[-1] -= (rows[-1] + 1) * row_length - end
    return starts, lengths


def copy_runs(source: Tensor, target: Tensor, runs: Integers) -> None:
    """Copy runs between 1-D tensors and convert their dtype.

    Args:
        source: Tensor to read.
        target: Tensor to write.
        runs: Array of (offset in the source, offset in the target, length) per run, in values.
    """
    if len(runs) == 0:
        return
    source = source.contiguous()
    differences = np.diff(runs, axis=0)
    # Runs of equal length at equal distances form a block, which is copied by one call.
    have_equal_lengths = differences[:, 2] == 0
    changes = np.flatnonzero((differences[1:] != differences[:-1]).any(axis=1)) + 1
    is_copied = np.zeros(len(runs), bool)
    limits = [0, *changes.tolist(), len(differences)]
    for first, last in itertools.pairwise(limits):
        if first < last and have_equal_lengths[first]:
            _copy_block(source, target, runs[first], last - first + 1, differences[first])
            is_copied[first : last + 1] = True
    for in_source, in_target, length in runs[~is_copied].tolist():
        target[in_target : in_target + length].copy_(source[in_source : in_source + length])


def _copy_block(
    source: Tensor, target: Tensor, first_run: Integers, num_runs: int, distance: Integers
) -> None:
    """Copy runs of equal length at equal distances.

    Args:
        source: 1-D tensor to read.
        target: 1-D tensor to write.
        first_run: First run, as in `copy_runs`.
        num_runs: Number of runs.
        distance: Difference between a run and the one before.
    """
    in_source, in_target, length = first_run.tolist()
    source_stride, target_stride, _ = distance.tolist()
    size = (num_runs, length)
    read = torch.as_strided(source, size, (source_stride, 1), source.storage_offset() + in_source)
    written = torch.as_strided(target, size, (target_stride, 1), target.storage_offset() + in_target)
    written.copy_(read)
