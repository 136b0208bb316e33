"""Shards: stretches of the tensors of a whole model, whatever its split.

Each rank writes its own shards, and any other split reads the values it needs. Here are the record of a
shard, from the engine to the file and back, and the arithmetic of where two regions overlap.
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
    """Place of values in a whole tensor: a box of it, and a stretch of that box's values."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box | None
    """(start, stop) in each dimension; `None` for the whole tensor."""
    start: int
    """First value of the stretch in the flattened box."""
    length: int


@dataclass(frozen=True)
class Shard:
    """One stretch of one tensor of the whole model. Two are equal if names, regions and dtypes are."""

    name: str
    """Parameter or buffer of the whole model, as named_parameters has it."""
    kind: str
    """`weight` (the fp32 master where there is one), `buffer`, or the optimizer's own word for its state."""
    region: Region
    dtype: torch.dtype
    values: Tensor | None = field(default=None, compare=False, repr=False)
    """1-D, row-major: region.length values; if possible those of the engine, not a copy."""
    checksum: str | None = field(default=None, compare=False)
    """xxh3_64 of the values' bytes once they are written."""
    is_frozen: bool = field(default=False, compare=False)
    """Whether it is not trained: once written, the same bytes are not written again."""

    @staticmethod
    def of(name: str, kind: str, region: Region, values: Tensor, is_frozen: bool = False) -> Shard:
        """Return a shard with its values.

        Raises:
            TypeError: They are not 1-D, or not of the region's length.
        """
        if tuple(values.shape) != (region.length,):
            raise TypeError(f"{kind} of {name}: {tuple(values.shape)} {values.dtype} for {region}")
        return Shard(name, kind, region, values.dtype, values, is_frozen=is_frozen)

    @property
    def num_bytes(self) -> int:
        return self.region.length * self.dtype.itemsize

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"{self.kind} of {self.name}"

    def without_values(self, checksum: str | None = None) -> Shard:
        """Return the shard without its values."""
        return replace(self, values=None, checksum=checksum)


class ShardSource(Protocol):
    """A checkpoint to read from, whatever its split."""

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
    """State of an engine, to save and to restore."""

    def shards(self) -> Iterator[Shard]:
        """Yield what this rank writes: over all ranks each value once. Collective."""
        ...

    def scalars(self) -> Scalars:
        """Return the optimizer's numbers and the loss scale's state, the same on all ranks."""
        ...

    def hold_step(self, wait: Callable[[], None]) -> None:
        """Make the next step call `wait` before it changes what `shards` gave. Buffers may change before."""
        ...

    def restore(self, source: ShardSource) -> None:
        """Fill weights, optimizer state, buffers and scalars in place. Collective.

        Raises:
            CheckpointError: The source is of another model.
        """
        ...


def overlap(a: Region, b: Region) -> Integers:
    """Return where two regions of one tensor overlap: (runs, 3), each (offset in a, offset in b, length).

    Offsets count from the start of each stretch and grow. The cost grows with the rows of boxes, not with
    values.
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
    """Return the stretch as runs of the flattened whole tensor: (starts, lengths), sorted."""
    if region.length == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if region.box is None:
        return np.array([region.start], np.int64), np.array([region.length], np.int64)
    sizes = [stop - start for start, stop in region.box]
    inner = len(sizes) - 1  # last dimension that is cut: those after it are whole, so a run covers them
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
    # The stretch may begin and end inside a row.
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
    # A step belongs to a block of rows where both rows are equally long; equal steps make up a block.
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
