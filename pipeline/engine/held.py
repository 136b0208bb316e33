"""What a rank holds of the whole model, whoever divided it, and how that is written and filled.

Every engine says it as a row of `Held`; what becomes a fragment and how one is read back is the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.engine.fragments import (
    MOMENTS,
    Box,
    Fragment,
    FragmentSource,
    Integers,
    Region,
    Scalars,
    copy_runs,
    overlap,
)
from pipeline.engine.unused import listed
from pipeline.errors import CheckpointError

# The boxes of a parameter that is not cut.
WHOLE: tuple[tuple[Box | None, Box | None], ...] = ((None, None),)


@dataclass(frozen=True)
class Part:
    """Which values of a whole parameter a rank's own one has: all, or those of a tensor-parallel cut."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    own_shape: tuple[int, ...]
    boxes: tuple[tuple[Box | None, Box | None], ...] = WHOLE
    """(box of the rank's own parameter, the box of the whole one that it is); together all of the own one."""

    @staticmethod
    def all_of(shape: tuple[int, ...]) -> Part:
        """The rank holds the whole parameter."""
        return Part(tuple(shape), tuple(shape))


@dataclass(frozen=True)
class Held:
    """A stretch of a parameter's values, of its moments or of a buffer, that lies on this rank."""

    name: str
    kind: str
    part: Part
    start: int
    """Of the stretch, in the rank's own flattened parameter."""
    tensor: Tensor
    """The values; any shape, no gradient."""
    is_written: bool = True
    """False: a copy that another rank writes."""
    written: tuple[int, int] | None = None
    """(first, last) of the values that this rank writes, counted from the stretch's start; None: all."""


class State(Protocol):
    """A model and its optimizer, however they are divided."""

    def held(self, to_fill: bool) -> Iterator[Held]:
        """All that lies on this rank, in an order that all ranks have. Take it in order.

        Args:
            to_fill: What is yielded will be written to: moments that are not there yet are made.
        """
        ...

    def steps(self) -> Scalars:
        """`adam_step`, and `adam_step/<name>` of each parameter that took another number of steps."""
        ...

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """After filling: sets the steps, and the copies in half precision from the masters. Collective."""
        ...


def shared_out(held: list[Held], index: int, count: int) -> Iterator[Held]:
    """What each of `count` ranks that hold the same writes of it: even parts, most tensors by one rank.

    Args:
        held: The same on all of them, in one order.
        index: Which of them this rank is.
    """
    total = sum(each.tensor.numel() for each in held if each.is_written)
    begin, end = total * index // count, total * (index + 1) // count
    offset = 0
    for each in held:
        if not each.is_written:
            yield each
            continue
        size = each.tensor.numel()
        first, last = (min(max(at - offset, 0), size) for at in (begin, end))
        yield replace(each, written=(first, last))
        offset += size


def fragments(state: State) -> Iterator[Fragment]:
    """See EngineState.fragments."""
    for held in state.held(to_fill=False):
        if held.is_written:
            yield from fragments_of(held)


def restore(state: State, source: FragmentSource, names: Iterable[str]) -> None:
    """See EngineState.restore.

    Args:
        names: All parameters and kept buffers of the whole model.

    Raises:
        CheckpointError: the source has others, or other shapes.
    """
    there = source.names()
    _check_names({name for name, kind in there if kind not in MOMENTS}, set(names))
    for held in state.held(to_fill=True):
        shape = there.get((held.name, held.kind))
        if shape is None and held.kind in MOMENTS:  # frozen or unused until now
            held.tensor.zero_()
            continue
        if shape != held.part.shape:
            raise CheckpointError(
                f"{held.name}: the checkpoint has {'none' if shape is None else f'shape {shape}'} of kind "
                f"{held.kind}, the model has shape {held.part.shape}; resume with the model that was trained"
            )
        fill(held, source)
    state.settle(source.scalars)


def _check_names(there: set[str], expected: set[str]) -> None:
    if there == expected:
        return
    told = [
        f"{what} {listed(sorted(names))}"
        for what, names in (("lacks", expected - there), ("has besides", there - expected))
        if names
    ]
    raise CheckpointError(
        f"the checkpoint is of another model: it {' and '.join(told)}; resume with the model that was "
        "trained, or start a new run"
    )


def fragments_of(held: Held) -> Iterator[Fragment]:
    """The fragments this rank writes of it: one for each box that its values are in."""
    flat = held.tensor.reshape(-1)
    first, last = held.written or (0, len(flat))
    for region, runs in _pieces(held, first, last):
        yield Fragment(held.name, held.kind, region, _picked(flat[first:last], runs))


def fill(held: Held, source: FragmentSource) -> None:
    """Reads the values of the stretch into what the rank holds."""
    size = held.tensor.numel()
    is_whole = len(held.part.boxes) == 1 and held.tensor.is_contiguous()
    of = held.tensor.dtype
    dtype = torch.promote_types(of, torch.float32) if of.is_floating_point else of
    if is_whole and held.tensor.dtype == dtype:
        for region, _ in _pieces(held, 0, size):
            source.read(held.name, held.kind, region, held.tensor.view(-1))
        return
    values = torch.empty(size, dtype=dtype, device=held.tensor.device)
    for region, runs in _pieces(held, 0, size):
        piece = torch.empty(region.length, dtype=dtype, device=held.tensor.device)
        source.read(held.name, held.kind, region, piece)
        copy_runs(piece, values, runs[:, [1, 0, 2]])
    held.tensor.copy_(values.view(held.tensor.shape))


def _pieces(held: Held, first: int, last: int) -> Iterator[tuple[Region, Integers]]:
    """The stretch's values [first, last) box by box: the region of the whole tensor, and the runs
    (offset from first, offset in the region, length). What a box holds of a stretch is a stretch of the box.
    """
    part = held.part
    stretch = Region(part.own_shape, None, held.start + first, last - first)
    for own, whole in part.boxes:
        size = math.prod(part.own_shape if own is None else [stop - start for start, stop in own])
        runs = overlap(stretch, Region(part.own_shape, own, 0, size))
        if len(runs):
            start = int(runs[0, 1])
            runs[:, 1] -= start
            yield Region(part.shape, whole, start, int(runs[:, 2].sum())), runs


def _picked(flat: Tensor, runs: Integers) -> Tensor:
    """The runs' values one after another: a view where they stand so."""
    if len(runs) == 1:
        start, _, length = runs[0].tolist()
        return flat[start : start + length]
    picked = torch.empty(int(runs[:, 2].sum()), dtype=flat.dtype, device=flat.device)
    copy_runs(flat, picked, runs)
    return picked
