"""RankState of DeepSpeed engines: the classes for ZeRO 1 to 3, and the choice among all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from pipeline.checkpoint.shards import GRADIENT, WEIGHT, Scalars, Shard, ShardSource
from pipeline.engine.state import (
    ParameterState,
    Placements,
    RankState,
    SavedOptimizerState,
    TensorPlacement,
    buffer_shards,
    get_flat_state_tensors,
    get_frozen_parameters,
    merge_flat_scalars,
    replay_step_count,
    set_state_scalars,
    split_among_ranks,
)


def build_rank_state(
    optimizer: Any, places: Placements, buffers: Mapping[str, Tensor], replica: tuple[int, int]
) -> RankState:
    """Return the state for the optimizer that deepspeed.initialize returned.

    Args:
        optimizer: Optimizer that deepspeed.initialize returned.
        places: Placements of this rank's parameters, frozen ones too.
        buffers: Persistent buffers by name.
        replica: (index of this rank, number of ranks) among those that hold the same tensors if ZeRO divides
            nothing.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return Zero3State(optimizer, places, buffers, replica)
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        return PartitionState(optimizer, places, buffers, replica)
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # stage 0 in fp16 and, despite its name, in bf16
        masters = {
            p: master
            for parameters, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for p, master in zip(parameters, group, strict=True)
        }
        return ParameterState(places, buffers, optimizer.optimizer, replica, masters)
    return ParameterState(places, buffers, optimizer, replica, {})


def get_weights_copied_from_masters(optimizer: Any) -> Sequence[Tensor]:
    """Return the module's weights that each update overwrites with copies of their masters.

    At ZeRO 1 and 2 these are the flat tensors whose views the parameters are.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return cast(Sequence[Tensor], optimizer.bf16_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return cast(Sequence[Tensor], optimizer.bit16_groups_flat)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return [p for group in optimizer.fp16_groups for p in group]
    return ()


class _FlatState(ABC):
    """State whose master weights and moments are flat tensors of several parameters."""

    def __init__(
        self, optimizer: Any, places: Placements, buffers: Mapping[str, Tensor], replica: tuple[int, int]
    ):
        self._optimizer = optimizer
        self._places = places
        self._buffers = buffers
        self._replica = replica

    @abstractmethod
    def _flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        """Yield this rank's flat tensors, each with the optimizer that steps it."""

    def get_masters(self) -> Iterable[Tensor]:
        """See RankState.get_masters."""
        return [flat for _, flat in self._flats()]

    def scalars(self) -> Scalars:
        """See RankState.scalars."""
        return merge_flat_scalars(self._flats())

    def _set_scalars(self, scalars: Mapping[str, Any]) -> None:
        for adam, flat in self._flats():
            set_state_scalars(adam, flat, scalars)
        for adam in dict.fromkeys(adam for adam, _ in self._flats()):
            replay_step_count(adam, scalars)


class PartitionState(_FlatState):
    """State at ZeRO 1 and 2: this rank's partition of each parameter group is one flat tensor."""

    def _flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        zero = self._optimizer
        is_bf16 = isinstance(zero, BF16_Optimizer)
        for flat in zero.fp32_groups_flat_partition if is_bf16 else zero.single_partition_of_fp32_groups:
            yield zero.optimizer, flat

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See RankState.shards."""
        to_fill = source is not None
        ranges = list(self._ranges())
        if source is not None:
            saved = SavedOptimizerState(source)
            for index, (adam, flat) in enumerate(self._flats()):
                saved.create_state(adam, flat, [place for place, group, *_ in ranges if group == index])
        yield from split_among_ranks(get_frozen_parameters(self._places), self._replica, to_fill)
        kinds = [{WEIGHT: flat, **get_flat_state_tensors(adam, flat)} for adam, flat in self._flats()]
        for place, group, offset, start, length in ranges:
            for kind, flat in kinds[group].items():
                yield from place.shards(kind, start, flat[offset : offset + length], to_fill)
        yield from buffer_shards(self._buffers, self._replica[0] == 0, to_fill)

    def gradients(self, stepped_ids: Collection[int]) -> Iterator[Shard]:
        """See RankState.gradients."""
        flats = [flat.grad if id(flat) in stepped_ids else None for _, flat in self._flats()]
        for place, group, offset, start, length in self._ranges():
            flat = flats[group]
            if flat is not None:
                yield from place.shards(GRADIENT, start, flat[offset : offset + length], to_fill=False)

    def get_stored_gradients(self) -> Iterable[Any]:
        """See RankState.get_stored_gradients."""
        zero = self._optimizer
        own = [flat.grad for _, flat in self._flats()]
        if isinstance(zero, BF16_Optimizer):
            return [*own, zero.fp32_groups_gradients_flat]
        in_parameters = [getattr(p, "grad_accum", None) for p in self._places]
        on_host = getattr(zero, "accumulated_grads_in_cpu", None)
        return [*own, *in_parameters, zero.averaged_gradients, zero.all_grad_tensors, on_host]

    def _ranges(self) -> Iterator[tuple[TensorPlacement, int, int, int, int]]:
        """Yield (placement, group, offset in this rank's flat tensor, start in the parameter, length).

        The positions follow from the parameters' storage offsets. DeepSpeed's own mapping, `_hp_mapping`, is
        wrong with round_robin_gradients (0.19.8).
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
                begin = max(at, first)
                end = min(at + p.numel(), first + size)
                # A parameter without a placement is the stand-in of a stage that trains nothing of a group.
                if begin < end and p in self._places:
                    yield self._places[p], index, begin - first, begin - at, end - begin

    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """See RankState.finish_restore."""
        self._set_scalars(scalars)
        self._optimizer.update_lp_params()


class Zero3State(_FlatState):
    """State at ZeRO 3: each sub-group is one flat tensor.

    All ranks have equal shares of a parameter; the last ones are padded.
    """

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See RankState.shards. At most one of the sub-groups on NVMe is in memory at a time."""
        saved = None if source is None else SavedOptimizerState(source)
        to_fill = saved is not None
        if to_fill:
            # Parameters that stay gathered would keep old values, and shares on NVMe must be in memory.
            self._optimizer.checkpoint_event_prologue()
        for p, place in self._places.items():
            if not p.requires_grad:
                yield from self._frozen_shards(p, place, to_fill)
        for index in range(len(self._optimizer.fp16_groups)):
            yield from self._sub_group_shards(index, saved)
        yield from buffer_shards(self._buffers, self._replica[0] == 0, to_fill)

    def gradients(self, stepped_ids: Collection[int]) -> Iterator[Shard]:
        """See RankState.gradients."""
        zero = self._optimizer
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            if id(flat) in stepped_ids and flat.grad is not None:
                for p in zero.fp16_groups[index]:
                    offset = zero.grad_position[zero.get_param_id(p)][1]
                    start, length = self._share_of(p)
                    mine = flat.grad[offset : offset + length]
                    yield from self._places[p].shards(GRADIENT, start, mine, to_fill=False)

    def get_stored_gradients(self) -> Iterable[Any]:
        """See RankState.get_stored_gradients."""
        flats = self._optimizer.fp32_partitioned_groups_flat
        return [*(flat.grad for flat in flats), self._optimizer.grad_partitions_flat_buffer]

    def _sub_group_shards(self, index: int, saved: SavedOptimizerState | None) -> Iterator[Shard]:
        zero = self._optimizer
        to_fill = saved is not None
        flat = zero.fp32_partitioned_groups_flat[index]
        with self._in_memory(index, to_fill) as is_swapped:
            if saved is not None:
                saved.create_state(
                    self._adam(index), flat, [self._places[p] for p in zero.fp16_groups[index]]
                )
            kinds = {WEIGHT: flat, **get_flat_state_tensors(self._adam(index), flat)}
            for p in zero.fp16_groups[index]:
                offset = zero.grad_position[zero.get_param_id(p)][1]
                start, length = self._share_of(p)
                for kind, values in kinds.items():
                    mine = values.detach()[offset : offset + length]
                    if is_swapped and not to_fill:
                        mine = mine.clone()  # the next sub-group is read into the same memory
                    yield from self._places[p].shards(kind, start, mine, to_fill)
            if to_fill:
                zero._reassign_or_swap_out_partitioned_parameters(index)  # updates the half-precision copy

    @contextmanager
    def _in_memory(self, index: int, to_fill: bool) -> Iterator[bool]:
        """Have a sub-group in memory inside the context, and yield whether it came from NVMe.

        If it did and it was filled, the new values are written back.
        """
        zero = self._optimizer
        is_swapped = zero._swappable_optimizer_subgroup(index)
        if is_swapped:
            zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield is_swapped
        finally:
            if is_swapped and to_fill:
                zero._optimizer_states_and_gradient_swap_out(index)
            elif is_swapped:
                zero._release_swap_buffers(index)

    def _frozen_shards(self, p: Any, place: TensorPlacement, to_fill: bool) -> Iterator[Shard]:
        """Yield this rank's share of a frozen parameter, which has no master, in the run's precision."""
        start, length = self._share_of(p)
        is_swapped = p.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
        if is_swapped:
            p.nvme_swapper.swap_in([p], async_op=False)
        mine = p.ds_tensor.detach()[:length]
        mine = mine.clone() if is_swapped and not to_fill else mine
        yield from place.shards(WEIGHT, start, mine, to_fill)
        if is_swapped and to_fill:
            p.nvme_swapper.swap_out_and_release([p])
        elif is_swapped:
            p.nvme_swapper.remove_partition_and_release_buffers([p])

    def _share_of(self, parameter: Any) -> tuple[int, int]:
        """Return (start, length) of this rank's share of a parameter, without the padding."""
        group = getattr(parameter, "ds_process_group", self._optimizer.dp_process_group)
        size = parameter.partition_numel()
        whole = parameter.ds_numel
        start = min(dist.get_rank(group) * size, whole)
        return start, min(size, whole - start)

    def _adam(self, index: int) -> torch.optim.Optimizer:
        """Return the optimizer of a sub-group.

        With offload and a `ratio` below 1, DeepSpeed steps some sub-groups on the device by another one.
        """
        zero = self._optimizer
        on_device = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"
        adam: torch.optim.Optimizer = zero.backup_optimizer if on_device else zero.optimizer
        return adam

    def _flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        for index, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            yield self._adam(index), flat

    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """See RankState.finish_restore."""
        self._set_scalars(scalars)
        self._optimizer.checkpoint_event_epilogue()
