"""Memory of a rank in named parts, and its peak over the phases of a step.

Overhead is what libraries and allocators hold beside tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.files import GIB, MIB
from pipeline.planner.activations import Activations, LossBytes, Work, activations_of, loss_bytes
from pipeline.planner.model import Dimensions, Model, Trial
from pipeline.planner.rank import EMBEDDINGS, WORDS
from pipeline.planner.states import Buffers, States, copy_bytes

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


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    parts: dict[str, float]
    """By name, each at its own most: together more than the peak."""
    phases: dict[str, float]
    """The most of all parts in each."""
    framework: float
    """Of it, what a process takes beside its tensors."""
    host: float
    """In the machine's memory beside the device; of a rank on a CPU all of it."""
    is_complete: bool
    """Whether what activations take is known."""
    spare: float = 0.0
    """What has to be free besides: freed pieces of memory do not always fit together."""
    share: float = 1.0
    """Of the device, that the run may take."""
    recomputed: float | None = None
    """Part of the blocks that recompute; None: not known."""
    copy: float = 0.0
    """In the machine's memory, of a checkpoint that is written beside training, where there is room for it;
    on a CPU it is among the parts and phases."""
    upper: str = ""
    """Why activations are more than will be taken; empty: they are not."""
    stage: int = 0
    """Of a pipeline the one whose ranks these are."""

    @property
    def peak(self) -> float:
        """The most of any phase, on the rank's device."""
        return max(self.phases.values())

    @property
    def allocated(self) -> float:
        """The same, of tensors alone."""
        return self.peak - self.framework

    @property
    def at(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=self.phases.__getitem__)


@dataclass(frozen=True)
class Holding:
    """What a rank has whatever its rows and what recomputes: of a pipeline the first one of a stage."""

    own: Model
    states: States
    buffers: Buffers


@dataclass(frozen=True)
class _Fixed:
    """What does not change within a micro-batch."""

    held: float
    gradients: float
    """Of a whole step."""
    from_start: bool
    """Whether they are there when a forward begins."""
    embedding: float
    """Their share that belongs to the input embedding,"""
    head: float
    """and to the output layer,"""
    is_tied: bool
    """which is the same one where they are tied, and trained."""
    block: float
    """Bytes of the largest gradient of a block, for as long as it is added to one that is there."""


def peak_by_phase(work: Work, own: Model, states: States, buffers: Buffers) -> dict[str, float]:
    """Bytes of tensors on the rank's device.

    Args:
        own: What the rank has of the model.
    """
    dimensions = own.dimensions
    held = states.device
    fixed = held.weights + held.masters + held.moments + buffers.always + batch_bytes(work)
    fixed += handed_bytes(work, dimensions)
    phases = {"step": float(fixed + held.gradients + buffers.step)}
    if dimensions is None or (found := activations_of(work, dimensions)) is None:
        return phases
    loss = loss_of(work, own, dimensions)
    known = _Fixed(fixed, held.gradients, buffers.keeps_gradients, *_shares(work, own, dimensions))
    return phases | _forward(work, known, buffers, found, loss) | _backward(work, known, buffers, found, loss)


def batch_bytes(work: Work) -> int:
    """Ids, labels and positions of a step; on a GPU the next step's besides."""
    entries = 3 if work.apart else 2
    return 8 * entries * work.rows * work.length * work.micro_batches * (2 if work.device == "cuda" else 1)


def handed_bytes(work: Work, dimensions: Dimensions | None) -> int:
    """Hidden states from the stage before of every micro-batch on its way, the gradient of one, and what both
    neighbours' are received into. The last loss still has those of its micro-batch.
    """
    if work.stages == 1 or dimensions is None:
        return 0
    of_before = min(work.micro_batches, max(2, work.in_flight)) + 2 if work.stage else 0
    return work.computes_in * work.tokens * dimensions.hidden * (of_before + (2 if work.is_last else 1))


def loss_of(work: Work, own: Model, dimensions: Dimensions) -> LossBytes:
    """What the output layer takes; on a rank of its own where there are stages."""
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDINGS)]
    trained = not ends or ends[-1].trains  # a tied one stands once
    return loss_bytes(work, dimensions.hidden, dimensions.vocabulary // work.tensor, trained)


def _shares(work: Work, own: Model, dimensions: Dimensions) -> tuple[float, float, bool, float]:
    """Of gradients, as _Fixed has them. What a last stage has of tied ones is its output layer."""
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDINGS)]
    first = [p for p in ends if p.name.endswith(WORDS) and work.stage == 0]
    is_tied = dimensions.tied and work.stages == 1 and any(p.trains for p in first)
    last = first if is_tied else [p for p in ends if p not in first]
    trained = max(1, own.trained)
    embedding, head = (sum(p.numel for p in each if p.trains) / trained for each in (first, last))
    largest = max((p.numel for p in own.parameters if p.trains and p not in ends), default=0)
    return embedding, head, is_tied, float(largest * work.holds_in)


def _forward(
    work: Work, fixed: _Fixed, buffers: Buffers, found: Activations, loss: LossBytes
) -> dict[str, float]:
    held = fixed.held + (fixed.gradients if fixed.from_start else 0.0)
    # Of micro-batches that wait for their backward.
    waiting = (work.in_flight - 1) * sum(block.kept_backward for block in found.blocks)
    live, most = found.before, found.start
    for block in found.blocks:
        most = max(most, live + block.forward)
        live += block.kept
    phases = {"forward": held + waiting + most + buffers.forward}
    if work.is_last:
        most = max(most, live + found.end)
        phases["forward"] = held + waiting + most + buffers.forward
        phases["loss"] = held + waiting + live + found.of_loss + loss.forward + buffers.forward
    return phases


def _backward(
    work: Work, fixed: _Fixed, buffers: Buffers, found: Activations, loss: LossBytes
) -> dict[str, float]:
    kept = sum(block.kept_backward for block in found.blocks)
    share = 1.0 - fixed.head - (0.0 if fixed.is_tied else fixed.embedding)
    # One that is added to one that is there; engines with buckets count it with these.
    extra = fixed.block if fixed.from_start and not buffers.backward else 0.0
    before = found.before + kept
    if work.is_last:
        before += found.of_loss + loss.backward
    most = before + (fixed.gradients if fixed.from_start else 0.0)
    # A tied weight's gradient of the output layer waits for that of the embedding.
    waiting = fixed.gradients * fixed.head
    last = 0.0
    for done, block in enumerate(reversed(found.blocks)):
        there = waiting + fixed.gradients * share * done / len(found.blocks)
        if fixed.from_start:
            there = fixed.gradients + extra + (waiting if fixed.is_tied else 0.0)
        last = there + found.carried + kept + block.backward
        most = max(most, last)
        kept -= block.kept_backward
    embedding = fixed.gradients * fixed.embedding
    # Added to one that is there; of tied ones both, before their sum.
    added = embedding * (fixed.from_start + 2 * fixed.is_tied)
    most = max(most, fixed.gradients + added + found.carried)
    others = (work.in_flight - 1) * sum(block.kept_backward for block in found.blocks)
    return {"backward": fixed.held + others + most + buffers.backward}


def memory_of(
    model: Model, config: RunConfig, resolved: Resolved, kind: str, holdings: Sequence[Holding]
) -> Memory:
    """Of the fullest rank.

    Args:
        model: The whole one.
        kind: Of the device: `cpu` or `cuda`.
        holdings: A rank's of each pipeline stage, in their order; of a model that is not in stages one.
    """
    copy = copy_bytes(model, config, resolved)
    every = [
        _of_stage(each, config, resolved=resolved, kind=kind, copy=copy, stage=stage)
        for stage, each in enumerate(holdings)
    ]
    fullest = max(every, key=lambda each: each.peak + each.spare)
    return replace(fullest, host=max(each.host for each in every))


def _of_stage(
    holding: Holding, config: RunConfig, resolved: Resolved, kind: str, copy: float, stage: int
) -> Memory:
    own, buffers, held = holding.own, holding.buffers, holding.states.device
    work = Work.of(config, resolved, own, kind, stage)
    parts = {
        "parameters": float(held.weights),
        "gradients": float(held.gradients),
        "optimizer": float(held.masters + held.moments),
        "buffers": float(buffers.always + max(buffers.forward, buffers.backward)),
        "step": float(buffers.step),
    }
    phases = {"step": float(held.total + buffers.always + buffers.step)}
    found, offloaded = None, 0.0
    if work is not None and own.dimensions is not None:
        phases = peak_by_phase(work, own, holding.states, buffers)
        parts["buffers"] += handed_bytes(work, own.dimensions)
        found = activations_of(work, own.dimensions)
        if found is not None:
            parts |= _named(work, found, loss_of(work, own, own.dimensions))
            offloaded = work.in_flight * found.host
    elif own.trial is not None:
        parts["activations"] = _tried(own.trial, resolved)
        phases["backward"] = held.total + buffers.always + buffers.backward + parts["activations"]
    moving = max(phases.values()) - held.weights - held.masters - held.moments
    room = room_of(kind, config, resolved, moving)
    framework = room.framework + (left_on_cpu(work, own, found) if kind == "cpu" else 0.0)
    host = holding.states.host.total + buffers.host + offloaded
    phases = {name: size + framework for name, size in phases.items()}
    if kind == "cpu":
        phases = {name: size + host + copy for name, size in phases.items()}
        host = max(phases.values()) - copy
        parts["checkpoint"] = copy
    else:
        host += PROCESS["host"]
    is_known = found is not None or own.trial is not None
    again = None if found is None else sum(each.recomputes for each in found.blocks) / len(found.blocks)
    upper = "" if found is None else found.upper
    parts["framework"] = framework
    return Memory(
        parts=parts,
        phases=phases,
        framework=framework,
        host=host,
        is_complete=is_known,
        spare=room.spare,
        share=room.share,
        recomputed=again,
        copy=copy,
        upper=upper,
        stage=stage,
    )


def _tried(trial: Trial, resolved: Resolved) -> float:
    """Of a module that no formula knows."""
    size = 1.0 if resolved.split.precision == "fp32" else 0.5
    return size * (trial.fixed + resolved.plan.micro_batch_size * trial.a_row)


def _named(work: Work, found: Activations, loss: LossBytes) -> dict[str, float]:
    """Activations and loss, each at its own most."""
    kept = found.before + work.in_flight * sum(block.kept for block in found.blocks)
    inside = max(max(block.forward, block.backward) for block in found.blocks)
    taken = {"activations": kept, "recomputed": inside, "batch": float(batch_bytes(work))}
    return taken | ({"loss": found.of_loss + max(loss.forward, loss.backward)} if work.is_last else {})
