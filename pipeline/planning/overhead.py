"""What a process takes beside its tensors: its libraries, and what allocators keep of freed memory."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.files import GIB, MIB
from pipeline.planning.activations import Activations
from pipeline.planning.model import Model
from pipeline.planning.work import Work

# What a process takes before there is a model: Python with torch, DeepSpeed and transformers on the host; a
# CUDA context with its libraries on a GPU.
PROCESS = {"cpu": 496 * MIB, "cuda": 890 * MIB, "host": 3 * GIB}
DEEPSPEED, PEFT = 122 * MIB, 50 * MIB  # modules that are imported besides, and their buffers, on a CPU
NCCL = 300 * MIB  # of a rank on a GPU that has peers
# Of what comes and goes in a step, what torch's allocator holds more: published runs (docs/planning.md). The
# second: with which none of those that ran out of memory would have fitted; then of runs that are cut by
# tensors or stages, and the share of a GPU that these may take.
RESERVED, FRAGMENTS, CUT_FRAGMENTS, CUT_SHARE = 0.11, 0.165, 0.25, 0.91
MAPPED = 32 * MIB  # from this size on glibc maps a block of its own: engine/memory.py
# What its heap holds more, of what comes and goes in pieces below that: of activations kept, of what blocks
# need that recompute, and of gradients, which are added to others where micro-batches accumulate.
HOLES, RECOMPUTED_HOLES, GRADIENT_HOLES = 0.23, 0.36, 0.52


@dataclass(frozen=True)
class Room:
    """Bytes that a rank on a device takes, and has to have, beside its tensors."""

    framework: float
    spare: float = 0.0
    """What has to be free besides: freed pieces of memory do not always fit together."""
    share: float = 1.0
    """Of the device, that the run may take."""


def room_of(kind: str, config: RunConfig, resolved: Resolved, moving: float) -> Room:
    """Without what a CPU's allocator keeps.

    Args:
        kind: Of the device: `cpu` or `cuda`.
        moving: Bytes that come and go in a step.
    """
    framework, split = float(PROCESS[kind]), resolved.split
    if kind == "cpu":
        framework += DEEPSPEED * (resolved.deepspeed is not None) + PEFT * (config.adapter is not None)
        return Room(framework)
    is_cut = split.tensor_parallel * split.pipeline_stages > 1
    framework += NCCL * (split.world_size > 1) + RESERVED * moving
    spare = ((CUT_FRAGMENTS if is_cut else FRAGMENTS) - RESERVED) * moving
    return Room(framework, spare, CUT_SHARE if is_cut else 1.0)


def left_on_cpu(work: Work | None, own: Model, found: Activations | None) -> float:
    """What its allocator holds beside tensors, of memory that others had before.

    glibc's heap has holes where tensors were, as what outlives them came to lie in between. Fitted to 28 runs
    of 5 to 38 million parameters, of four families, with and without DeepSpeed: within 7 %, mostly 3.
    """
    if work is None or found is None:
        return 0.0
    small = [p.numel * work.holds_in for p in own.parameters if p.trains]
    held = GRADIENT_HOLES * sum(size for size in small if size < MAPPED) * min(2, work.micro_batches)
    if found.before >= MAPPED:
        return held
    held += HOLES * sum(block.kept for block in found.blocks)
    if work.recompute.mode != "none":
        again = (b.backward for b in found.blocks if b.recomputes or work.selective)
        held += RECOMPUTED_HOLES * sum(again)
    return held
