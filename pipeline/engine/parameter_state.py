"""What a rank holds where the optimizer steps whole parameters: plain PyTorch, and ZeRO 0 in fp32."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine.optimizer_state import (
    SavedState,
    common_numbers,
    has_numbers,
    numbers,
    set_numbers,
    whole_tensors,
)
from pipeline.engine.state import Place, shared_out
from pipeline.models.adapters import is_base
from pipeline.shards import BUFFER, GRADIENT, WEIGHT, Scalars, Shard, ShardSource

Places = dict[nn.Parameter, Place]


def whole_parameters(module: nn.Module) -> Places:
    """Of a rank that holds the whole model; without the base of an adapter, which no checkpoint has."""
    return {
        p: Place.all_of(name, getattr(p, "ds_shape", p.shape), is_frozen=not p.requires_grad)
        for name, p in module.named_parameters()
        if not is_base(p)
    }


def kept_buffers(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The buffers that belong to the model's weights (BatchNorm's statistics), by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(prefix=prefix)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def names_of(module: nn.Module) -> list[str]:
    """Of all that a checkpoint keeps of a whole model."""
    parameters = (name for name, p in module.named_parameters() if not is_base(p))
    return [*parameters, *kept_buffers(module)]


def buffer_shards(buffers: Mapping[str, Tensor], is_written: bool, to_fill: bool) -> Iterator[Shard]:
    """Buffers lie whole on each rank; where they may differ, one rank's are kept."""
    for name, buffer in buffers.items():
        yield from Place.all_of(name, buffer.shape, is_written).shards(BUFFER, 0, buffer, to_fill)


def frozen(places: Places) -> list[tuple[Place, str, Tensor]]:
    """The parameters that nobody steps, as `shared_out` takes them."""
    return [(place, WEIGHT, p) for p, place in places.items() if not p.requires_grad]


class ParameterState:
    """The optimizer's state parameter by parameter, the same on all ranks of `sharers`."""

    def __init__(
        self,
        places: Places,
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        sharers: tuple[int, int],
        masters: Mapping[nn.Parameter, Tensor],
    ):
        """Says what lies where.

        Args:
            sharers: (index, count) of the ranks that hold the same and share out the writing.
            masters: What the optimizer steps in place of a parameter; empty where it steps parameters.
        """
        self._places = places
        self._buffers = buffers
        self._optimizer = optimizer
        self._sharers = sharers
        self._masters = masters

    def _stepped(self) -> Iterator[tuple[nn.Parameter, Place, Tensor]]:
        for p, place in self._places.items():
            if p.requires_grad:
                yield p, place, self._masters.get(p, p)

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See State.shards."""
        saved = None if source is None else SavedState(source)
        held = frozen(self._places)
        for _, place, stepped in self._stepped():
            if saved is not None:
                saved.make(self._optimizer, stepped, [place])
            held += [(place, WEIGHT, stepped), *whole_tensors(self._optimizer, stepped, place)]
        yield from shared_out(held, self._sharers, to_fill=saved is not None)
        yield from buffer_shards(self._buffers, self._sharers[0] == 0, to_fill=saved is not None)

    def gradients(self, stepped: Collection[int]) -> Iterator[Shard]:
        """See State.gradients."""
        held = [
            (place, GRADIENT, each.grad)
            for _, place, each in self._stepped()
            if id(each) in stepped and each.grad is not None
        ]
        yield from shared_out(held, self._sharers, to_fill=False)

    def masters(self) -> Iterable[Tensor]:
        """See State.masters."""
        return self._masters.values()

    def kept_gradients(self) -> Iterable[Any]:
        """See State.kept_gradients."""
        return [master.grad for master in self._masters.values()]

    def scalars(self) -> Scalars:
        """See State.scalars."""
        counted = [each for each in self._stepped() if has_numbers(self._optimizer, each[2])]
        return common_numbers({place.name: numbers(self._optimizer, tensor) for _, place, tensor in counted})

    @torch.no_grad()
    def settle(self, scalars: Mapping[str, Any]) -> None:
        """See State.settle."""
        for p, place, stepped in self._stepped():
            set_numbers(self._optimizer, stepped, scalars, place.name)
            if stepped is not p:
                p.copy_(stepped)
