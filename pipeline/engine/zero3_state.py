"""What a rank holds at ZeRO 3: its share of every parameter, in sub-groups that may lie on an NVMe disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import Tensor

from pipeline.engine.fragments import WEIGHT, Scalars
from pipeline.engine.held import Held
from pipeline.engine.optimizer import take_steps_again
from pipeline.engine.torch_state import ADAM_STEP, Named, held_buffers, moments, set_steps, steps_taken
from pipeline.errors import CheckpointError


class Zero3State:
    """Masters and moments in one flat tensor a sub-group; ranks have equal shares, the last ones padded."""

    def __init__(
        self, optimizer: Any, named: list[Named], buffers: Mapping[str, Tensor], sharers: tuple[int, int]
    ):
        self._optimizer = optimizer
        self._named = {id(each.parameter): each for each in named}
        self._buffers = buffers
        self._writes_buffers = sharers[0] == 0

    def held(self, to_fill: bool) -> Iterator[Held]:
        """See State.held. Of what lies on a disk one sub-group is in memory at a time."""
        if to_fill:
            # Parameters that stay gathered would keep old values, and shares on NVMe must be there to write.
            self._optimizer.checkpoint_event_prologue()
        for each in self._named.values():
            if not each.parameter.requires_grad:
                yield from self._frozen(each, to_fill)
        for index in range(len(self._optimizer.fp16_groups)):
            yield from self._sub_group(index, to_fill)
        yield from held_buffers(self._buffers, self._writes_buffers)

    def _sub_group(self, index: int, to_fill: bool) -> Iterator[Held]:
        zero = self._optimizer
        flat = zero.fp32_partitioned_groups_flat[index]
        with self._in_memory(index, to_fill) as is_swapped:
            kinds = {WEIGHT: flat, **moments(self._adam(index), flat, to_fill)}
            for p in zero.fp16_groups[index]:
                offset = zero.grad_position[zero.get_param_id(p)][1]
                start, length = self._share(p)
                for kind, values in kinds.items():
                    mine = values.detach()[offset : offset + length]
                    # The next sub-group comes to lie in the same memory; what is written must last.
                    is_borrowed = is_swapped and not to_fill
                    yield self._named[id(p)].held(kind, start, mine.clone() if is_borrowed else mine)
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

    def _frozen(self, each: Named, to_fill: bool) -> Iterator[Held]:
        """A parameter without a master: its share in the run's precision."""
        p: Any = each.parameter
        start, length = self._share(p)
        if hasattr(p.ds_tensor, "ds_quant_scale"):
            raise CheckpointError(
                f"zero_quantized_nontrainable_weights: {each.name} lies quantized in memory, which a "
                "checkpoint does not keep; leave the key out"
            )
        is_swapped = p.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
        if is_swapped:
            p.nvme_swapper.swap_in([p], async_op=False)
        mine = p.ds_tensor.detach()[:length]
        yield each.held(WEIGHT, start, mine.clone() if is_swapped and not to_fill else mine)
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

    def steps(self) -> Scalars:
        """See State.steps. All parameters of a sub-group step together."""
        return {ADAM_STEP: max((steps_taken(adam, flat) for adam, flat in self._flats()), default=0)}

    def settle(self, scalars: Mapping[str, Any]) -> None:
        """See State.settle."""
        for adam, flat in self._flats():
            set_steps(adam, flat, int(scalars[ADAM_STEP]))
        for adam in {id(adam): adam for adam, _ in self._flats()}.values():
            take_steps_again(adam, int(scalars[ADAM_STEP]))
        self._optimizer.checkpoint_event_epilogue()
