"""What a rank holds of a model under DeepSpeed: which kind of state, and that of ZeRO 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from pipeline.engine.optimizer_state import (
    SavedState,
    flat_numbers,
    flat_tensors,
    set_numbers,
    take_steps_again,
)
from pipeline.engine.parameter_state import ParameterState, Places, buffer_shards, frozen
from pipeline.engine.state import Place, State, shared_out
from pipeline.engine.zero3_state import Zero3State
from pipeline.shards import WEIGHT, Scalars, Shard, ShardSource


def state_of(
    optimizer: Any, places: Places, buffers: Mapping[str, Tensor], sharers: tuple[int, int]
) -> State:
    """The state that fits what deepspeed.initialize made of the optimizer.

    Args:
        places: This rank's parameters, those that are frozen too.
        sharers: (index, count) of the ranks that hold the same where ZeRO divides nothing.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return Zero3State(optimizer, places, buffers, sharers)
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        return PartitionState(optimizer, places, buffers, sharers)
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # its name: it serves bf16 too
        masters = {
            p: master
            for parameters, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for p, master in zip(parameters, group, strict=True)
        }
        return ParameterState(places, buffers, optimizer.optimizer, sharers, masters)
    return ParameterState(places, buffers, optimizer, sharers, {})


class PartitionState:
    """Masters and moments of this rank's partition: one flat tensor a parameter group."""

    def __init__(
        self, optimizer: Any, places: Places, buffers: Mapping[str, Tensor], sharers: tuple[int, int]
    ):
        self._optimizer = optimizer
        self._adam: torch.optim.Optimizer = optimizer.optimizer
        self._places = places
        self._buffers = buffers
        self._sharers = sharers

    def _flats(self) -> list[Tensor]:
        if isinstance(self._optimizer, BF16_Optimizer):
            return list(self._optimizer.fp32_groups_flat_partition)
        return list(self._optimizer.single_partition_of_fp32_groups)

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See State.shards."""
        to_fill, flats, stretches = source is not None, self._flats(), list(self._stretches())
        if source is not None:
            saved = SavedState(source)
            for index, flat in enumerate(flats):
                saved.make(self._adam, flat, [place for place, group, *_ in stretches if group == index])
        yield from shared_out(frozen(self._places), self._sharers, to_fill)
        kinds = [{WEIGHT: flat, **flat_tensors(self._adam, flat)} for flat in flats]
        for place, group, offset, start, length in stretches:
            for kind, flat in kinds[group].items():
                yield from place.shards(kind, start, flat[offset : offset + length], to_fill)
        yield from buffer_shards(self._buffers, self._sharers[0] == 0, to_fill)

    def _stretches(self) -> Iterator[tuple[Place, int, int, int, int]]:
        """(parameter, group, offset in this rank's flat tensor, start in the parameter, length).

        By where parameters lie in memory: DeepSpeed's own note of it, _hp_mapping, names others with
        round_robin_gradients (0.19.8).
        """
        zero = self._optimizer
        is_bf16 = isinstance(zero, BF16_Optimizer)
        groups = zero.bf16_groups if is_bf16 else zero.bit16_groups
        flats = zero.bf16_groups_flat if is_bf16 else zero.bit16_groups_flat
        for index, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
            ranks = zero.real_dp_process_group[index]
            size = flat.numel() // dist.get_world_size(ranks)
            first = dist.get_rank(ranks) * size
            for p in parameters:
                at = p.storage_offset() - flat.storage_offset()
                begin, end = max(at, first), min(at + p.numel(), first + size)
                if begin < end and p in self._places:  # a stage of which all is frozen has stand-ins
                    yield self._places[p], index, begin - first, begin - at, end - begin

    def scalars(self) -> Scalars:
        """See State.scalars. All parameters of a flat tensor step together."""
        return flat_numbers((self._adam, flat) for flat in self._flats())

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """See State.settle."""
        for flat in self._flats():
            set_numbers(self._adam, flat, scalars)
        take_steps_again(self._adam, scalars)
        self._optimizer.update_lp_params()
