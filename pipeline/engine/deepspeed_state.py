"""Implements RankState for DeepSpeed at ZeRO 1 to 3, and chooses the state of any DeepSpeed optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

    At ZeRO 1 and 2 these are flat tensors, and the parameters are views of them.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return cast(Sequence[Tensor], optimizer.bf16_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return cast(Sequence[Tensor], optimizer.bit16_groups_flat)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return [p for group in optimizer.fp16_groups for p in group]
    return ()


class _FlatState(ABC):
    """State whose master weights and moments are flat tensors of several parameters.

    Args:
        optimizer: Optimizer that deepspeed.initialize returned.
        places: Placements of this rank's parameters, frozen ones too.
        buffers: Persistent buffers by name.
        replica: See build_rank_state.
    """

    def __init__(
        self, optimizer: Any, places: Placements, buffers: Mapping[str, Tensor], replica: tuple[int, int]
    ):
        self._optimizer = optimizer
        self._places = places
        self._buffers = buffers
        self._replica = replica

    @abstractmethod
    def _list_flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        """Yield this rank's flat tensors of master weights, each with torch's optimizer that steps it."""

    def get_masters(self) -> Iterable[Tensor]:
        """See RankState.get_masters."""
        return [flat for _, flat in self._list_flats()]

    def scalars(self) -> Scalars:
        """See RankState.scalars."""
        return merge_flat_scalars(self._list_flats())

    def _set_scalars(self, scalars: Mapping[str, Any]) -> None:
        for optimizer, flat in self._list_flats():
            set_state_scalars(optimizer, flat, scalars)
        for optimizer in dict.fromkeys(optimizer for optimizer, _ in self._list_flats()):
            replay_step_count(optimizer, scalars)


@dataclass(frozen=True)
class _FlatRange:
    """Range of a parameter's values in a flat tensor of this rank. Positions are in elements."""

    placement: TensorPlacement
    """Placement of the parameter."""
    group: int
    """Index of the parameter group, and so of the flat tensor."""
    offset: int
    """Position of the first value in this rank's flat tensor."""
    start: int
    """Position of the first value in the flattened parameter."""
    length: int
    """Number of values."""


class PartitionState(_FlatState):
    """State at ZeRO 1 and 2: this rank's partition of each parameter group is one flat tensor."""

    def _list_flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        zero = self._optimizer
        is_bf16 = isinstance(zero, BF16_Optimizer)
        for flat in zero.fp32_groups_flat_partition if is_bf16 else zero.single_partition_of_fp32_groups:
            yield zero.optimizer, flat

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See RankState.shards."""
        to_fill = source is not None
        ranges = list(self._list_ranges())
        if source is not None:
            saved = SavedOptimizerState(source)
            for index, (optimizer, flat) in enumerate(self._list_flats()):
                placements = [each.placement for each in ranges if each.group == index]
                saved.create_state(optimizer, flat, placements)
        yield from split_among_ranks(get_frozen_parameters(self._places), self._replica, to_fill)
        flats_by_kind = [
            {WEIGHT: flat, **get_flat_state_tensors(optimizer, flat)}
            for optimizer, flat in self._list_flats()
        ]
        for each in ranges:
            for kind, flat in flats_by_kind[each.group].items():
                values = flat[each.offset : each.offset + each.length]
                yield from each.placement.shards(kind, each.start, values, to_fill)
        yield from buffer_shards(self._buffers, self._replica[0] == 0, to_fill)

    def gradients(self, stepped_ids: Collection[int]) -> Iterator[Shard]:
        """See RankState.gradients."""
        gradients = [flat.grad if id(flat) in stepped_ids else None for _, flat in self._list_flats()]
        for each in self._list_ranges():
            gradient = gradients[each.group]
            if gradient is not None:
                values = gradient[each.offset : each.offset + each.length]
                yield from each.placement.shards(GRADIENT, each.start, values, to_fill=False)

    def get_stored_gradients(self) -> Iterable[Any]:
        """See RankState.get_stored_gradients."""
        zero = self._optimizer
        of_masters = [flat.grad for _, flat in self._list_flats()]
        if isinstance(zero, BF16_Optimizer):
            return [*of_masters, zero.fp32_groups_gradients_flat]
        in_parameters = [getattr(p, "grad_accum", None) for p in self._places]
        on_host = getattr(zero, "accumulated_grads_in_cpu", None)
        return [*of_masters, *in_parameters, zero.averaged_gradients, zero.all_grad_tensors, on_host]

    def _list_ranges(self) -> Iterator[_FlatRange]:
        """Yield the range of each parameter that has values on this rank.

        Positions follow from the parameters' storage offsets. DeepSpeed's own mapping, `_hp_mapping`, is
        wrong with round_robin_gradients (0.19.8).
        """
        zero = self._optimizer
        is_bf16 = isinstance(zero, BF16_Optimizer)
        groups = zero.bf16_groups if is_bf16 else zero.bit16_groups
        flats = zero.bf16_groups_flat if is_bf16 else zero.bit16_groups_flat
        for index, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
            process_group = zero.real_dp_process_group[index]
            partition_size = flat.numel() // dist.get_world_size(process_group)
            partition_begin = dist.get_rank(process_group) * partition_size
            for p in parameters:
                parameter_begin = p.storage_offset() - flat.storage_offset()
                begin = max(parameter_begin, partition_begin)
                end = min(parameter_begin + p.numel(), partition_begin + partition_size)
                # If a pipeline stage trains nothing of a group, it has a stand-in there, without a placement.
                if begin < end and p in self._places:
                    yield _FlatRange(
                        placement=self._places[p],
                        group=index,
                        offset=begin - partition_begin,
                        start=begin - parameter_begin,
                        length=end - begin,
                    )

    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """See RankState.finish_restore."""
        self._set_scalars(scalars)
        self._optimizer.update_lp_params()


class Zero3State(_FlatState):
    """State at ZeRO 3: this rank's shares of the parameters of a sub-group are one flat tensor.

    DeepSpeed steps one sub-group (`sub_group_size`) after the other. The shares of a parameter have the same
    size on all ranks. On the last ranks they end with padding.
    """

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See RankState.shards. At most one of the sub-groups on NVMe is in memory at a time."""
        saved = None if source is None else SavedOptimizerState(source)
        to_fill = saved is not None
        if to_fill:
            # This shards gathered parameters again, which would keep their old values, and reads shares
            # from NVMe.
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
                    start, length = self._find_share(p)
                    share = flat.grad[offset : offset + length]
                    yield from self._places[p].shards(GRADIENT, start, share, to_fill=False)

    def get_stored_gradients(self) -> Iterable[Any]:
        """See RankState.get_stored_gradients."""
        flats = self._optimizer.fp32_partitioned_groups_flat
        return [*(flat.grad for flat in flats), self._optimizer.grad_partitions_flat_buffer]

    def _sub_group_shards(self, index: int, saved: SavedOptimizerState | None) -> Iterator[Shard]:
        """Yield this rank's shards of a sub-group.

        Args:
            index: Index of the sub-group.
            saved: Optimizer state of a checkpoint that the caller fills the shards from; `None` if they are
                only read.
        """
        zero = self._optimizer
        to_fill = saved is not None
        flat = zero.fp32_partitioned_groups_flat[index]
        optimizer = self._get_torch_optimizer(index)
        with self._swap_in(index, to_fill) as is_swapped:
            if saved is not None:
                placements = [self._places[p] for p in zero.fp16_groups[index]]
                saved.create_state(optimizer, flat, placements)
            flats_by_kind = {WEIGHT: flat, **get_flat_state_tensors(optimizer, flat)}
            for p in zero.fp16_groups[index]:
                offset = zero.grad_position[zero.get_param_id(p)][1]
                start, length = self._find_share(p)
                for kind, values in flats_by_kind.items():
                    share = values.detach()[offset : offset + length]
                    if is_swapped and not to_fill:
                        share = share.clone()  # the next sub-group is read into the same memory
                    yield from self._places[p].shards(kind, start, share, to_fill)
            if to_fill:
                zero._reassign_or_swap_out_partitioned_parameters(index)  # updates the half-precision copy

    @contextmanager
    def _swap_in(self, index: int, to_fill: bool) -> Iterator[bool]:
        """Read a sub-group from NVMe if it is there, and release its memory after the context.

        Yields whether the sub-group came from NVMe.

        Args:
            index: Index of the sub-group.
            to_fill: Whether the context changes the values, so that they are written back to NVMe.
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
        """Yield this rank's share of a frozen parameter, which has no master, in the run's precision.

        Args:
            p: The parameter.
            place: Its placement.
            to_fill: Whether the caller writes to the shards.
        """
        start, length = self._find_share(p)
        is_swapped = p.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
        if is_swapped:
            p.nvme_swapper.swap_in([p], async_op=False)
        share = p.ds_tensor.detach()[:length]
        if is_swapped and not to_fill:
            share = share.clone()  # the swapped-in memory is released below
        yield from place.shards(WEIGHT, start, share, to_fill)
        if is_swapped and to_fill:
            p.nvme_swapper.swap_out_and_release([p])
        elif is_swapped:
            p.nvme_swapper.remove_partition_and_release_buffers([p])

    def _find_share(self, parameter: Any) -> tuple[int, int]:
        """Return (start, length) of this rank's share in the flattened parameter, without the padding."""
        process_group = getattr(parameter, "ds_process_group", self._optimizer.dp_process_group)
        padded_length = parameter.partition_numel()
        num_values = parameter.ds_numel
        start = min(dist.get_rank(process_group) * padded_length, num_values)
        return start, min(padded_length, num_values - start)

    def _get_torch_optimizer(self, index: int) -> torch.optim.Optimizer:
        """Return torch's optimizer that steps a sub-group.

        With offload and a `ratio` below 1, DeepSpeed steps some sub-groups on the device, with a second
        optimizer.
        """
        zero = self._optimizer
        on_device = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"
        return cast(torch.optim.Optimizer, zero.backup_optimizer if on_device else zero.optimizer)

    def _list_flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        for index, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            yield self._get_torch_optimizer(index), flat

    def finish_restore(self, scalars: Mapping[str, Any]) -> None:
        """See RankState.finish_restore."""
        self._set_scalars(scalars)
        self._optimizer.checkpoint_event_epilogue()
