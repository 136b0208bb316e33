"""Weights, gradients, optimizer state and checkpoints of one rank, exact to the byte, under any split.

How DeepSpeed (0.19.8) pads and keeps them. What an engine holds beside them is in buffers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from pipeline.config.deepspeed_check import has_half_masters, has_half_states
from pipeline.config.interval import Interval
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.patterns import group_keys, kind_of
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.planner.model import Model, Parameter
from pipeline.planner.rank import STAND_IN, Group, Rank


def checkpoint_bytes(model: Model, config: RunConfig, resolved: Resolved) -> int:
    """Of one checkpoint, in which all is as it is held: the weights that the optimizer steps and what it
    keeps of them, and what is frozen in the run's precision. An adapter's base is in none.
    """
    optimizer, has_base, json = config.optimizer, config.adapter is not None, resolved.deepspeed or {}
    stepped, kept = 2 if has_half_masters(json) else 4, 2 if has_half_states(json) else 4
    frozen = 4 if resolved.deepspeed is None or resolved.split.precision == "fp32" else 2
    keys = group_keys({p.name: len(p.shape) for p in model.parameters if p.trains}, optimizer)
    return sum(
        stepped * p.numel + moments(optimizer, kind_of(keys[p.name], optimizer), p.shape, kept)
        if p.trains
        else 0
        if has_base
        else frozen * p.numel
        for p in model.parameters
    )


def copy_bytes(model: Model, config: RunConfig, resolved: Resolved) -> float:
    """Of a rank's share of it in host memory, where a save comes before the last step: that is waited for."""
    saves, steps = config.checkpoint, config.max_steps
    every = Interval.of(saves.every).in_steps(None)  # None: in epochs, of which some may end before the run
    is_taken = every is None or (every > 0 and (steps is None or every < steps))
    if not is_taken and saves.every_minutes == 0:
        return 0.0
    return checkpoint_bytes(model, config, resolved) / resolved.split.world_size


STEP = 4  # bytes of torch's count of steps
_ALIGNMENT = 2  # elements a rank to which DeepSpeed pads a flat group
_PERSISTENCE = 100_000  # elements that DeepSpeed keeps whole where a JSON says nothing
_SWAPPED = 1 << 20  # bytes; what is smaller does not go to disk


@dataclass(frozen=True)
class Held:
    """Bytes in one kind of memory."""

    weights: int = 0
    """What forward and backward compute with, a frozen base and what hpZ holds twice too."""
    gradients: int = 0
    """Right before a step."""
    masters: int = 0
    """The copies that the optimizer steps, where those are not the weights."""
    moments: int = 0
    """What the optimizer keeps of each: means, squares, its count of steps."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.masters + self.moments

    def __add__(self, other: Held) -> Held:
        return Held(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.moments + other.moments,
        )


@dataclass(frozen=True)
class States:
    """Of one rank, from its first step on."""

    device: Held = field(default_factory=Held)
    """On the GPU; of a rank on a CPU the memory that it computes in."""
    host: Held = field(default_factory=Held)
    """In the machine's memory, by an offload to `cpu`."""
    disk: Held = field(default_factory=Held)
    """By an offload to `nvme`."""


def states(
    model: Model, config: RunConfig, resolved: Resolved, rank: int = 0, on_cpu: bool = False
) -> States:
    """What a rank holds between two steps, and of gradients right before one.

    Args:
        model: The whole one, with its adapters.
        rank: Of the job.
        on_cpu: The ranks compute on CPUs.

    Raises:
        ConfigError, ModelError: the model cannot be cut so, or nothing of it is trained.
    """
    return states_of(Rank.of(model, config, resolved, rank, on_cpu))


def states_of(rank: Rank) -> States:
    """See `states`."""
    if rank.resolved.deepspeed is None or rank.stage == 0:
        return _whole(rank)
    if rank.stage == 3:
        return _sharded(rank)
    return _partitioned(rank)


def _whole(rank: Rank) -> States:
    """Plain PyTorch and ZeRO 0: each parameter by itself."""
    weights = sum(map(rank.bytes_of, rank.own.parameters))
    trained = sum(group.numel for group in rank.groups)
    masters = 4 * trained if rank.size == 2 else 0
    optimizer = rank.config.optimizer
    kept = sum(
        moments(optimizer, group.kind, p.shape, counts=True)
        for group in rank.groups
        for p in group.parameters
    )
    return States(Held(weights, rank.size * trained, masters, kept))


def moments(
    optimizer: OptimizerConfig, kind: str, shape: tuple[int, ...], size: int = 4, counts: bool = False
) -> int:
    """Bytes that an optimizer keeps of a tensor.

    Args:
        kind: What steps it: `adamw`, `sgd`, `adafactor` or `muon`. A user's own counts as `adamw`.
        size: Of a number.
        counts: With torch's count of steps, which is a tensor.
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
class Part:
    """This rank's stretch of a flat group of ZeRO 1 or 2."""

    whole: int
    """Elements of the group, padded."""
    own: int
    touched: int
    """Of parameters that have any element in it, all of theirs."""
    missing: int
    """Elements of it that no parameter has."""

    @classmethod
    def of(cls, group: Group, sharers: int, place: int, align: Callable[[int], int] = lambda n: n) -> Part:
        ends, at = [], 0
        for p in group.parameters:
            start = align(at)
            ends.append((start, start + p.numel))
            at = start + p.numel
        unit = _ALIGNMENT * sharers
        own = -(-at // unit) * unit // sharers
        first, last = own * place, own * (place + 1)
        inside = [(max(a, first), min(b, last), b - a) for a, b in ends if a < last and b > first]
        return cls(own * sharers, own, sum(n for *_, n in inside), own - sum(b - a for a, b, _ in inside))


def parts_of(rank: Rank) -> list[Part]:
    """Of each group, at ZeRO 1 and 2."""
    unit = 16 // rank.size if rank.zero("parameter_alignment") and not rank.adds_in_fp32 else 1
    return [Part.of(g, rank.sharers, rank.place, lambda n: -(-n // unit) * unit) for g in rank.groups]


def _partitioned(rank: Rank) -> States:
    """ZeRO 1 and 2: trained parameters in flat groups, of which a rank steps a stretch."""
    parts = parts_of(rank)
    frozen = sum(rank.bytes_of(p) for p in rank.own.parameters if not p.trains)
    weights = frozen + rank.size * sum(part.whole for part in parts)
    own = sum(part.own for part in parts)
    if rank.adds_in_fp32:
        trained = sum(group.numel for group in rank.groups)
        gradients = rank.size * trained + rank.summed * sum(part.whole for part in parts)
        return States(Held(weights, gradients, 4 * own, _flat_moments(rank, parts)))
    master = 2 if has_half_masters(rank.json) else 4
    is_compact = rank.summed == 4 and rank.size == 2  # DeepSpeed adds up in a flat stretch
    gradients = rank.summed * own if is_compact else _kept_gradients(rank, parts)
    if rank.offloads("optimizer") is None:
        return States(Held(weights, gradients, master * own, _flat_moments(rank, parts)))
    waiting = 0
    accumulates = rank.resolved.plan.gradient_accumulation_steps > 1
    if rank.stage == 2 and accumulates and not is_compact and master == 4:
        waiting = rank.size * sum(part.touched for part in parts)
    host = Held(0, master * own + waiting, master * own, _flat_moments(rank, parts))
    return States(Held(weights, gradients if is_compact else 0), host)


def _kept_gradients(rank: Rank, parts: Sequence[Part]) -> int:
    """All of the gradients that reach into this rank's stretches, and zeros where those have nothing."""
    zeros = sum(part.missing for part in parts)
    for group, part in zip(rank.groups, parts, strict=True):
        if group.parameters[0].name == STAND_IN:
            zeros += part.touched
    return rank.size * sum(part.touched for part in parts) + rank.summed * zeros


def _flat_moments(rank: Rank, parts: Sequence[Part]) -> int:
    return sum(_stepped(rank, group.kind, part.own) for group, part in zip(rank.groups, parts, strict=True))


def _stepped(rank: Rank, kind: str, number: int, in_memory: bool = True) -> int:
    """Bytes kept of a flat tensor. DeepSpeed's CPU Adam counts steps in a plain number."""
    is_own = kind == "adamw" and rank.offloads("optimizer") is not None and in_memory
    size = 2 if has_half_states(rank.json) else 4
    return moments(rank.config.optimizer, kind, (number,), size, counts=not is_own)


@dataclass(frozen=True)
class SubGroup:
    """What ZeRO 3 steps at a time."""

    kind: str
    own: int
    """Elements of this rank's shards."""


def sub_groups(rank: Rank) -> list[SubGroup]:
    """Of ZeRO 3: parameters in a row until they hold `sub_group_size` elements of a rank."""
    limit = int(rank.zero("sub_group_size", 1e9))
    found = []
    for group in rank.groups:
        shards = [shard_of(p, rank.sharers) for p in group.parameters]
        taken = 0
        if limit >= sum(shards):
            found.append(SubGroup(group.kind, sum(shards)))
            continue
        for index, shard in enumerate(shards):
            taken += shard
            if taken >= limit or index == len(shards) - 1:
                found.append(SubGroup(group.kind, taken))
                taken = 0
    return found


def shard_of(p: Parameter, sharers: int) -> int:
    """Elements of a rank's shard."""
    return -(-p.numel // sharers)


def kept_whole(rank: Rank) -> list[Parameter]:
    """What ZeRO 3 gathers once for all."""
    limit = int(rank.zero("stage3_param_persistence_threshold", _PERSISTENCE))
    most = int(rank.zero("stage3_model_persistence_threshold", 1 << 62))
    found, total = [], 0
    for p in rank.own.parameters:
        if p.numel <= limit and total + p.numel <= most:
            found.append(p)
            total += p.numel
    return found


def _sharded(rank: Rank) -> States:
    """ZeRO 3: each parameter in equal shards, padded."""
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
    device = Held(gathered + (0 if there else shards))
    host = Held(shards if there else 0)
    stepped, offload = sub_groups(rank), rank.offloads("optimizer")
    own = sum(each.own for each in stepped)
    if offload is None:
        master = 2 if has_half_masters(rank.json) else 4
        kept = sum(_stepped(rank, each.kind, each.own) for each in stepped)
        return States(device + Held(0, rank.summed * own, master * own, kept), host)
    on_device, in_host, on_disk = _offloaded(rank, stepped, offload)
    return States(device + on_device, host + in_host + Held(0, rank.summed * own), on_disk)


def _offloaded(rank: Rank, stepped: Sequence[SubGroup], offload: str) -> tuple[Held, Held, Held]:
    """Of sub-groups whose state is elsewhere: (on the device, in host memory, on disk)."""
    master = 2 if has_half_masters(rank.json) else 4
    staying = int((1 - float(rank.zero("offload_optimizer.ratio", 1.0))) * len(stepped))
    device = host = disk = Held()
    for index, each in enumerate(stepped):
        kept = _stepped(rank, each.kind, each.own, in_memory=index >= staying)
        held = Held(0, master * each.own, master * each.own, kept)
        if offload == "nvme" and master * each.own >= _SWAPPED:
            disk += held
        elif index < staying and offload == "cpu":
            device += held
        else:
            host += held
    return device, host, disk
