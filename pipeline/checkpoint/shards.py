"""Defines shards, which are contiguous pieces of the tensors of a whole model, independent of its split.

Each rank writes the shards that it holds (fp32 master weights and all optimizer state), each value once over
all ranks. Any other split reads the values that it needs, so no checkpoint is ever converted. DeepSpeed's
universal format needs a second job, unpickles, cannot go from ZeRO-2 to ZeRO-3, and does not cover plain
PyTorch. torch.distributed.checkpoint needs DTensors, which DeepSpeed's flat buffers are not, and pickles its
index. Here only safetensors and JSON are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]
Integers = npt.NDArray[np.int64]
Scalars = dict[str, float | int | bool]

WEIGHT = "weight"
BUFFER = "buffer"
GRADIENT = "gradient"


@dataclass(frozen=True)
class Region:
    """Position of values in a whole tensor: a box of it, and a range of the flattened box."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box | None
    """Pairs (start, stop), one for each dimension; `None` for the whole tensor."""
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
    """Kind of values: `weight` (fp32 master weights if there are any), `buffer`, or the optimizer's name for
    its state."""
    region: Region
    dtype: torch.dtype
    values: Tensor | None = field(default=None, compare=False, repr=False)
    """Tensor of shape (region.length,), row-major; the engine's own memory if possible, not a copy."""
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
            raise TypeError(f"{kind} of {name}: {tuple(values.shape)} {values.dtype} for {region}")
        return Shard(name, kind, region, values.dtype, values, is_frozen=is_frozen)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.region.length * self.dtype.itemsize

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"{self.kind} of {self.name}"

    def without_values(self, checksum: str | None = None) -> Shard:
        """Return the shard without its values."""
        return replace(self, values=None, checksum=checksum)


class ShardSource(Protocol):
    """Interface of a checkpoint that an engine of any split reads from."""

    scalars: Mapping[str, Any]

    def names(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
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
        """Yield the shards that this rank writes. Over all ranks, each value comes once. Collective."""
        ...

    def scalars(self) -> Scalars:
        """Return the scalars of the optimizer and of the loss scale, equal on all ranks."""
        ...

    def hold_step(self, wait: Callable[[], None]) -> None:
        """Make the next step call `wait` before it changes values of `shards`. Buffers may change earlier."""
        ...

    def restore(self, source: ShardSource) -> None:
        """Fill weights, optimizer state, buffers and scalars in place. Collective.

        Raises:
            CheckpointError: The source belongs to another model.
        """
        ...


def overlap(a: Region, b: Region) -> Integers:
    """Return the overlap of two regions of one tensor as runs of consecutive values.

    The cost grows with the rows of boxes, not with the number of values.

    Returns:
        Array of shape (runs, 3): offset in a, offset in b, length. Offsets count from the start of each
        region and increase.
    """
    assert a.shape == b.shape, f"regions of tensors of shape {a.shape} and {b.shape}"
    a_start, a_length = _runs(a)
    b_start, b_length = _runs(b)
    a_end = a_start + a_length
    b_end = b_start + b_length
    # Both lists are sorted without overlap: run i of a meets runs first[i] up to last[i] of b.
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


def _runs(region: Region) -> tuple[Integers, Integers]:
    """Return a region as runs of the flattened whole tensor: sorted starts, and lengths."""
    if region.length == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if region.box is None:
        return np.array([region.start], np.int64), np.array([region.length], np.int64)
    sizes = [stop - start for start, stop in region.box]
    inner = len(sizes) - 1  # last dimension that is cut: a run covers all dimensions after it
    while inner > 0 and sizes[inner] == region.shape[inner]:
        inner -= 1
    strides = [math.prod(region.shape[d + 1 :]) for d in range(len(sizes))]
    row = math.prod(sizes[inner:])
    end = region.start + region.length
    rows = np.arange(region.start // row, (end - 1) // row + 1, dtype=np.int64)
    starts = np.full_like(rows, region.box[inner][0] * strides[inner])
    rest = rows
    for d in reversed(range(inner)):
        rest, index = np.divmod(rest, sizes[d])
        starts += (region.box[d][0] + index) * strides[d]
    lengths = np.full_like(rows, row)
    # The region may begin and end inside a row.
    skipped = region.start - rows[0] * row
    starts[0] += skipped
    lengths[0] -= skipped
    lengths[-1] -= (rows[-1] + 1) * row - end
    return starts, lengths


def copy_runs(source: Tensor, target: Tensor, runs: Integers) -> None:
    """Copy runs (offset in source, offset in target, length) between 1-D tensors, converting as copy_ does.

    Rows at equal distances are copied together.
    """
    if len(runs) == 0:
        return
    source = source.contiguous()
    steps = np.diff(runs, axis=0)
    # Runs with equal lengths and equal steps between them form a block, which is copied at once.
    alike = steps[:, 2] == 0
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    covered = np.zeros(len(runs), bool)
    for first, last in zip([0, *changes.tolist()], [*changes.tolist(), len(steps)], strict=True):
        if first < last and alike[first]:
            _copy_block(source, target, runs[first], last - first + 1, steps[first])
            covered[first : last + 1] = True
    for in_source, in_target, length in runs[~covered].tolist():
        target[in_target : in_target + length].copy_(source[in_source : in_source + length])


def _copy_block(source: Tensor, target: Tensor, run: Integers, rows: int, step: Integers) -> None:
    """Copy rows of one length at equal distances."""
    in_source, in_target, length = run.tolist()
    source_step, target_step, _ = step.tolist()
    torch.as_strided(target, (rows, length), (target_step, 1), target.storage_offset() + in_target).copy_(
        torch.as_strided(source, (rows, length), (source_step, 1), source.storage_offset() + in_source)
    )
