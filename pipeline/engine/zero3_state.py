"""What a rank holds at ZeRO 3: its share of every parameter, in sub-groups that may lie on an NVMe disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import Tensor

from pipeline.engine.optimizer_state import (
    SavedState,
    flat_numbers,
    flat_tensors,
    set_numbers,
    take_steps_again,
)
from pipeline.engine.parameter_state import Places, buffer_shards
from pipeline.engine.state import Place
from pipeline.errors import CheckpointError
from pipeline.shards import WEIGHT, Scalars, Shard, ShardSource


class Zero3State:
    """Masters and moments in one flat tensor a sub-group; ranks have equal shares, the last ones padded."""

    def __init__(
        self, optimizer: Any, places: Places, buffers: Mapping[str, Tensor], sharers: tuple[int, int]
    ):
        self._optimizer = optimizer
        self._places = places
        self._buffers = buffers
        self._writes_buffers = sharers[0] == 0

    def shards(self, source: ShardSource | None) -> Iterator[Shard]:
        """See State.shards. Of what lies on a disk one sub-group is in memory at a time."""
        to_fill, saved = source is not None, None if source is None else SavedState(source)
        if to_fill:
            # Parameters that stay gathered would keep old values, and shares on NVMe must be there to write.
            self._optimizer.checkpoint_event_prologue()
        for p, place in self._places.items():
            if not p.requires_grad:
                yield from self._frozen(p, place, to_fill)
        for index in range(len(self._optimizer.fp16_groups)):
            yield from self._sub_group(index, saved)
        yield from buffer_shards(self._buffers, self._writes_buffers, to_fill)

    def _sub_group(self, index: int, saved: SavedState | None) -> Iterator[Shard]:
        zero, to_fill = self._optimizer, saved is not None
        flat = zero.fp32_partitioned_groups_flat[index]
        with self._in_memory(index, to_fill) as is_swapped:
            if saved is not None:
                saved.make(self._adam(index), flat, [self._places[p] for p in zero.fp16_groups[index]])
            kinds = {WEIGHT: flat, **flat_tensors(self._adam(index), flat)}
            for p in zero.fp16_groups[index]:
                offset = zero.grad_position[zero.get_param_id(p)][1]
                start, length = self._share(p)
                for kind, values in kinds.items():
                    mine = values.detach()[offset : offset + length]
                    # The next sub-group comes to lie in the same memory; what is written must last.
                    is_borrowed = is_swapped and not to_fill
                    mine = mine.clone() if is_borrowed else mine
                    yield from self._places[p].shards(kind, start, mine, to_fill)
            if to_fill:
                zero._reassign_or_swap_out_partitioned_parameters(index)  # the copy in the run's precision

    @contextmanager
    def _in_memory(self, index: int, to_fill: bool) -> Iterator[bool]:
        """Around the use of a sub-group: whether it came from a disk. Filled, it is written back to it."""
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

    def _frozen(self, p: Any, place: Place, to_fill: bool) -> Iterator[Shard]:
        """A parameter without a master: its share in the run's precision."""
        start, length = self._share(p)
        if hasattr(p.ds_tensor, "ds_quant_scale"):
            raise CheckpointError(
                f"zero_quantized_nontrainable_weights: {place.name} lies quantized in memory, which a "
                "checkpoint does not keep; leave the key out"
            )
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

    def _share(self, parameter: Any) -> tuple[int, int]:
        """(start, length) of this rank's values, without the padding."""
        group = getattr(parameter, "ds_process_group", self._optimizer.dp_process_group)
        size, whole = parameter.partition_numel(), parameter.ds_numel
        start = min(dist.get_rank(group) * size, whole)
        return start, min(size, whole - start)

    def _adam(self, index: int) -> torch.optim.Optimizer:
        """What steps a sub-group: with a `ratio` below 1 some are stepped on the device."""
        zero = self._optimizer
        on_device = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"
        adam: torch.optim.Optimizer = zero.backup_optimizer if on_device else zero.optimizer
        return adam

    def _flats(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        for index, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            yield self._adam(index), flat

    def scalars(self) -> Scalars:
        """See State.scalars. All parameters of a sub-group step together."""
        return flat_numbers(self._flats())

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """See State.settle."""
        for adam, flat in self._flats():
            set_numbers(adam, flat, scalars)
        for adam in {id(adam): adam for adam, _ in self._flats()}.values():
            take_steps_again(adam, scalars)
        self._optimizer.checkpoint_event_epilogue()
