"""The memory of a rank in named parts, and its peak as the most over the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.planning.activations import Activations, activations_of
from pipeline.planning.buffers import Buffers
from pipeline.planning.loss import LossBytes, loss_bytes
from pipeline.planning.model import Dimensions, Model
from pipeline.planning.saving import copy_bytes
from pipeline.planning.states import States
from pipeline.planning.work import Work

MIB = 2**20
# What a process takes before there is a model: Python with torch, DeepSpeed and transformers on the host; a
# CUDA context with its libraries on a GPU.
PROCESS = {"cpu": 496 * MIB, "cuda": 890 * MIB, "host": 3 * 1024 * MIB}
DEEPSPEED, PEFT = 122 * MIB, 50 * MIB  # modules that are imported besides, and their buffers, on a CPU
NCCL = 300 * MIB  # of a rank on a GPU that has peers
# Of what comes and goes in a step, what torch's allocator holds more: published runs (docs/planning.md). The
# second: with which none of those that ran out of memory would have fitted; then of runs that are cut by
# tensors or stages, and the share of a GPU that these may take.
RESERVED, FRAGMENTS, CUT_FRAGMENTS, CUT_SHARE = 0.11, 0.165, 0.25, 0.91
MAPPED = 32 * MIB  # from this size on glibc maps a block of its own: engine/host_memory.py
# What its heap holds more, of what comes and goes in pieces below that: of activations kept, of what blocks
# need that recompute, and of gradients, which are added to others where micro-batches accumulate.
HOLES, RECOMPUTED_HOLES, GRADIENT_HOLES = 0.23, 0.36, 0.52
EMBEDDINGS = ("embed_tokens", "wte", "lm_head", "embed_out", "embed_in")


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
    """and to an output layer of its own."""
    block: float
    """Bytes of the largest gradient of a block, for as long as it is added to one that is there."""


def peak_by_phase(work: Work, model: Model, states: States, buffers: Buffers) -> dict[str, float]:
    """Bytes of tensors on the rank's device."""
    dimensions = model.dimensions
    held = states.device
    fixed = held.weights + held.masters + held.moments + buffers.always + batch_bytes(work)
    phases = {"step": float(fixed + held.gradients + buffers.step)}
    if dimensions is None or (found := activations_of(work, dimensions)) is None:
        return phases
    loss = loss_of(work, model, dimensions)
    shares = _shares(work, model, dimensions)
    known = _Fixed(fixed, held.gradients, buffers.keeps_gradients, *shares)
    return phases | _forward(work, known, buffers, found, loss) | _backward(work, known, buffers, found, loss)


def batch_bytes(work: Work) -> int:
    """Ids, labels and positions of a step; on a GPU the next step's besides."""
    entries = 3 if work.apart else 2
    return 8 * entries * work.rows * work.length * work.micro_batches * (2 if work.device == "cuda" else 1)


def loss_of(work: Work, model: Model, dimensions: Dimensions) -> LossBytes:
    """What the output layer takes; on a rank of its own where there are stages."""
    ends = [p for p in model.parameters if p.name.endswith(EMBEDDING_WEIGHTS)]
    trained = not ends or ends[-1].trains  # a tied one stands once
    return loss_bytes(work, dimensions.hidden, dimensions.vocabulary // work.tensor, trained)


EMBEDDING_WEIGHTS = tuple(f"{name}.weight" for name in EMBEDDINGS)


def _shares(work: Work, model: Model, dimensions: Dimensions) -> tuple[float, float, float]:
    ends = [p for p in model.parameters if p.trains and p.name.endswith(EMBEDDING_WEIGHTS)]
    trained = max(1, model.trained)
    first = ends[0].numel / trained if ends else 0.0
    last = 0.0 if dimensions.tied else sum(p.numel for p in ends[1:]) / trained
    largest = max((p.numel for p in model.parameters if p.trains and p not in ends), default=0)
    return first, last, float(largest * work.holds_in)


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
    share = 1.0 - fixed.embedding - fixed.head
    # One that is added to one that is there; engines with buckets count it with these.
    extra = fixed.block if fixed.from_start and not buffers.backward else 0.0
    before = found.before + kept
    if work.is_last:
        before += found.of_loss + loss.backward
    most = before + (fixed.gradients if fixed.from_start else 0.0)
    # A tied weight's gradient of the output layer waits for that of the embedding.
    waiting = fixed.gradients * (fixed.head or fixed.embedding)
    last = 0.0
    for done, block in enumerate(reversed(found.blocks)):
        there = waiting + fixed.gradients * share * done / len(found.blocks)
        if fixed.from_start:
            there = fixed.gradients + extra + (0.0 if fixed.head else waiting)
        last = there + found.carried + kept + block.backward
        most = max(most, last)
        kept -= block.kept_backward
    embedding = fixed.gradients * fixed.embedding
    twice = embedding if fixed.from_start or not fixed.head else 0.0
    most = max(most, fixed.gradients + twice + found.carried)
    others = (work.in_flight - 1) * sum(block.kept_backward for block in found.blocks)
    return {"backward": fixed.held + others + most + buffers.backward}


def memory_of(
    model: Model, config: RunConfig, resolved: Resolved, kind: str, states: States, buffers: Buffers
) -> Memory:
    """Of a rank with these states; with pipeline stages of the fuller one of the first and the last.

    Args:
        model: The whole one.
        kind: Of the device: `cpu` or `cuda`.
    """
    dimensions = model.dimensions
    work = Work.of(config, resolved, model, kind)
    held = states.device
    parts = {
        "parameters": float(held.weights),
        "gradients": float(held.gradients),
        "optimizer": float(held.masters + held.moments),
        "buffers": float(buffers.always + max(buffers.forward, buffers.backward)),
        "step": float(buffers.step),
    }
    phases = {"step": float(held.weights + held.gradients + held.masters + held.moments)}
    phases["step"] += buffers.always + buffers.step
    found, fullest, offloaded = None, None, 0.0
    if work is not None and dimensions is not None:
        stages = {0, work.stages - 1}
        works = [replace(work, stage=stage) for stage in sorted(stages)]
        every = [peak_by_phase(each, model, states, buffers) for each in works]
        phases = max(every, key=lambda each: max(each.values()))
        fullest = works[every.index(phases)]
        found = activations_of(fullest, dimensions)
        if found is not None:
            parts |= _named(fullest, found, loss_of(fullest, model, dimensions))
            offloaded = found.host
    elif model.trial is not None:
        parts["activations"] = _tried(model, resolved)
        phases["backward"] = held.total + buffers.always + buffers.backward + parts["activations"]
    moving = max(phases.values()) - held.weights - held.masters - held.moments
    framework, spare, share = float(PROCESS[kind]), 0.0, 1.0
    if kind == "cuda":
        is_cut = resolved.split.tensor_parallel * resolved.split.pipeline_stages > 1
        framework += NCCL * (resolved.split.world_size > 1) + RESERVED * moving
        spare = ((CUT_FRAGMENTS if is_cut else FRAGMENTS) - RESERVED) * moving
        share = CUT_SHARE if is_cut else 1.0
    else:
        framework += DEEPSPEED * (resolved.deepspeed is not None) + PEFT * (config.adapter is not None)
        framework += left_by_allocator(fullest, model, found)
    on_host = states.host
    host = on_host.weights + on_host.gradients + on_host.masters + on_host.moments + buffers.host + offloaded
    phases = {name: size + framework for name, size in phases.items()}
    copy = copy_bytes(model, config, resolved)
    if kind == "cpu":
        phases = {name: size + host + copy for name, size in phases.items()}
        host = max(phases.values()) - copy
        parts["checkpoint"] = copy
    else:
        host += PROCESS["host"]
    is_known = found is not None or model.trial is not None
    again = None if found is None else sum(each.recomputes for each in found.blocks) / len(found.blocks)
    upper = "" if found is None else found.upper
    parts["framework"] = framework
    return Memory(parts, phases, framework, host, is_known, spare, share, again, copy, upper)


def _tried(model: Model, resolved: Resolved) -> float:
    """Of a module that no formula knows."""
    assert model.trial is not None
    size = 1.0 if resolved.split.precision == "fp32" else 0.5
    return size * (model.trial.fixed + resolved.plan.micro_batch_size * model.trial.a_row)


def left_by_allocator(work: Work | None, model: Model, found: Activations | None) -> float:
    """What is held on a CPU beside tensors, of memory that others had before.

    glibc's heap has holes where tensors were, as what outlives them came to lie in between. Fitted to 28 runs
    of 5 to 38 million parameters, of four families, with and without DeepSpeed: within 7 %, mostly 3.
    """
    if work is None or found is None:
        return 0.0
    small = [p.numel * work.holds_in for p in model.parameters if p.trains]
    held = GRADIENT_HOLES * sum(size for size in small if size < MAPPED) * min(2, work.micro_batches)
    if found.before >= MAPPED:
        return held
    held += HOLES * sum(block.kept for block in found.blocks)
    if work.recompute.mode != "none":
        again = (b.backward for b in found.blocks if b.recomputes or work.selective)
        held += RECOMPUTED_HOLES * sum(again)
    return held


def _named(work: Work, found: Activations, loss: LossBytes) -> dict[str, float]:
    """Activations and loss, each at its own most."""
    kept = found.before + work.in_flight * sum(block.kept for block in found.blocks)
    inside = max(max(block.forward, block.backward) for block in found.blocks)
    taken = {"activations": kept, "recomputed": inside, "batch": float(batch_bytes(work))}
    return taken | ({"loss": found.of_loss + max(loss.forward, loss.backward)} if work.is_last else {})
