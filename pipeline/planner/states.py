"""Weights, gradients, optimizer state, checkpoints and buffers of one rank, to the byte, under any split.

How DeepSpeed (0.19.8) pads and keeps them, and which buckets and gathered weights it holds beside them.
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
    """Return the bytes of one checkpoint, in which all is as it is held.

    It has the weights that the optimizer steps and what it keeps of them, and what is frozen in the run's
    precision. An adapter's base is in none.
    """
    optimizer, has_base, json = config.optimizer, config.adapter is not None, resolved.deepspeed or {}
    stepped, kept = 2 if has_16bit_master_weights(json) else 4, 2 if has_16bit_optimizer_states(json) else 4
    frozen = 4 if resolved.deepspeed is None or resolved.split.precision == "fp32" else 2
    keys = assign_parameter_groups({p.name: len(p.shape) for p in model.parameters if p.trains}, optimizer)
    total = 0
    for p in model.parameters:
        if p.trains:
            kind = get_optimizer_kind(keys[p.name], optimizer)
            total += stepped * p.numel + count_moment_bytes(optimizer, kind, p.shape, kept)
        elif not has_base:
            total += frozen * p.numel
    return total


STEP = 4  # bytes of torch's count of steps
_ALIGNMENT = 2  # elements a rank to which DeepSpeed pads a flat group
_PERSISTENCE = 100_000  # elements that DeepSpeed keeps whole where a JSON says nothing
_SWAPPED = 1 << 20  # bytes; what is smaller does not go to disk


@dataclass(frozen=True)
class StateBytes:
    """Bytes in one kind of memory."""

    weights: int = 0
    """What forward and backward compute with, with a frozen base and what hpZ holds twice."""
    gradients: int = 0
    """Right before a step."""
    masters: int = 0
    """The copies that the optimizer steps, if those are not the weights."""
    moments: int = 0
    """What the optimizer keeps of each: means, squares, its count of steps."""

    @property
    def total(self) -> int:
        """All of it."""
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
    """Bytes that one rank holds, from its first step on."""

    device: StateBytes = field(default_factory=StateBytes)
    """On the GPU, or in the memory that a rank on a CPU computes in."""
    host: StateBytes = field(default_factory=StateBytes)
    """In the machine's memory, by an offload to `cpu`."""
    disk: StateBytes = field(default_factory=StateBytes)
    """By an offload to `nvme`."""


def count_states(rank: RankSlice) -> RankStates:
    """Return what a rank holds between two steps, and of gradients right before one."""
    if rank.resolved.deepspeed is None or rank.stage == 0:
        return _whole(rank)
    if rank.stage == 3:
        return _sharded(rank)
    return _partitioned(rank)


def _whole(rank: RankSlice) -> RankStates:
    """Return the states of plain PyTorch and ZeRO 0: each parameter by itself."""
    weights = sum(map(rank.bytes_of, rank.own.parameters))
    trained = sum(group.numel for group in rank.groups)
    masters = 4 * trained if rank.size == 2 else 0
    optimizer = rank.config.optimizer
    kept = sum(
        count_moment_bytes(optimizer, group.kind, p.shape, counts=True)
        for group in rank.groups
        for p in group.parameters
    )
    return RankStates(StateBytes(weights, rank.size * trained, masters, kept))


def count_moment_bytes(
    optimizer: OptimizerConfig, kind: str, shape: tuple[int, ...], size: int = 4, counts: bool = False
) -> int:
    """Return the bytes that an optimizer keeps of a tensor.

    Args:
        kind: `adamw`, `sgd`, `adafactor` or `muon`. A user's own counts as `adamw`.
        size: Bytes of a number.
        counts: Whether to add torch's count of steps, which is a tensor.
    """
    number, step = prod(shape), STEP if counts else 0
    if kind == "sgd":
        return size * number if optimizer.momentum else 0
    if kind == "muon":
        return size * number
    if kind == "adafactor":
        rows, columns = number // shape[-1], number // shape[-2] if len(shape) > 1 else 0
        return step + size * (rows + columns if len(shape) > 1 else number)
    return step + 2 * size * number


@dataclass(frozen=True)
class ZeroPartition:
    """This rank's stretch of a flat group of ZeRO 1 or 2."""

    own: int
    """Elements, with padding."""
    whole: int
    """Elements of the group, with padding."""
    touched: int
    """Elements of the parameters that have any in it."""
    missing: int
    """Elements of it that no parameter has."""

    @classmethod
    def from_group(cls, group: OptimizerGroup, sharers: int, place: int, aligned: int) -> ZeroPartition:
        """Return the stretch of one of the ranks that share a group.

        Args:
            aligned: Elements to whose multiple each parameter's start is padded.
        """
        ends, end = [], 0
        for p in group.parameters:
            start = -(-end // aligned) * aligned
            end = start + p.numel
            ends.append((start, end))
        unit = _ALIGNMENT * sharers
        own = -(-end // unit) * unit // sharers
        first, last = own * place, own * (place + 1)
        inside = [(start, end) for start, end in ends if start < last and end > first]
        filled = sum(min(end, last) - max(start, first) for start, end in inside)
        return cls(own, own * sharers, sum(end - start for start, end in inside), own - filled)


def partition_groups(rank: RankSlice) -> list[ZeroPartition]:
    """Return the stretches of each group, at ZeRO 1 and 2."""
    aligned = 16 // rank.size if rank.zero("parameter_alignment") and not rank.adds_in_fp32 else 1
    return [ZeroPartition.from_group(group, rank.sharers, rank.place, aligned) for group in rank.groups]


def _partitioned(rank: RankSlice) -> RankStates:
    """Return the states of ZeRO 1 and 2: flat groups of parameters, of which a rank steps a stretch."""
    parts = partition_groups(rank)
    frozen = sum(rank.bytes_of(p) for p in rank.own.parameters if not p.trains)
    weights = frozen + rank.size * sum(part.whole for part in parts)
    own = sum(part.own for part in parts)
    if rank.adds_in_fp32:
        trained = sum(group.numel for group in rank.groups)
        gradients = rank.size * trained + rank.summed * sum(part.whole for part in parts)
        return RankStates(StateBytes(weights, gradients, 4 * own, _flat_moments(rank, parts)))
    master = 2 if has_16bit_master_weights(rank.json) else 4
    is_compact = rank.summed == 4 and rank.size == 2  # DeepSpeed adds up in a flat stretch
    gradients = rank.summed * own if is_compact else _kept_gradients(rank, parts)
    if rank.offloads("optimizer") is None:
        return RankStates(StateBytes(weights, gradients, master * own, _flat_moments(rank, parts)))
    waiting = 0
    accumulates = rank.resolved.batch_plan.gradient_accumulation_steps > 1
    if rank.stage == 2 and accumulates and not is_compact and master == 4:
        waiting = rank.size * sum(part.touched for part in parts)
    host = StateBytes(0, master * own + waiting, master * own, _flat_moments(rank, parts))
    return RankStates(StateBytes(weights, gradients if is_compact else 0), host)


def _kept_gradients(rank: RankSlice, parts: Sequence[ZeroPartition]) -> int:
    """Return all gradients that reach into this rank's stretches, and zeros for what those lack."""
    zeros = sum(part.missing for part in parts)
    for group, part in zip(rank.groups, parts, strict=True):
        if group.parameters[0].name == STAND_IN:
            zeros += part.touched
    return rank.size * sum(part.touched for part in parts) + rank.summed * zeros


def _flat_moments(rank: RankSlice, parts: Sequence[ZeroPartition]) -> int:
    return sum(_stepped(rank, group.kind, part.own) for group, part in zip(rank.groups, parts, strict=True))


def _stepped(rank: RankSlice, kind: str, number: int, on_host: bool = True) -> int:
    """Return the bytes kept of a flat tensor. DeepSpeed's CPU Adam counts steps in a plain number.

    Args:
        on_host: Whether it is stepped there, if the optimizer is offloaded.
    """
    is_own = kind == "adamw" and rank.offloads("optimizer") is not None and on_host
    size = 2 if has_16bit_optimizer_states(rank.json) else 4
    return count_moment_bytes(rank.config.optimizer, kind, (number,), size, counts=not is_own)


def sub_groups(rank: RankSlice) -> list[tuple[str, int]]:
    """Return what ZeRO 3 steps at a time: (kind of optimizer, elements of this rank's shards).

    Parameters follow each other until they hold `sub_group_size` elements of a rank.
    """
    limit = int(rank.zero("sub_group_size", 1e9))
    found = []
    for group in rank.groups:
        shards = [shard_of(p, rank.sharers) for p in group.parameters]
        taken = 0
        if limit >= sum(shards):
            found.append((group.kind, sum(shards)))
            continue
        for index, shard in enumerate(shards):
            taken += shard
            if taken >= limit or index == len(shards) - 1:
                found.append((group.kind, taken))
                taken = 0
    return found


def shard_of(p: ParameterSpec, sharers: int) -> int:
    """Return the elements of a rank's shard."""
    return -(-p.numel // sharers)


def kept_whole(rank: RankSlice) -> list[ParameterSpec]:
    """Return what ZeRO 3 gathers once for all."""
    limit = int(rank.zero("stage3_param_persistence_threshold", _PERSISTENCE))
    most = int(rank.zero("stage3_model_persistence_threshold", 1 << 62))
    found, total = [], 0
    for p in rank.own.parameters:
        if p.numel <= limit and total + p.numel <= most:
            found.append(p)
            total += p.numel
    return found


def _sharded(rank: RankSlice) -> RankStates:
    """Return the states of ZeRO 3: each parameter in equal shards, padded."""
    shards = rank.size * sum(shard_of(p, rank.sharers) for p in rank.own.parameters)
    whole = kept_whole(rank)
    apart = {p.name for p in whole}
    gathered = sum(rank.size * rank.sharers * shard_of(p, rank.sharers) for p in whole)
    there = rank.offloads("param")
    if rank.sharers == 1 and (there is None or rank.on_cpu):
        gathered = 0  # one rank's shard is the parameter
    if (few := int(rank.zero("zero_hpz_partition_size", 1))) > 1:
        others = [p for p in rank.own.parameters if p.name not in apart]
        gathered += sum(rank.size * rank.sharers * shard_of(p, rank.sharers) // few for p in others)
    device = StateBytes(gathered + (0 if there else shards))
    host = StateBytes(shards if there else 0)
    offload = rank.offloads("optimizer")
    master = 2 if has_16bit_master_weights(rank.json) else 4
    disk, gradients = StateBytes(), 0
    groups = sub_groups(rank)
    # DeepSpeed counts sub-groups, not elements, and steps the first of them on the GPU, if there is one.
    ratio = 1.0 if rank.on_cpu else rank.zero("offload_optimizer.ratio", 1.0)
    staying = int((1 - ratio) * len(groups))
    for index, (kind, own) in enumerate(groups):
        stays = index < staying
        held = StateBytes(0, 0, master * own, _stepped(rank, kind, own, on_host=not stays))
        gradients += rank.summed * own
        if offload is None:
            device += held
        elif offload == "nvme" and master * own >= _SWAPPED:
            disk += held + StateBytes(0, master * own)
        elif stays:
            device += held + StateBytes(0, master * own)
        else:
            host += held + StateBytes(0, master * own)
    if offload is None:
        return RankStates(device + StateBytes(0, gradients), host)
    return RankStates(device, host + StateBytes(0, gradients), disk)


# Elements: below, a reduction takes its latency. In so many parts a model is reduced beside its backward.
_SMALLEST_BUCKET, _LARGEST_BUCKET, _BUCKETS = 50_000_000, 500_000_000, 8
_FLATTENED = 500_000_000  # elements that DeepSpeed copies together where it reduces after the backward
_REUSED = 1_000_000_000  # elements that ZeRO 3 looks ahead before it lets go of a gathered parameter
_PREFETCHED = 50_000_000
_NORM = 8  # bytes of an element in whose precision DeepSpeed takes an offloaded gradient's norm


@dataclass(frozen=True)
class EngineBuffers:
    """Bytes of one rank's engine beside the states. A phase's number is its most beside `always`."""

    always: int = 0
    """On the device from the start on."""
    forward: int = 0
    backward: int = 0
    """Beside the gradients that exist before the step: with those not reduced yet."""
    step: int = 0
    """With what reduces all gradients after the last backward."""
    host: int = 0
    """In the machine's memory, from the start on."""
    keeps_gradients: bool = False
    """Whether gradients exist while forwards run: of micro-batches before, or in a buffer that stays."""


def fit_bucket_size(stated: Any, num_parameters: int) -> int:
    """Return the elements of the bucket in which gradients are reduced: no more than there are.

    DeepSpeed's, of half a billion elements, is allocated whole in each step, twice with overlap_comm, and a
    model that fits into it is reduced after the backward.

    Args:
        stated: `reduce_bucket_size` of the JSON; `None`: it is left to the trainer.
    """
    chosen = min(max(num_parameters // _BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    return min(int(chosen if stated is None else stated), max(1, num_parameters))


def count_buffers(rank: RankSlice) -> EngineBuffers:
    """Return what a rank's engine takes on a device beside the states."""
    accumulates = rank.resolved.batch_plan.gradient_accumulation_steps > 1
    if rank.resolved.deepspeed is not None and rank.stage == 3:
        return _buffers_of_sharded(rank)
    if rank.resolved.deepspeed is not None and rank.stage > 0 and not rank.adds_in_fp32:
        return _buffers_of_partitioned(rank, accumulates)
    trained = sum(group.numel for group in rank.groups)
    # Kernels that are not fused need as much again of the tensor at hand.
    unfused = 3 * 4 * _largest(rank) if {group.kind for group in rank.groups} - {"adamw", "sgd"} else 0
    if rank.adds_in_fp32:  # DeepSpeed's bf16 optimizer reduces a flat fp32 copy, as it is sent
        step = (rank.summed + rank.size) * min(trained, _FLATTENED)
        return EngineBuffers(step=step, keeps_gradients=True)
    if rank.resolved.deepspeed is not None:  # ZeRO 0: reduced from a flat copy, stepped in fp32
        in_fp32 = 4 * trained if rank.size == 2 else 0
        step = max(rank.size * min(trained, _FLATTENED), in_fp32 + unfused)
        return EngineBuffers(step=step, keeps_gradients=accumulates)
    if rank.split.parallel != "ddp":
        return EngineBuffers(step=unfused, keeps_gradients=accumulates)
    # Gradients lie in DDP's buckets for good; those of earlier micro-batches beside them, until the last.
    apart = 4 * trained if accumulates else 0
    backward = apart + 4 * _largest(rank)
    return EngineBuffers(forward=apart, backward=backward, step=unfused, keeps_gradients=True)


def _largest(rank: RankSlice) -> int:
    return max((p.numel for group in rank.groups for p in group.parameters), default=0)


def _bucket(rank: RankSlice) -> int:
    staged = rank.split.pipeline_stages > 1
    number = sum(group.numel for group in rank.groups) if staged else rank.whole
    return fit_bucket_size(rank.zero("reduce_bucket_size"), number)


def _buffers_of_partitioned(rank: RankSlice, accumulates: bool) -> EngineBuffers:
    """Return those of ZeRO 1 and 2."""
    parts, size = partition_groups(rank), rank.size
    trained, largest = size * sum(group.numel for group in rank.groups), size * _largest(rank)
    kept = size * sum(part.touched for part in parts)
    is_compact = rank.summed == 4 and size == 2
    offload = rank.offloads("optimizer")
    overlaps = bool(rank.zero("overlap_comm", False)) and rank.split.pipeline_stages == 1
    bucket = _bucket(rank)
    apart = (rank.summed if rank.stage == 1 else size) * bucket * (2 if overlaps else 1)
    sent = bucket * 4 if is_compact else size * bucket * (rank.sharers > 1)
    forward, step, backward = 0, 0, apart + sent + largest
    if rank.stage == 1 and (accumulates or not overlaps):  # all gradients, until the last ones exist
        whole = trained - (0 if offload else kept)
        forward = whole if accumulates else 0
        backward = max(whole, trained + apart // (2 if overlaps else 1) + largest if overlaps else whole)
        step = trained if not overlaps and not offload else whole
    elif accumulates and not is_compact and offload is None:
        backward += kept  # this micro-batch's, before they are added
    if offload is not None:
        return EngineBuffers(
            always=largest,
            forward=forward,
            backward=backward + _NORM * _largest(rank),
            step=step,
            host=size * sum(part.own for part in parts) + largest,
            keeps_gradients=accumulates and rank.stage == 1,
        )
    # A group's flat copy, and that in fp32.
    copied = 0 if is_compact else (size + 4 if size == 2 else 4) * max(part.own for part in parts)
    return EngineBuffers(
        forward=forward, backward=backward, step=max(step, copied), keeps_gradients=accumulates
    )


def _by_block(parameters: Iterable[ParameterSpec], sharers: int = 1) -> list[int]:
    """Return the elements, padded, of each block and of each parameter outside of the blocks."""
    units: dict[str, int] = {}
    for p in parameters:
        words = p.name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), None)
        key = p.name if number is None else ".".join(words[: number + 1])
        units[key] = units.get(key, 0) + shard_of(p, sharers) * sharers
    return list(units.values()) or [0]


def _buffers_of_sharded(rank: RankSlice) -> EngineBuffers:
    """Return those of ZeRO 3, which gathers a block, or a parameter outside of the blocks, at a time."""
    size, apart = rank.size, {p.name for p in kept_whole(rank)}
    units = _by_block((p for p in rank.own.parameters if p.name not in apart), rank.sharers)
    block, together = max(units), sum(units)
    bucket = min(_bucket(rank), int(rank.zero("reduce_bucket_size", 1 << 62)))
    sent = 4 if rank.split.sequence_parallel > 1 else size  # of a gradient on its way
    prefetched = min(int(rank.zero("stage3_prefetch_bucket_size", _PREFETCHED)), together)
    reused = int(rank.zero("stage3_max_reuse_distance", _REUSED)) // 2 + block
    gathered, copied = size * min(together, reused), size * block  # the latter while it is put in place
    if rank.sharers == 1:
        prefetched = copied = 0
        if rank.offloads("param") is None or rank.on_cpu:
            gathered = 0  # one rank's shard is the parameter
    trained = max(_by_block(p for group in rank.groups for p in group.parameters))
    reduced = sent * min(bucket, trained)
    if rank.offloads("optimizer") is not None:
        reduced = max(reduced, _NORM * -(-_largest(rank) // rank.sharers))
        step = 0
    else:
        halves = size == 2 and has_16bit_master_weights(rank.json)
        each = rank.summed + (4 if rank.summed == 2 and not halves else 0)
        step = each * max((own for _, own in sub_groups(rank)), default=0)
    return EngineBuffers(
        always=sent * bucket,
        forward=gathered + copied + size * prefetched,
        backward=gathered + size * trained + reduced,
        step=step,
        host=_swapped(rank),
        keeps_gradients=True,
    )


def _swapped(rank: RankSlice) -> int:
    """Return the pinned memory through which goes what lies on a disk."""
    host = 0
    if rank.offloads("param") == "nvme":
        count = int(rank.zero("offload_param.buffer_count", 5))
        host += count * int(rank.zero("offload_param.buffer_size", 100_000_000)) * rank.size
    if rank.offloads("optimizer") == "nvme":
        count = int(rank.zero("offload_optimizer.buffer_count", 4))
        host += count * 4 * max((own for _, own in sub_groups(rank)), default=0)
    return host
