"""Counts the bytes of weights, gradients, optimizer states, checkpoints and buffers of one rank.

The counts of states are exact under any split. They follow how DeepSpeed 0.19.8 pads and stores states, and
which buckets and gathered weights it allocates in addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pipeline.config.deepspeed_check import has_16bit_master_weights, has_16bit_optimizer_states
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.patterns import assign_parameter_groups, get_optimizer_kind
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.planner.model import ModelSpec, ParameterSpec
from pipeline.planner.rank import STAND_IN, OptimizerGroup, RankSlice


def count_checkpoint_bytes(model: ModelSpec, config: RunConfig, resolved: ResolvedSettings) -> int:
    """Return the bytes of one checkpoint, which stores each tensor in the precision that the run uses.

    A checkpoint has the weights that the optimizer steps, the optimizer's states, and frozen parameters in
    the run's precision. The base of an adapter is not in it.
    """
    optimizer = config.optimizer
    has_base = config.adapter is not None
    json = resolved.deepspeed or {}
    # Bytes of an element.
    master = 2 if has_16bit_master_weights(json) else 4
    moment = 2 if has_16bit_optimizer_states(json) else 4
    frozen = 4 if resolved.deepspeed is None or resolved.split.precision == "fp32" else 2
    keys = assign_parameter_groups({p.name: len(p.shape) for p in model.parameters if p.trains}, optimizer)
    total = 0
    for p in model.parameters:
        if p.trains:
            kind = get_optimizer_kind(keys[p.name], optimizer)
            total += master * p.numel + count_moment_bytes(optimizer, kind, p.shape, moment)
        elif not has_base:
            total += frozen * p.numel
    return total


STEP_COUNT_BYTES = 4  # torch's count of steps, a tensor for each parameter
_ALIGNMENT = 2  # DeepSpeed pads a flat group to a multiple of this number of elements for each rank
_PERSISTENT_ELEMENTS = 100_000  # DeepSpeed's default: a parameter with no more elements stays whole at ZeRO 3
_MIN_SWAP_BYTES = 1 << 20  # DeepSpeed does not swap smaller tensors to disk


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the states of one rank in one kind of memory."""

    weights: int = 0
    """Bytes of the weights that forward and backward use, including a frozen base and the second copy of
    ZeRO++ (hpZ)."""
    gradients: int = 0
    """Bytes of the gradients right before a step."""
    masters: int = 0
    """Bytes of the copies that the optimizer steps; 0 if it steps the weights themselves."""
    moments: int = 0
    """Bytes of the optimizer's own states: means, squares, its count of steps."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.weights + self.gradients + self.masters + self.moments

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.moments + other.moments,
        )


@dataclass(frozen=True)
class RankStates:
    """Bytes of the states of one rank from its first step on, by kind of memory."""

    device: StateBytes = field(default_factory=StateBytes)
    """Bytes on the GPU, or in main memory if the rank computes on a CPU."""
    host: StateBytes = field(default_factory=StateBytes)
    """Bytes in main memory because of an offload to `cpu`."""
    disk: StateBytes = field(default_factory=StateBytes)
    """Bytes on disk because of an offload to `nvme`."""


def count_states(rank: RankSlice) -> RankStates:
    """Return the bytes of a rank's states between two steps; gradients count as right before a step."""
    if rank.resolved.deepspeed is None or rank.stage == 0:
        return _count_whole(rank)
    if rank.stage == 3:
        return _count_sharded(rank)
    return _count_partitioned(rank)


def _count_whole(rank: RankSlice) -> RankStates:
    """Return the states under plain PyTorch and ZeRO 0, where each rank has all of each parameter."""
    weights = sum(map(rank.count_bytes, rank.own.parameters))
    trained = sum(group.numel for group in rank.groups)
    masters = 4 * trained if rank.weight_size == 2 else 0
    optimizer = rank.config.optimizer
    kept = sum(
        count_moment_bytes(optimizer, group.kind, p.shape, has_step_count=True)
        for group in rank.groups
        for p in group.parameters
    )
    return RankStates(StateBytes(weights, rank.weight_size * trained, masters, kept))


def count_moment_bytes(
    optimizer: OptimizerConfig, kind: str, shape: tuple[int, ...], size: int = 4, has_step_count: bool = False
) -> int:
    """Return the bytes that an optimizer keeps for a tensor.

    Args:
        optimizer: Section of the recipe.
        kind: `adamw`, `sgd`, `adafactor` or `muon`. The user's own optimizer counts as `adamw`.
        shape: Shape of the tensor.
        size: Bytes of an element of the states.
        has_step_count: Whether the optimizer counts its steps in a tensor, as torch's do.
    """
    number = prod(shape)
    step = STEP_COUNT_BYTES if has_step_count else 0
    if kind == "sgd":
        return size * number if optimizer.momentum else 0
    if kind == "muon":
        return size * number
    if kind == "adafactor":
        rows = number // shape[-1]
        columns = number // shape[-2] if len(shape) > 1 else 0
        return step + size * (rows + columns if len(shape) > 1 else number)
    return step + 2 * size * number


@dataclass(frozen=True)
class ZeroPartition:
    """Partition of a flat parameter group that one rank steps at ZeRO 1 or 2."""

    own: int
    """Number of elements in the partition, with padding."""
    whole: int
    """Number of elements in the whole group, with padding."""
    overlapping: int
    """Number of elements of all parameters that overlap the partition, counted whole."""
    padding: int
    """Number of elements of the partition that belong to no parameter."""

    @classmethod
    def from_group(cls, group: OptimizerGroup, sharers: int, index: int, alignment: int) -> ZeroPartition:
        """Return the partition with this index, of `sharers` equal ones of a group.

        The start of each parameter is padded to a multiple of `alignment` elements.
        """
        bounds = []
        end = 0
        for p in group.parameters:
            start = -(-end // alignment) * alignment
            end = start + p.numel
            bounds.append((start, end))
        unit = _ALIGNMENT * sharers
        own = -(-end // unit) * unit // sharers
        first = own * index
        last = own * (index + 1)
        inside = [(start, end) for start, end in bounds if start < last and end > first]
        filled = sum(min(end, last) - max(start, first) for start, end in inside)
        return cls(
            own=own,
            whole=own * sharers,
            overlapping=sum(end - start for start, end in inside),
            padding=own - filled,
        )


def partition_groups(rank: RankSlice) -> list[ZeroPartition]:
    """Return the rank's partition of each group at ZeRO 1 and 2."""
    is_aligned = rank.zero("parameter_alignment") and not rank.uses_bf16_optimizer
    alignment = 16 // rank.weight_size if is_aligned else 1
    return [
        ZeroPartition.from_group(group, rank.sharers, rank.partition_index, alignment)
        for group in rank.groups
    ]


def _count_partitioned(rank: RankSlice) -> RankStates:
    """Return the states at ZeRO 1 and 2, where a rank steps one partition of each flat group."""
    parts = partition_groups(rank)
    frozen = sum(rank.count_bytes(p) for p in rank.own.parameters if not p.trains)
    weights = frozen + rank.weight_size * sum(part.whole for part in parts)
    own = sum(part.own for part in parts)
    if rank.uses_bf16_optimizer:
        trained = sum(group.numel for group in rank.groups)
        gradients = rank.weight_size * trained + rank.gradient_size * sum(part.whole for part in parts)
        return RankStates(StateBytes(weights, gradients, 4 * own, _count_partition_moments(rank, parts)))
    master = 2 if has_16bit_master_weights(rank.json) else 4
    # With fp32 gradients of 16-bit weights, DeepSpeed adds up only those of the rank's own partition.
    is_compact = rank.gradient_size == 4 and rank.weight_size == 2
    gradients = rank.gradient_size * own if is_compact else _count_overlapping_gradients(rank, parts)
    if rank.offloads("optimizer") is None:
        return RankStates(StateBytes(weights, gradients, master * own, _count_partition_moments(rank, parts)))
    accumulated = 0
    accumulates = rank.resolved.batch_plan.gradient_accumulation_steps > 1
    if rank.stage == 2 and accumulates and not is_compact and master == 4:
        # DeepSpeed also keeps the sum over micro-batches in main memory, of each overlapping parameter whole.
        accumulated = rank.weight_size * sum(part.overlapping for part in parts)
    host = StateBytes(0, master * own + accumulated, master * own, _count_partition_moments(rank, parts))
    return RankStates(StateBytes(weights, gradients if is_compact else 0), host)


def _count_overlapping_gradients(rank: RankSlice, parts: Sequence[ZeroPartition]) -> int:
    """Return the bytes of all gradients that overlap this rank's partitions, and of zeros for the padding."""
    zeros = sum(part.padding for part in parts)
    for group, part in zip(rank.groups, parts, strict=True):
        if group.parameters[0].name == STAND_IN:
            zeros += part.overlapping
    return rank.weight_size * sum(part.overlapping for part in parts) + rank.gradient_size * zeros


def _count_partition_moments(rank: RankSlice, parts: Sequence[ZeroPartition]) -> int:
    """Return the bytes of the optimizer's states for the rank's partitions."""
    return sum(
        _count_flat_moments(rank, group.kind, part.own)
        for group, part in zip(rank.groups, parts, strict=True)
    )


def _count_flat_moments(rank: RankSlice, kind: str, number: int, on_host: bool = True) -> int:
    """Return the bytes of the optimizer's states for a flat tensor of `number` elements.

    DeepSpeed's CPU Adam steps on the host (`on_host`) if the optimizer is offloaded. It counts steps in a
    Python number, and so keeps no tensor for them.
    """
    is_cpu_adam = kind == "adamw" and rank.offloads("optimizer") is not None and on_host
    size = 2 if has_16bit_optimizer_states(rank.json) else 4
    return count_moment_bytes(rank.config.optimizer, kind, (number,), size, has_step_count=not is_cpu_adam)


def list_sub_groups(rank: RankSlice) -> list[tuple[str, int]]:
    """Return the sub-groups that ZeRO 3 steps one by one: pairs of optimizer kind and elements on this rank.

    DeepSpeed adds parameters to a sub-group until it has `sub_group_size` elements of a rank.
    """
    limit = int(rank.zero("sub_group_size", 1e9))
    sub_groups = []
    for group in rank.groups:
        shards = [compute_shard_size(p, rank.sharers) for p in group.parameters]
        if limit >= sum(shards):
            sub_groups.append((group.kind, sum(shards)))
            continue
        elements = 0
        for index, shard in enumerate(shards):
            elements += shard
            if elements >= limit or index == len(shards) - 1:
                sub_groups.append((group.kind, elements))
                elements = 0
    return sub_groups


def compute_shard_size(p: ParameterSpec, sharers: int) -> int:
    """Return the number of elements in a rank's shard of a parameter, with padding."""
    return -(-p.numel // sharers)


def list_persistent_parameters(rank: RankSlice) -> list[ParameterSpec]:
    """Return the parameters that ZeRO 3 gathers once and then keeps whole on every rank."""
    max_elements = int(rank.zero("stage3_param_persistence_threshold", _PERSISTENT_ELEMENTS))
    max_total = int(rank.zero("stage3_model_persistence_threshold", 1 << 62))
    persistent = []
    total = 0
    for p in rank.own.parameters:
        if p.numel <= max_elements and total + p.numel <= max_total:
            persistent.append(p)
            total += p.numel
    return persistent


def _count_sharded(rank: RankSlice) -> RankStates:
    """Return the states at ZeRO 3, which divides each parameter into equal shards, padded."""
    shards = rank.weight_size * sum(compute_shard_size(p, rank.sharers) for p in rank.own.parameters)
    persistent = list_persistent_parameters(rank)
    persistent_names = {p.name for p in persistent}
    gathered = sum(rank.weight_size * rank.sharers * compute_shard_size(p, rank.sharers) for p in persistent)
    offloaded_to = rank.offloads("param")
    if rank.sharers == 1 and (offloaded_to is None or rank.on_cpu):
        gathered = 0  # the shard of a single rank is the parameter itself
    hpz_ranks = int(rank.zero("zero_hpz_partition_size", 1))
    if hpz_ranks > 1:  # a second copy, divided among fewer ranks
        others = [p for p in rank.own.parameters if p.name not in persistent_names]
        gathered += sum(
            rank.weight_size * rank.sharers * compute_shard_size(p, rank.sharers) // hpz_ranks for p in others
        )
    device = StateBytes(gathered + (0 if offloaded_to else shards))
    host = StateBytes(shards if offloaded_to else 0)
    offload = rank.offloads("optimizer")
    master = 2 if has_16bit_master_weights(rank.json) else 4
    disk = StateBytes()
    gradients = 0
    groups = list_sub_groups(rank)
    # offload_optimizer.ratio: DeepSpeed counts sub-groups, not elements, and steps the first ones on the GPU.
    ratio = 1.0 if rank.on_cpu else rank.zero("offload_optimizer.ratio", 1.0)
    num_on_device = int((1 - ratio) * len(groups))
    for index, (kind, own) in enumerate(groups):
        is_on_device = index < num_on_device
        moments = _count_flat_moments(rank, kind, own, on_host=not is_on_device)
        states = StateBytes(masters=master * own, moments=moments)
        gradients += rank.gradient_size * own
        with_gradients = states + StateBytes(gradients=master * own)
        if offload is None:
            device += states
        elif offload == "nvme" and master * own >= _MIN_SWAP_BYTES:
            disk += with_gradients
        elif is_on_device:
            device += with_gradients
        else:
            host += with_gradients
    if offload is None:
        return RankStates(device + StateBytes(0, gradients), host)
    return RankStates(device, host + StateBytes(0, gradients), disk)


_MIN_BUCKET_ELEMENTS = 50_000_000  # a reduction of fewer takes as long, because of its latency
_MAX_BUCKET_ELEMENTS = 500_000_000
_NUM_BUCKETS = 8  # target for a model, so that most of it is reduced during its backward
_FLAT_ELEMENTS = 500_000_000  # DeepSpeed flattens this many at once if it reduces after the backward
# Default of stage3_max_reuse_distance. ZeRO 3 keeps a gathered parameter if it is used again within so many
# elements.
_REUSE_DISTANCE = 1_000_000_000
_PREFETCH_ELEMENTS = 50_000_000  # default of stage3_prefetch_bucket_size
_NORM_BYTES = 8  # DeepSpeed copies an offloaded gradient to fp64 for its norm; bytes of an element


@dataclass(frozen=True)
class EngineBuffers:
    """Bytes of one rank's engine in addition to the states."""

    always: int = 0
    """Bytes on the device from the start on."""
    forward: int = 0
    """Peak in a forward, above `always`."""
    backward: int = 0
    """Peak in a backward, above `always` and the gradients kept for the step. Includes gradients that are not
    reduced yet."""
    step: int = 0
    """Peak in the optimizer's step, above `always`. Includes the buffers in which all gradients are reduced
    before it."""
    host: int = 0
    """Bytes in main memory from the start on."""
    keeps_gradients: bool = False
    """Whether gradients exist during a forward: those of earlier micro-batches, or a buffer that is never
    freed."""


def fit_bucket_size(stated: Any, num_parameters: int) -> int:
    """Return the size of the bucket in which gradients are reduced, in elements.

    The size is at most the model's. DeepSpeed's default is half a billion elements, which it allocates whole
    in each step, twice with overlap_comm. A model that fits into one bucket is reduced only after its
    backward.

    Args:
        stated: `reduce_bucket_size` of the JSON; `None` if the JSON leaves it to this trainer.
        num_parameters: Number of parameters that are reduced.
    """
    chosen = min(max(num_parameters // _NUM_BUCKETS, _MIN_BUCKET_ELEMENTS), _MAX_BUCKET_ELEMENTS)
    return min(int(chosen if stated is None else stated), max(1, num_parameters))


def count_buffers(rank: RankSlice) -> EngineBuffers:
    """Return the bytes that a rank's engine takes in addition to the states."""
    accumulates = rank.resolved.batch_plan.gradient_accumulation_steps > 1
    if rank.resolved.deepspeed is not None and rank.stage == 3:
        return _count_sharded_buffers(rank)
    if rank.resolved.deepspeed is not None and rank.stage > 0 and not rank.uses_bf16_optimizer:
        return _count_partitioned_buffers(rank, accumulates)
    trained = sum(group.numel for group in rank.groups)
    # Optimizers without a fused kernel need temporaries of the size of the largest parameter.
    unfused = 3 * 4 * _count_largest(rank) if {group.kind for group in rank.groups} - {"adamw", "sgd"} else 0
    if (
        rank.uses_bf16_optimizer
    ):  # DeepSpeed's bf16 optimizer reduces a flat copy, made from the fp32 gradients
        step = (rank.gradient_size + rank.weight_size) * min(trained, _FLAT_ELEMENTS)
        return EngineBuffers(step=step, keeps_gradients=True)
    if rank.resolved.deepspeed is not None:  # ZeRO 0 reduces a flat copy, and steps in fp32
        in_fp32 = 4 * trained if rank.weight_size == 2 else 0
        step = max(rank.weight_size * min(trained, _FLAT_ELEMENTS), in_fp32 + unfused)
        return EngineBuffers(step=step, keeps_gradients=accumulates)
    if rank.split.parallel != "ddp":
        return EngineBuffers(step=unfused, keeps_gradients=accumulates)
    # DDP's buckets hold gradients from the first backward on; those of earlier micro-batches come on top.
    earlier = 4 * trained if accumulates else 0
    backward = earlier + 4 * _count_largest(rank)
    return EngineBuffers(forward=earlier, backward=backward, step=unfused, keeps_gradients=True)


def _count_largest(rank: RankSlice) -> int:
    """Return the number of elements of the largest trained parameter."""
    return max((p.numel for group in rank.groups for p in group.parameters), default=0)


def _choose_bucket_size(rank: RankSlice) -> int:
    """Return the number of elements in the rank's bucket of gradients."""
    has_stages = rank.split.pipeline_stages > 1
    num_parameters = sum(group.numel for group in rank.groups) if has_stages else rank.model_numel
    return fit_bucket_size(rank.zero("reduce_bucket_size"), num_parameters)


def _count_partitioned_buffers(rank: RankSlice, accumulates: bool) -> EngineBuffers:
    """Return the engine's buffers at ZeRO 1 and 2."""
    parts = partition_groups(rank)
    size = rank.weight_size
    trained = size * sum(group.numel for group in rank.groups)
    largest = size * _count_largest(rank)
    kept = size * sum(part.overlapping for part in parts)
    is_compact = rank.gradient_size == 4 and size == 2
    offload = rank.offloads("optimizer")
    overlaps = bool(rank.zero("overlap_comm", False)) and rank.split.pipeline_stages == 1
    bucket = _choose_bucket_size(rank)
    buckets = (rank.gradient_size if rank.stage == 1 else size) * bucket * (2 if overlaps else 1)
    reduced_copy = bucket * 4 if is_compact else size * bucket * (rank.sharers > 1)
    forward = 0
    step = 0
    backward = buckets + reduced_copy + largest
    if rank.stage == 1 and (accumulates or not overlaps):  # a rank has all gradients until the last backward
        whole = trained - (0 if offload else kept)
        forward = whole if accumulates else 0
        backward = max(whole, trained + buckets // 2 + largest) if overlaps else whole
        step = trained if not overlaps and not offload else whole
    elif accumulates and not is_compact and offload is None:
        backward += kept  # gradients of this micro-batch, before they are added to the others
    if offload is not None:
        return EngineBuffers(
            always=largest,
            forward=forward,
            backward=backward + _NORM_BYTES * _count_largest(rank),
            step=step,
            host=size * sum(part.own for part in parts) + largest,
            keeps_gradients=accumulates and rank.stage == 1,
        )
    copied = 0
    if not is_compact:
        # The flat copy of a group's gradients, and the same in fp32.
        bytes_per_value = size + 4 if size == 2 else 4
        copied = bytes_per_value * max(part.own for part in parts)
    return EngineBuffers(
        forward=forward, backward=backward, step=max(step, copied), keeps_gradients=accumulates
    )


def _sum_by_block(parameters: Iterable[ParameterSpec], sharers: int = 1) -> list[int]:
    """Return the number of elements, with padding, of each block and of each parameter outside of blocks."""
    units: dict[str, int] = {}
    for p in parameters:
        words = p.name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), None)
        key = p.name if number is None else ".".join(words[: number + 1])
        units[key] = units.get(key, 0) + compute_shard_size(p, sharers) * sharers
    return list(units.values()) or [0]


def _count_sharded_buffers(rank: RankSlice) -> EngineBuffers:
    """Return the engine's buffers at ZeRO 3, which gathers one block, or one parameter outside, at a time."""
    size = rank.weight_size
    persistent_names = {p.name for p in list_persistent_parameters(rank)}
    units = _sum_by_block((p for p in rank.own.parameters if p.name not in persistent_names), rank.sharers)
    largest_unit = max(units)
    all_units = sum(units)
    bucket = min(_choose_bucket_size(rank), int(rank.zero("reduce_bucket_size", 1 << 62)))
    reduced_size = 4 if rank.split.sequence_parallel > 1 else size  # bytes of an element in a reduction
    prefetched = min(int(rank.zero("stage3_prefetch_bucket_size", _PREFETCH_ELEMENTS)), all_units)
    reused = int(rank.zero("stage3_max_reuse_distance", _REUSE_DISTANCE)) // 2 + largest_unit
    gathered = size * min(all_units, reused)
    copied = size * largest_unit  # gathered shards, before they are copied into the parameters
    if rank.sharers == 1:
        prefetched = copied = 0
        if rank.offloads("param") is None or rank.on_cpu:
            gathered = 0  # the shard of a single rank is the parameter itself
    trained = max(_sum_by_block(p for group in rank.groups for p in group.parameters))
    reduced = reduced_size * min(bucket, trained)
    if rank.offloads("optimizer") is not None:
        reduced = max(reduced, _NORM_BYTES * -(-_count_largest(rank) // rank.sharers))
        step = 0
    else:
        has_16bit_masters = size == 2 and has_16bit_master_weights(rank.json)
        # A sub-group's gradients are copied into a flat tensor, and into fp32 for fp32 master weights.
        bytes_per_value = rank.gradient_size
        if rank.gradient_size == 2 and not has_16bit_masters:
            bytes_per_value += 4
        step = bytes_per_value * max((own for _, own in list_sub_groups(rank)), default=0)
    return EngineBuffers(
        always=reduced_size * bucket,
        forward=gathered + copied + size * prefetched,
        backward=gathered + size * trained + reduced,
        step=step,
        host=_count_swap_bytes(rank),
        keeps_gradients=True,
    )


def _count_swap_bytes(rank: RankSlice) -> int:
    """Return the bytes of pinned memory through which offloaded states go to and from the disk."""
    host = 0
    if rank.offloads("param") == "nvme":
        count = int(rank.zero("offload_param.buffer_count", 5))
        host += count * int(rank.zero("offload_param.buffer_size", 100_000_000)) * rank.weight_size
    if rank.offloads("optimizer") == "nvme":
        count = int(rank.zero("offload_optimizer.buffer_count", 4))
        host += count * 4 * max((own for _, own in list_sub_groups(rank)), default=0)
    return host
