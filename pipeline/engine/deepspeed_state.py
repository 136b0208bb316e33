"""What a rank holds of a model under DeepSpeed: which kind of state, and that of ZeRO 1 and 2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from pipeline.engine.fragments import WEIGHT, Fragment, FragmentSource, Scalars
from pipeline.engine.held import Held, State, fragments, restore, shared_out
from pipeline.engine.loss_scale import go_on_searching, loss_scale_state
from pipeline.engine.optimizer import take_steps_again
from pipeline.engine.torch_state import (
    ADAM_STEP,
    Named,
    ParameterState,
    held_buffers,
    moments,
    set_steps,
    steps_taken,
)
from pipeline.engine.zero3_state import Zero3State


class DeepSpeedState(ABC):
    """The EngineState of an engine around deepspeed.initialize, whatever that made of the optimizer."""

    _zero_optimizer: Any

    @abstractmethod
    def _state(self) -> State:
        """What this rank holds."""

    @abstractmethod
    def _names(self) -> list[str]:
        """Of all that a checkpoint keeps of the whole model."""

    def fragments(self) -> Iterator[Fragment]:
        """See EngineState.fragments."""
        return fragments(self._state())

    def scalars(self) -> Scalars:
        """See EngineState.scalars."""
        return self._state().steps() | loss_scale_state(self._zero_optimizer)

    @torch.no_grad()
    def restore(self, source: FragmentSource) -> None:
        """See EngineState.restore."""
        restore(self._state(), source, self._names())
        go_on_searching(self._zero_optimizer, source.scalars)


def state_of(
    optimizer: Any, named: list[Named], buffers: Mapping[str, Tensor], sharers: tuple[int, int]
) -> State:
    """The state that fits what deepspeed.initialize made of the optimizer.

    Args:
        named: This rank's parameters, those that are frozen too.
        sharers: (index, count) of the ranks that hold the same where ZeRO divides nothing.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return Zero3State(optimizer, named, buffers, sharers)
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        return PartitionState(optimizer, named, buffers, sharers)
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # its name: it serves bf16 too
        masters = {
            p: master
            for parameters, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for p, master in zip(parameters, group, strict=True)
        }
        return ParameterState(named, buffers, optimizer.optimizer, sharers, masters)
    return ParameterState(named, buffers, optimizer, sharers, {})


class PartitionState:
    """Masters and moments of this rank's partition: one flat tensor a parameter group."""

    def __init__(
        self, optimizer: Any, named: list[Named], buffers: Mapping[str, Tensor], sharers: tuple[int, int]
    ):
        self._optimizer = optimizer
        self._adam: torch.optim.Optimizer = optimizer.optimizer
        self._named = named
        self._buffers = buffers
        self._sharers = sharers

    def _flats(self) -> list[Tensor]:
        if isinstance(self._optimizer, BF16_Optimizer):
            return list(self._optimizer.fp32_groups_flat_partition)
        return list(self._optimizer.single_partition_of_fp32_groups)

    def held(self, to_fill: bool) -> Iterator[Held]:
        """See State.held."""
        frozen = [
            each.held(WEIGHT, 0, each.parameter) for each in self._named if not each.parameter.requires_grad
        ]
        yield from shared_out(frozen, *self._sharers)
        kinds = [{WEIGHT: flat, **moments(self._adam, flat, to_fill)} for flat in self._flats()]
        for each, group, offset, start, length in self._stretches():
            for kind, flat in kinds[group].items():
                yield each.held(kind, start, flat[offset : offset + length])
        yield from held_buffers(self._buffers, self._sharers[0] == 0)

    def _stretches(self) -> Iterator[tuple[Named, int, int, int, int]]:
        """(parameter, group, offset in this rank's flat tensor, start in the parameter, length).

        By where parameters lie in memory: DeepSpeed's own note of it, _hp_mapping, names others with
        round_robin_gradients (0.19.8).
        """
        zero, by_id = self._optimizer, {id(each.parameter): each for each in self._named}
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
                if begin < end:
                    yield by_id[id(p)], index, begin - first, begin - at, end - begin

    def steps(self) -> Scalars:
        """See State.steps. All parameters of a flat tensor step together."""
        return {ADAM_STEP: max((steps_taken(self._adam, flat) for flat in self._flats()), default=0)}

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """See State.settle."""
        for flat in self._flats():
            set_steps(self._adam, flat, int(scalars[ADAM_STEP]))
        take_steps_again(self._adam, int(scalars[ADAM_STEP]))
        self._optimizer.update_lp_params()
