"""Memory of a rank in named parts, and its peak over the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.files import GIB, MIB
from pipeline.planner.activations import (
    ActivationBytes,
    LossBytes,
    MicroBatchSpec,
    count_loss_bytes,
    estimate_activations,
)
from pipeline.planner.model import DecoderDimensions, ModelSpec
from pipeline.planner.rank import EMBEDDING_NAMES, INPUT_EMBEDDING_NAMES, RankSlice
from pipeline.planner.states import EngineBuffers, RankStates, count_buffers, count_states

# What a process takes before there is a model: Python with torch, DeepSpeed and transformers on the host; a
# CUDA context with its libraries on a GPU.
PROCESS = {"cpu": 460 * MIB, "cuda": 890 * MIB, "host": 3 * GIB}
DEEPSPEED = 122 * MIB  # modules that are imported besides on a CPU, and their buffers
NCCL = 300 * MIB  # of a rank on a GPU that has peers
# Of what comes and goes in a step, what the allocator holds more (published runs, docs/planning.md). The
# second: with which none of those that ran out of memory would have fitted; then of runs that are cut by
# tensors or stages, and the share of a GPU that these may take.
RESERVED_SHARE, FRAGMENT_SHARE, CUT_FRAGMENT_SHARE, CUT_USABLE_SHARE = 0.11, 0.165, 0.25, 0.91


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    states: RankStates
    parts: dict[str, float]
    """Bytes by name, each at its own most: together more than the peak."""
    phases: dict[str, float]
    """The most of all parts in each phase of a step."""
    framework: float
    """Bytes that a process takes beside its tensors."""
    host: float
    """Bytes in the machine's memory; on a CPU all of it."""
    is_complete: bool
    """Whether the bytes of activations are known."""
    spare_bytes: float = 0.0
    """Bytes that have to be free besides: freed pieces of memory do not always fit together."""
    usable_share: float = 1.0
    """Share of the device that the run may take."""
    overestimate: str = ""
    """Why activations are more than will be taken; empty if they are not."""
    stage: int = 0
    """The pipeline stage whose ranks these are."""

    @property
    def peak(self) -> float:
        """The most of any phase, on the rank's device."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=self.phases.__getitem__)


def compute_phase_peaks(
    work: MicroBatchSpec, own: ModelSpec, states: RankStates, beside: EngineBuffers
) -> dict[str, float]:
    """Return the most bytes of tensors on the rank's device in each phase.

    Args:
        own: Part of the model that the rank has.
        beside: The engine's buffers.
    """
    dimensions, held = own.dimensions, states.device
    fixed = float(held.weights + held.masters + held.moments + beside.always + count_batch_bytes(work))
    fixed += handed_bytes(work, dimensions)
    phases = {"step": fixed + held.gradients + beside.step}
    if dimensions is None or (found := estimate_activations(work, dimensions)) is None:
        return phases
    loss = count_rank_loss_bytes(work, own, dimensions)
    # Micro-batches that wait for their backward.
    fixed += (work.in_flight - 1) * sum(block.kept_backward for block in found.blocks)
    before = fixed + beside.forward + (held.gradients if beside.keeps_gradients else 0)
    live, most = found.before, found.start
    for block in found.blocks:
        most = max(most, live + block.forward)
        live += block.kept
    if work.is_last:
        most = max(most, live + found.end)
        phases["loss"] = before + live + found.of_loss + loss.forward
    phases["forward"] = before + most
    phases["backward"] = fixed + beside.backward + _backward(work, own, held.gradients, beside, found, loss)
    return phases


def count_batch_bytes(work: MicroBatchSpec) -> int:
    """Return the bytes of a step's ids, labels and positions; on a GPU with the next step's."""
    entries = 3 if work.apart else 2
    return 8 * entries * work.rows * work.length * work.micro_batches * (2 if work.device == "cuda" else 1)


def handed_bytes(work: MicroBatchSpec, dimensions: DecoderDimensions | None) -> int:
    """Return the bytes of what pipeline stages hand on.

    Hidden states from the stage before of every micro-batch on its way, the gradient of one, and what both
    neighbours' are received into. The last loss still has those of its micro-batch.
    """
    if work.stages == 1 or dimensions is None:
        return 0
    of_before = min(work.micro_batches, max(2, work.in_flight)) + 2 if work.stage else 0
    return work.computes_in * work.tokens * dimensions.hidden * (of_before + (2 if work.is_last else 1))


def count_rank_loss_bytes(work: MicroBatchSpec, own: ModelSpec, dimensions: DecoderDimensions) -> LossBytes:
    """Return what the output layer takes, on a rank that has it."""
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDING_NAMES)]
    trained = not ends or ends[-1].trains  # a tied one is listed once
    return count_loss_bytes(work, dimensions.hidden, dimensions.vocabulary // work.tensor, trained)


def _backward(
    work: MicroBatchSpec,
    own: ModelSpec,
    gradients: int,
    beside: EngineBuffers,
    found: ActivationBytes,
    loss: LossBytes,
) -> float:
    """Return the most bytes of activations and gradients in a backward."""
    from_start = beside.keeps_gradients  # whether gradients exist when it begins
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDING_NAMES)]
    first = [p for p in ends if p.name.endswith(INPUT_EMBEDDING_NAMES) and work.stage == 0]
    is_tied = own.dimensions is not None and own.dimensions.tied and work.stages == 1
    is_tied = is_tied and any(p.trains for p in first)
    # A tied weight that a last stage has is its output layer.
    last = first if is_tied else [p for p in ends if p not in first]
    embedding, head = (
        gradients * sum(p.numel for p in each if p.trains) / max(1, own.trained) for each in (first, last)
    )
    of_blocks = gradients - head - (0.0 if is_tied else embedding)
    # One that is added to one that exists; engines with buckets count it with these.
    largest = max((p.numel for p in own.parameters if p.trains and p not in ends), default=0)
    extra = largest * work.holds_in if from_start and not beside.backward else 0
    kept = sum(block.kept_backward for block in found.blocks)
    most = found.before + kept + (gradients if from_start else 0.0)
    if work.is_last:
        most += found.of_loss + loss.backward
    for done, block in enumerate(reversed(found.blocks)):
        # A tied weight's gradient of the output layer waits for that of the embedding.
        there = head + of_blocks * done / len(found.blocks)
        if from_start:
            there = gradients + extra + (head if is_tied else 0.0)
        most = max(most, there + found.carried + kept + block.backward)
        kept -= block.kept_backward
    # Added to one that exists; of tied ones both, before their sum.
    added = embedding * (from_start + 2 * is_tied)
    return max(most, gradients + added + found.carried)


def estimate_memory(model: ModelSpec, config: RunConfig, resolved: ResolvedSettings, kind: str) -> RankMemory:
    """Return the memory of the fullest rank.

    Args:
        model: The whole one.
        kind: Kind of the device: `cpu` or `cuda`.

    Raises:
        ConfigError, ModelError: The model cannot be cut so, or nothing of it is trained.
    """
    stages = resolved.split.pipeline_stages
    apart = resolved.split.world_size // stages
    # No rank of a stage has more than its first.
    every = [
        _of_rank(
            RankSlice.from_run(model, config, resolved, stage * apart, on_cpu=kind == "cpu"), kind, stage
        )
        for stage in range(stages)
    ]
    fullest = max(every, key=lambda each: each.peak + each.spare_bytes)
    return replace(fullest, host=max(each.host for each in every))


def _of_rank(rank: RankSlice, kind: str, stage: int) -> RankMemory:
    own, beside, states, split = rank.own, count_buffers(rank), count_states(rank), rank.split
    held = states.device
    work = MicroBatchSpec.from_run(rank.config, rank.resolved, own, kind, stage)
    parts = {
        "parameters": float(held.weights),
        "gradients": float(held.gradients),
        "optimizer states": float(held.masters + held.moments),
        "buckets, gathered weights": float(beside.always + max(beside.forward, beside.backward)),
        "temporaries of the step": float(beside.step),
    }
    phases = {"step": float(held.total + beside.always + beside.step)}
    found, offloaded = None, 0.0
    if work is not None and own.dimensions is not None:
        phases = compute_phase_peaks(work, own, states, beside)
        parts["buckets, gathered weights"] += handed_bytes(work, own.dimensions)
        found = estimate_activations(work, own.dimensions)
        if found is not None:
            parts |= _named(work, found, count_rank_loss_bytes(work, own, own.dimensions))
            offloaded = work.in_flight * found.host
    moving = max(phases.values()) - held.weights - held.masters - held.moments
    is_cut, on_cpu = split.tensor_parallel * split.pipeline_stages > 1, kind == "cpu"
    framework = PROCESS[kind] + RESERVED_SHARE * moving
    host, spare = states.host.total + beside.host + offloaded, 0.0
    if on_cpu:
        framework += DEEPSPEED * (rank.resolved.deepspeed is not None)
        phases = {name: size + host for name, size in phases.items()}
        host = max(phases.values()) + framework
    else:
        framework += NCCL * (split.world_size > 1)
        spare = ((CUT_FRAGMENT_SHARE if is_cut else FRAGMENT_SHARE) - RESERVED_SHARE) * moving
        host += PROCESS["host"]
    parts["framework and allocator"] = framework
    return RankMemory(
        states=states,
        parts=parts,
        phases={name: size + framework for name, size in phases.items()},
        framework=framework,
        host=host,
        is_complete=found is not None,
        spare_bytes=spare,
        usable_share=CUT_USABLE_SHARE if is_cut and not on_cpu else 1.0,
        overestimate="" if found is None else found.overestimate,
        stage=stage,
    )


def _named(work: MicroBatchSpec, found: ActivationBytes, loss: LossBytes) -> dict[str, float]:
    """Return activations and loss, each at its own most."""
    parts = {
        "activations kept": found.before + work.in_flight * sum(block.kept for block in found.blocks),
        "inside of one block": max(max(block.forward, block.backward) for block in found.blocks),
        "batch": float(count_batch_bytes(work)),
    }
    return parts | (
        {"logits and loss": found.of_loss + max(loss.forward, loss.backward)} if work.is_last else {}
    )
