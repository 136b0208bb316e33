"""Memory of a rank in named parts, and its peak over the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.files import GIB, MIB
from pipeline.planner.activations import Activations, LossBytes, Work, activations_of, loss_bytes
from pipeline.planner.model import Dimensions, Model
from pipeline.planner.rank import EMBEDDINGS, WORDS
from pipeline.planner.states import Buffers, States, copy_bytes

# What a process takes before there is a model: Python with torch, DeepSpeed and transformers on the host; a
# CUDA context with its libraries on a GPU.
PROCESS = {"cpu": 500 * MIB, "cuda": 890 * MIB, "host": 3 * GIB}
DEEPSPEED = 122 * MIB  # modules that are imported besides on a CPU, and their buffers
NCCL = 300 * MIB  # of a rank on a GPU that has peers
# Of what comes and goes in a step, what the allocator holds more (published runs, docs/planning.md). The
# second: with which none of those that ran out of memory would have fitted; then of runs that are cut by
# tensors or stages, and the share of a GPU that these may take.
RESERVED, FRAGMENTS, CUT_FRAGMENTS, CUT_SHARE = 0.11, 0.165, 0.25, 0.91


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parts: dict[str, float]
    """By name, each at its own most: together more than the peak."""
    phases: dict[str, float]
    """The most of all parts in each phase of a step."""
    framework: float
    """What a process takes of it beside its tensors."""
    host: float
    """In the machine's memory; on a CPU all of it."""
    is_complete: bool
    """Whether what activations take is known."""
    spare: float = 0.0
    """What has to be free besides: freed pieces of memory do not always fit together."""
    share: float = 1.0
    """Share of the device that the run may take."""
    recomputed: float | None = None
    """Share of the blocks that recompute; `None` if not known."""
    copy: float = 0.0
    """In the machine's memory, of a checkpoint that is written beside training, if there is room for it."""
    upper: str = ""
    """Why activations are more than will be taken; empty if they are not."""
    stage: int = 0
    """The pipeline stage whose ranks these are."""

    @property
    def peak(self) -> float:
        """The most of any phase, on the rank's device."""
        return max(self.phases.values())

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
    """Whether they exist when a forward begins."""
    embedding: float
    """Share of the gradients that belongs to the input embedding."""
    head: float
    """The same of the output layer."""
    is_tied: bool
    """Whether the two are one weight, and trained."""
    block: float
    """Bytes of the largest gradient of a block, while it is added to one that exists."""


def peak_by_phase(work: Work, own: Model, states: States, buffers: Buffers) -> dict[str, float]:
    """Return the most bytes of tensors on the rank's device in each phase.

    Args:
        own: Part of the model that the rank has.
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
    """Return the bytes of a step's ids, labels and positions; on a GPU with the next step's."""
    entries = 3 if work.apart else 2
    return 8 * entries * work.rows * work.length * work.micro_batches * (2 if work.device == "cuda" else 1)


def handed_bytes(work: Work, dimensions: Dimensions | None) -> int:
    """Return the bytes of what pipeline stages hand on.

    Hidden states from the stage before of every micro-batch on its way, the gradient of one, and what both
    neighbours' are received into. The last loss still has those of its micro-batch.
    """
    if work.stages == 1 or dimensions is None:
        return 0
    of_before = min(work.micro_batches, max(2, work.in_flight)) + 2 if work.stage else 0
    return work.computes_in * work.tokens * dimensions.hidden * (of_before + (2 if work.is_last else 1))


def loss_of(work: Work, own: Model, dimensions: Dimensions) -> LossBytes:
    """Return what the output layer takes, on a rank that has it."""
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDINGS)]
    trained = not ends or ends[-1].trains  # a tied one is listed once
    return loss_bytes(work, dimensions.hidden, dimensions.vocabulary // work.tensor, trained)


def _shares(work: Work, own: Model, dimensions: Dimensions) -> tuple[float, float, bool, float]:
    """Return the last four fields of _Fixed. What a last stage has of tied ones is its output layer."""
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
    held = fixed.held + (fixed.gradients if fixed.from_start else 0.0) + buffers.forward
    # Of micro-batches that wait for their backward.
    held += (work.in_flight - 1) * sum(block.kept_backward for block in found.blocks)
    live, most = found.before, found.start
    for block in found.blocks:
        most = max(most, live + block.forward)
        live += block.kept
    if not work.is_last:
        return {"forward": held + most}
    return {
        "forward": held + max(most, live + found.end),
        "loss": held + live + found.of_loss + loss.forward,
    }


def _backward(
    work: Work, fixed: _Fixed, buffers: Buffers, found: Activations, loss: LossBytes
) -> dict[str, float]:
    kept = sum(block.kept_backward for block in found.blocks)
    others = (work.in_flight - 1) * kept
    share = 1.0 - fixed.head - (0.0 if fixed.is_tied else fixed.embedding)
    # One that is added to one that exists; engines with buckets count it with these.
    extra = fixed.block if fixed.from_start and not buffers.backward else 0.0
    before = found.before + kept
    if work.is_last:
        before += found.of_loss + loss.backward
    most = before + (fixed.gradients if fixed.from_start else 0.0)
    # A tied weight's gradient of the output layer waits for that of the embedding.
    waiting = fixed.gradients * fixed.head
    for done, block in enumerate(reversed(found.blocks)):
        gradients = waiting + fixed.gradients * share * done / len(found.blocks)
        if fixed.from_start:
            gradients = fixed.gradients + extra + (waiting if fixed.is_tied else 0.0)
        most = max(most, gradients + found.carried + kept + block.backward)
        kept -= block.kept_backward
    # Added to one that exists; of tied ones both, before their sum.
    added = fixed.gradients * fixed.embedding * (fixed.from_start + 2 * fixed.is_tied)
    most = max(most, fixed.gradients + added + found.carried)
    return {"backward": fixed.held + others + most + buffers.backward}


def memory_of(
    model: Model, config: RunConfig, resolved: Resolved, kind: str, holdings: Sequence[Holding]
) -> Memory:
    """Return the memory of the fullest rank.

    Args:
        model: The whole one.
        kind: Of the device: `cpu` or `cuda`.
        holdings: A rank's of each pipeline stage, in their order; without stages one.
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
    own, buffers, held, split = holding.own, holding.buffers, holding.states.device, resolved.split
    work = Work.of(config, resolved, own, kind, stage)
    parts = {
        "parameters": float(held.weights),
        "gradients": float(held.gradients),
        "optimizer states": float(held.masters + held.moments),
        "buckets, gathered weights": float(buffers.always + max(buffers.forward, buffers.backward)),
        "temporaries of the step": float(buffers.step),
    }
    phases = {"step": float(held.total + buffers.always + buffers.step)}
    found, offloaded = None, 0.0
    if work is not None and own.dimensions is not None:
        phases = peak_by_phase(work, own, holding.states, buffers)
        parts["buckets, gathered weights"] += handed_bytes(work, own.dimensions)
        found = activations_of(work, own.dimensions)
        if found is not None:
            parts |= _named(work, found, loss_of(work, own, own.dimensions))
            offloaded = work.in_flight * found.host
    elif own.trial is not None:  # of a module that no formula knows
        each = own.trial.fixed + resolved.plan.micro_batch_size * own.trial.a_row
        parts["activations kept"] = each if split.precision == "fp32" else each / 2
        phases["backward"] = held.total + buffers.always + buffers.backward + parts["activations kept"]
    moving = max(phases.values()) - held.weights - held.masters - held.moments
    is_cut, on_cpu = split.tensor_parallel * split.pipeline_stages > 1, kind == "cpu"
    framework = PROCESS[kind] + RESERVED * moving
    host, spare = holding.states.host.total + buffers.host + offloaded, 0.0
    if on_cpu:
        framework += DEEPSPEED * (resolved.deepspeed is not None)
        phases = {name: size + framework + host + copy for name, size in phases.items()}
        host = max(phases.values()) - copy
        parts["a checkpoint's copy"] = copy
    else:
        framework += NCCL * (split.world_size > 1)
        spare = ((CUT_FRAGMENTS if is_cut else FRAGMENTS) - RESERVED) * moving
        phases = {name: size + framework for name, size in phases.items()}
        host += PROCESS["host"]
    parts["framework and allocator"] = framework
    return Memory(
        parts=parts,
        phases=phases,
        framework=framework,
        host=host,
        is_complete=found is not None or own.trial is not None,
        spare=spare,
        share=CUT_SHARE if is_cut and not on_cpu else 1.0,
        recomputed=None if found is None else sum(b.recomputes for b in found.blocks) / len(found.blocks),
        copy=copy,
        upper="" if found is None else found.upper,
        stage=stage,
    )


def _named(work: Work, found: Activations, loss: LossBytes) -> dict[str, float]:
    """Return activations and loss, each at its own most."""
    parts = {
        "activations kept": found.before + work.in_flight * sum(block.kept for block in found.blocks),
        "inside of one block": max(max(block.forward, block.backward) for block in found.blocks),
        "batch": float(batch_bytes(work)),
    }
    return parts | (
        {"logits and loss": found.of_loss + max(loss.forward, loss.backward)} if work.is_last else {}
    )
