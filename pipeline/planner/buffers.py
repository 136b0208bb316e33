"""What an engine holds beside weights, gradients, optimizer state and activations: buckets, gathered
parameters, temporaries of a step. Of DeepSpeed 0.19.8; by formulas that tests hold to real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.deepspeed_check import has_half_masters
from pipeline.planner.model import Parameter
from pipeline.planner.rank import Rank
from pipeline.planner.states import kept_whole, parts_of, shard_of, sub_groups

# Elements: below, a reduction takes its latency. In so many parts a model is reduced beside its backward.
_SMALLEST_BUCKET, _LARGEST_BUCKET, _BUCKETS = 50_000_000, 500_000_000, 8
_FLATTENED = 500_000_000  # elements that DeepSpeed copies together where it reduces after the backward
_REUSED = 1_000_000_000  # elements that ZeRO 3 looks ahead before it lets go of a gathered parameter
_PREFETCHED = 50_000_000
_NORM = 8  # bytes of an element in whose precision DeepSpeed takes an offloaded gradient's norm


@dataclass(frozen=True)
class Buffers:
    """Bytes of one rank. A phase's number is the most that it holds at a time beside `always`."""

    always: int = 0
    """On the device from the start on."""
    forward: int = 0
    backward: int = 0
    """Beside the gradients that are there before the step (states.py): those not reduced yet, too."""
    step: int = 0
    """With what reduces all gradients after the last backward."""
    host: int = 0
    """In the machine's memory, from the start on."""
    keeps_gradients: bool = False
    """Whether gradients are there while forwards run: of micro-batches before, or in a buffer that stays."""


def fitted_bucket(stated: Any, num_parameters: int) -> int:
    """Elements of the bucket in which gradients are reduced: no more than there are.

    DeepSpeed's, of half a billion elements, is allocated whole in each step, twice with overlap_comm, and a
    model that fits into it is reduced after the backward.

    Args:
        stated: `reduce_bucket_size` of the JSON; None: it is left to the trainer.
    """
    chosen = min(max(num_parameters // _BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    return min(int(chosen if stated is None else stated), max(1, num_parameters))


def buffers(rank: Rank) -> Buffers:
    """What its engine takes on a device beside the states."""
    if rank.resolved.deepspeed is None:
        return _plain(rank)
    if rank.stage == 0:
        return _replicated(rank)
    if rank.stage == 3:
        return _sharded(rank)
    return _in_bf16(rank) if rank.adds_in_fp32 else _partitioned(rank)


def _accumulates(rank: Rank) -> bool:
    return rank.resolved.plan.gradient_accumulation_steps > 1


def _trained(rank: Rank) -> int:
    return sum(group.numel for group in rank.groups)


def _largest(rank: Rank) -> int:
    return max((p.numel for group in rank.groups for p in group.parameters), default=0)


def _optimizer(rank: Rank) -> int:
    """Of a step by kernels that are not fused: as much again of the tensor at hand."""
    kinds = {group.kind for group in rank.groups}
    return 3 * 4 * _largest(rank) if kinds - {"adamw", "sgd"} else 0


def _plain(rank: Rank) -> Buffers:
    largest, trained = 4 * _largest(rank), 4 * _trained(rank)
    if rank.split.parallel != "ddp":
        return Buffers(step=_optimizer(rank), keeps_gradients=_accumulates(rank))
    # Gradients lie in DDP's buckets for good; those of earlier micro-batches beside them, until the last.
    apart = trained if _accumulates(rank) else 0
    return Buffers(forward=apart, backward=apart + largest, step=_optimizer(rank), keeps_gradients=True)


def _replicated(rank: Rank) -> Buffers:
    """ZeRO 0: reduced after the last backward, from a flat copy; stepped in fp32."""
    trained = _trained(rank)
    flat = rank.size * min(trained, _FLATTENED)
    in_fp32 = 4 * trained if rank.size == 2 else 0
    step = max(flat, in_fp32 + _optimizer(rank))
    return Buffers(step=step, keeps_gradients=_accumulates(rank))


def _in_bf16(rank: Rank) -> Buffers:
    """DeepSpeed's bf16 optimizer reduces a flat fp32 copy, in the communication's precision."""
    flat = (rank.summed + rank.size) * min(_trained(rank), _FLATTENED)
    return Buffers(step=flat, keeps_gradients=True)


def _bucket(rank: Rank) -> int:
    staged = rank.split.pipeline_stages > 1
    return fitted_bucket(rank.zero("reduce_bucket_size"), _trained(rank) if staged else rank.whole)


def _overlaps(rank: Rank) -> bool:
    return bool(rank.zero("overlap_comm", False)) and rank.split.pipeline_stages == 1


def _partitioned(rank: Rank) -> Buffers:
    """ZeRO 1 and 2."""
    parts, size = parts_of(rank), rank.size
    trained, largest = size * _trained(rank), size * _largest(rank)
    kept = size * sum(part.touched for part in parts)
    is_compact = rank.summed == 4 and size == 2
    offload, overlaps, accumulates = rank.offloads("optimizer"), _overlaps(rank), _accumulates(rank)
    bucket = _bucket(rank)
    apart = (rank.summed if rank.stage == 1 else size) * bucket * (2 if overlaps else 1)
    sent = bucket * 4 if is_compact else size * bucket * (rank.sharers > 1)
    forward, step, backward = 0, 0, apart + sent + largest
    if rank.stage == 1 and (accumulates or not overlaps):  # all gradients, until the last ones are there
        whole = trained - (0 if offload else kept)
        forward = whole if accumulates else 0
        backward = max(whole, trained + apart // (2 if overlaps else 1) + largest if overlaps else whole)
        step = trained if not overlaps and not offload else whole
    elif accumulates and not is_compact and offload is None:
        backward += kept  # this micro-batch's, before they are added
    most = max(part.own for part in parts)
    if offload is not None:
        backward += _NORM * _largest(rank)
        host = size * sum(part.own for part in parts) + largest
        return Buffers(largest, forward, backward, step, host, accumulates and rank.stage == 1)
    # A group's flat copy, and that in fp32.
    copied = 0 if is_compact else (size + 4 if size == 2 else 4) * most
    return Buffers(0, forward, backward, max(step, copied), 0, accumulates)


def _blocks(rank: Rank) -> list[int]:
    """Elements that ZeRO 3 gathers at once: of a block, or of a parameter outside of the blocks."""
    apart = {p.name for p in kept_whole(rank)}
    units: dict[str, int] = {}
    for p in rank.own.parameters:
        if p.name not in apart:
            key = _unit(p)
            units[key] = units.get(key, 0) + shard_of(p, rank.sharers) * rank.sharers
    return list(units.values()) or [0]


def _unit(p: Parameter) -> str:
    words = p.name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdigit()), None)
    return p.name if number is None else ".".join(words[: number + 1])


def _sharded(rank: Rank) -> Buffers:
    """ZeRO 3."""
    size, units = rank.size, _blocks(rank)
    block = max(units)
    bucket = min(_bucket(rank), int(rank.zero("reduce_bucket_size", 1 << 62)))
    sent = 4 if rank.split.sequence_parallel > 1 else size  # of a gradient on its way
    prefetched = min(int(rank.zero("stage3_prefetch_bucket_size", _PREFETCHED)), sum(units))
    there = int(rank.zero("stage3_max_reuse_distance", _REUSED)) // 2 + block
    gathered = size * min(sum(units), there)
    if rank.sharers == 1 and (rank.offloads("param") is None or rank.on_cpu):
        gathered = prefetched = copied = 0  # one rank's shard is the parameter
    else:
        copied = size * (block if rank.sharers > 1 else 0)  # what was received, while it is put in place
    trained = max((sum(p.numel for p in each) for each in _trained_blocks(rank)), default=0)
    reduced = sent * min(bucket, trained)
    if rank.offloads("optimizer") is not None:
        reduced = max(reduced, _NORM * -(-_largest(rank) // rank.sharers))
        step = 0
    else:
        most = max((each.own for each in sub_groups(rank)), default=0)
        step = (rank.summed + (4 if rank.summed == 2 else 0)) * most
        if size == 2 and has_half_masters(rank.json):
            step = rank.summed * most
    backward = gathered + size * trained + reduced
    forward = gathered + copied + size * (prefetched if rank.sharers > 1 else 0)
    always = sent * bucket
    return Buffers(always, forward, backward, step, _swapped(rank), True)


def _trained_blocks(rank: Rank) -> list[list[Parameter]]:
    found: dict[str, list[Parameter]] = {}
    for group in rank.groups:
        for p in group.parameters:
            found.setdefault(_unit(p), []).append(p)
    return list(found.values())


def _swapped(rank: Rank) -> int:
    """Pinned memory through which goes what lies on a disk."""
    host = 0
    if rank.offloads("param") == "nvme":
        count = int(rank.zero("offload_param.buffer_count", 5))
        host += count * int(rank.zero("offload_param.buffer_size", 100_000_000)) * rank.size
    if rank.offloads("optimizer") == "nvme":
        count = int(rank.zero("offload_optimizer.buffer_count", 4))
        host += count * 4 * max((each.own for each in sub_groups(rank)), default=0)
    return host
