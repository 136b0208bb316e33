"""What a rank holds of the whole model, whoever divided it, and how it is filled again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.errors import CheckpointError, listed
from pipeline.shards import (
    BUFFER,
    WEIGHT,
    Box,
    Integers,
    Region,
    Scalars,
    Shard,
    ShardSource,
    copy_runs,
    overlap,
)

# The boxes of a parameter that is not cut.
WHOLE: tuple[tuple[Box | None, Box | None], ...] = ((None, None),)
MODEL = (WEIGHT, BUFFER)


@dataclass(frozen=True)
class Place:
    """Which values of the whole model a tensor of this rank has: a parameter or part of one, or a buffer."""

    name: str
    """In the whole model."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    own_shape: tuple[int, ...]
    boxes: tuple[tuple[Box | None, Box | None], ...] = WHOLE
    """(box of the rank's own tensor, the box of the whole one that it is); together all of the own one."""
    is_written: bool = True
    """False: a copy that another rank writes."""
    is_frozen: bool = False

    @staticmethod
    def all_of(name: str, shape: Iterable[int], is_written: bool = True, is_frozen: bool = False) -> Place:
        """The rank has the whole tensor."""
        return Place(name, tuple(shape), tuple(shape), WHOLE, is_written, is_frozen)

    def shards(self, kind: str, start: int, tensor: Tensor, to_fill: bool) -> Iterator[Shard]:
        """A stretch of its values, or of what the optimizer keeps of them: a shard for each box it meets.

        Args:
            start: Of the stretch, in the rank's own flattened tensor.
            tensor: The values; any shape.
            to_fill: Shards are written to, and values that had to be copied go back. Else nothing comes of
                what another rank writes.
        """
        if not (to_fill or self.is_written):
            return
        flat = tensor.detach().reshape(-1)
        for region, runs in self._regions(start, len(flat)):
            begin = int(runs[0, 0])
            if len(runs) == 1:
                yield Shard.of(self.name, kind, region, flat[begin : begin + region.length], self.is_frozen)
                continue
            values = torch.empty(region.length, dtype=flat.dtype, device=flat.device)
            copy_runs(flat, values, runs)
            yield Shard.of(self.name, kind, region, values, self.is_frozen)
            if to_fill:
                copy_runs(values, flat, runs[:, [1, 0, 2]])
        if to_fill and not tensor.is_contiguous():  # flat was a copy
            tensor.detach().copy_(flat.view(tensor.shape))

    def _regions(self, start: int, length: int) -> Iterator[tuple[Region, Integers]]:
        """The stretch box by box: the region of the whole tensor, and the runs (offset from the stretch's
        start, offset in the region, length). What a box holds of a stretch is a stretch of the box.
        """
        stretch = Region(self.own_shape, None, start, length)
        for own, whole in self.boxes:
            size = math.prod(self.own_shape if own is None else [stop - start for start, stop in own])
            runs = overlap(stretch, Region(self.own_shape, own, 0, size))
            if len(runs):
                first = int(runs[0, 1])
                runs[:, 1] -= first
                yield Region(self.shape, whole, first, int(runs[:, 2].sum())), runs


class State(Protocol):
    """A model and its optimizer, however they are divided."""

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """What lies on this rank, in an order that all ranks have. Take it in order.

        Args:
            source: What the values will be filled with: of the optimizer's state, what it has is made.
                None: nothing is filled, and only what this rank writes is given.
        """
        ...

    def gradients(self, stepped: Collection[int]) -> Iterator[Shard]:
        """Over all ranks each value once, where an optimizer is about to step.

        Args:
            stepped: `id` of what it steps.
        """
        ...

    def scalars(self) -> Scalars:
        """`optimizer/<key>`, and `optimizer/<key>/<name>` of each parameter that has another number."""
        ...

    def masters(self) -> Iterable[Tensor]:
        """Return the tensors that an optimizer steps in the place of parameters."""
        ...

    def kept_gradients(self) -> Iterable[Any]:
        """Return the gradients that lie elsewhere than in `grad` of a parameter, maybe in lists and dicts."""
        ...

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """After filling: sets the scalars, and the copies in half precision from the masters. Collective."""
        ...


def shared_out(
    tensors: list[tuple[Place, str, Tensor]], sharers: tuple[int, int], to_fill: bool
) -> Iterator[Shard]:
    """What each of some ranks that hold the same writes of it: even parts, most tensors by one rank.

    Args:
        tensors: (place, kind, values): the same on all of them, in one order.
        sharers: (which of them this rank is, how many they are).
    """
    index, count = sharers
    total = sum(tensor.numel() for place, _, tensor in tensors if place.is_written)
    begin, end = total * index // count, total * (index + 1) // count
    offset = 0
    for place, kind, tensor in tensors:
        if to_fill:
            yield from place.shards(kind, 0, tensor, to_fill)
        elif place.is_written:
            size = tensor.numel()
            first, last = (min(max(at - offset, 0), size) for at in (begin, end))
            yield from place.shards(kind, first, tensor.detach().reshape(-1)[first:last], to_fill)
            offset += size


def restore(state: State, source: ShardSource, names: Iterable[str]) -> None:
    """See EngineState.restore.

    Args:
        names: All parameters and kept buffers of the whole model.

    Raises:
        CheckpointError: the source has others, or other shapes.
    """
    saved = source.names()
    _check_names({name for name, kind in saved if kind in MODEL}, set(names))
    for shard in state.shards(source):
        assert shard.values is not None
        shape = saved.get((shard.name, shard.kind))
        if shape is None and shard.kind not in MODEL:  # frozen or unused until now
            shard.values.zero_()
            continue
        if shape != shard.region.shape:
            raise CheckpointError(
                f"{shard.name}: the checkpoint has {'none' if shape is None else f'shape {shape}'} of kind "
                f"{shard.kind}, the model has shape {shard.region.shape}; resume with the model that was "
                "trained"
            )
        source.read(shard.name, shard.kind, shard.region, shard.values)
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
