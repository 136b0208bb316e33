"""Estimates the memory of a rank: its parts by name, and its peak over the phases of a step."""

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

# Bytes that a process takes before it has a model. On the host: Python with torch, DeepSpeed and
# transformers; on a GPU: the CUDA context and its libraries.
PROCESS = {"cpu": 460 * MIB, "cuda": 890 * MIB, "host": 3 * GIB}
DEEPSPEED = 122 * MIB  # DeepSpeed's modules and their buffers, in a rank on a CPU
NCCL = 300 * MIB  # NCCL's buffers, in a rank on a GPU that has peers
# The following shares are of the bytes that come and go in a step. They were fitted to published runs
# (docs/planning.md).
RESERVED_SHARE = 0.11  # bytes that the allocator typically holds above those in use
FRAGMENT_SHARE = 0.165  # with so much reserved, no published run that ran out of memory would seem to fit
CUT_FRAGMENT_SHARE = 0.25  # the same for runs with tensor parallelism or pipeline stages
CUT_USABLE_SHARE = 0.91  # share of a GPU's memory that such a run may take


@dataclass(frozen=True)
class RankMemory:
    """Estimated memory of one rank in bytes."""

    states: RankStates
    parts: dict[str, float]
    """Bytes by name of the part, each at its own peak. The peaks are at different times, so that their sum is
    more than `peak`."""
    phases: dict[str, float]
    """Peak bytes of all parts together in each phase of a step."""
    framework: float
    """Bytes that a process takes in addition to its tensors."""
    host: float
    """Bytes in main memory; all of the rank's bytes if it computes on a CPU."""
    is_complete: bool
    """Whether the bytes of activations are known and included."""
    spare_bytes: float = 0.0
    """Bytes that have to stay free: fragments of freed memory cannot always be reused."""
    usable_share: float = 1.0
    """Share of the device's memory that the run may take."""
    overestimate: str = ""
    """Reason for which activations are an upper bound; empty if they are not."""
    stage: int = 0
    """Index of the pipeline stage that the rank computes."""

    @property
    def peak(self) -> float:
        """Bytes on the rank's device in the phase that needs most."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Name of the phase that needs most."""
        return max(self.phases, key=self.phases.__getitem__)


def compute_phase_peaks(
    work: MicroBatchSpec, own: ModelSpec, states: RankStates, beside: EngineBuffers
) -> dict[str, float]:
    """Return the peak bytes of tensors on the rank's device in each phase.

    Args:
        work: How the rank computes a micro-batch.
        own: Part of the model that the rank has.
        states: States that the rank holds.
        beside: Buffers of the rank's engine.
    """
    dimensions = own.dimensions
    held = states.device
    fixed = float(held.weights + held.masters + held.moments + beside.always + count_batch_bytes(work))
    fixed += handed_bytes(work, dimensions)
    phases = {"step": fixed + held.gradients + beside.step}
    if dimensions is None or (found := estimate_activations(work, dimensions)) is None:
        return phases
    loss = count_rank_loss_bytes(work, own, dimensions)
    # In a pipeline, activations of the other micro-batches that wait for their backward.
    fixed += (work.in_flight - 1) * sum(block.kept_backward for block in found.blocks)
    before = fixed + beside.forward + (held.gradients if beside.keeps_gradients else 0)
    live = found.before
    most = found.start
    for block in found.blocks:
        most = max(most, live + block.forward)
        live += block.kept
    if work.is_last:
        most = max(most, live + found.end)
        phases["loss"] = before + live + found.of_loss + loss.forward
    phases["forward"] = before + most
    phases["backward"] = (
        fixed
        + beside.backward
        + _compute_backward_peak(work, own, gradients=held.gradients, beside=beside, found=found, loss=loss)
    )
    return phases


def count_batch_bytes(work: MicroBatchSpec) -> int:
    """Return the bytes of a step's token ids, labels and positions; a GPU has the next step's, too."""
    entries = 3 if work.apart else 2
    return 8 * entries * work.rows * work.length * work.micro_batches * (2 if work.device == "cuda" else 1)


def handed_bytes(work: MicroBatchSpec, dimensions: DecoderDimensions | None) -> int:
    """Return the bytes of hidden states and gradients that pipeline stages send to each other.

    A stage has the received hidden states of each micro-batch in flight, the gradient of one, and receive
    buffers for both neighbours. The last stage keeps those of its micro-batch until the loss is freed.
    """
    if work.stages == 1 or dimensions is None:
        return 0
    of_before = min(work.micro_batches, max(2, work.in_flight)) + 2 if work.stage else 0
    return work.computes_in * work.tokens * dimensions.hidden * (of_before + (2 if work.is_last else 1))


def count_rank_loss_bytes(work: MicroBatchSpec, own: ModelSpec, dimensions: DecoderDimensions) -> LossBytes:
    """Return the bytes of output layer and loss, on a rank that has the output layer."""
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDING_NAMES)]
    trained = not ends or ends[-1].trains  # a tied one is listed once
    return count_loss_bytes(work, dimensions.hidden, dimensions.vocabulary // work.tensor, trained)


def _compute_backward_peak(
    work: MicroBatchSpec,
    own: ModelSpec,
    gradients: int,
    beside: EngineBuffers,
    found: ActivationBytes,
    loss: LossBytes,
) -> float:
    """Return the peak bytes of activations and gradients in a backward."""
    from_start = beside.keeps_gradients  # whether gradients exist when the backward begins
    ends = [p for p in own.parameters if p.name.endswith(EMBEDDING_NAMES)]
    first = [p for p in ends if p.name.endswith(INPUT_EMBEDDING_NAMES) and work.stage == 0]
    is_tied = own.dimensions is not None and own.dimensions.tied and work.stages == 1
    is_tied = is_tied and any(p.trains for p in first)
    # On a last stage that is not the first, the tied weight is the output layer.
    last = first if is_tied else [p for p in ends if p not in first]
    embedding, head = (
        gradients * sum(p.numel for p in each if p.trains) / max(1, own.trained) for each in (first, last)
    )
    of_blocks = gradients - head - (0.0 if is_tied else embedding)
    # A gradient exists next to the one it is added to. Engines with buckets count it among these.
    largest = max((p.numel for p in own.parameters if p.trains and p not in ends), default=0)
    extra = largest * work.holds_in if from_start and not beside.backward else 0
    kept = sum(block.kept_backward for block in found.blocks)
    most = found.before + kept + (gradients if from_start else 0.0)
    if work.is_last:
        most += found.of_loss + loss.backward
    for done, block in enumerate(reversed(found.blocks)):
        # Of a tied weight, the output layer's gradient is kept until the embedding's exists.
        existing = head + of_blocks * done / len(found.blocks)
        if from_start:
            existing = gradients + extra + (head if is_tied else 0.0)
        most = max(most, existing + found.carried + kept + block.backward)
        kept -= block.kept_backward
    # The embedding's gradient is added to the one that exists; for a tied weight both exist before their sum.
    added = embedding * (from_start + 2 * is_tied)
    return max(most, gradients + added + found.carried)


def estimate_memory(model: ModelSpec, config: RunConfig, resolved: ResolvedSettings, kind: str) -> RankMemory:
    """Return the memory of the rank that needs most.

    `model` is the whole model, and `kind` is `cpu` or `cuda`.

    Raises:
        ConfigError, ModelError: The model cannot be split so, or nothing of it is trained.
    """
    stages = resolved.split.pipeline_stages
    apart = resolved.split.world_size // stages
    # No rank of a stage needs more than the first one.
    every = [
        _estimate_rank(
            RankSlice.from_run(model, config, resolved, stage * apart, on_cpu=kind == "cpu"), kind, stage
        )
        for stage in range(stages)
    ]
    fullest = max(every, key=lambda each: each.peak + each.spare_bytes)
    return replace(fullest, host=max(each.host for each in every))


def _estimate_rank(rank: RankSlice, kind: str, stage: int) -> RankMemory:
    """Return the memory of one rank."""
    own = rank.own
    beside = count_buffers(rank)
    states = count_states(rank)
    split = rank.split
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
    found = None
    offloaded = 0.0
    if work is not None and own.dimensions is not None:
        phases = compute_phase_peaks(work, own, states, beside)
        parts["buckets, gathered weights"] += handed_bytes(work, own.dimensions)
        found = estimate_activations(work, own.dimensions)
        if found is not None:
            parts |= _name_activation_parts(work, found, count_rank_loss_bytes(work, own, own.dimensions))
            offloaded = work.in_flight * found.host
    moving = max(phases.values()) - held.weights - held.masters - held.moments
    is_cut = split.tensor_parallel * split.pipeline_stages > 1
    on_cpu = kind == "cpu"
    framework = PROCESS[kind] + RESERVED_SHARE * moving
    host = states.host.total + beside.host + offloaded
    spare = 0.0
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


def _name_activation_parts(work: MicroBatchSpec, found: ActivationBytes, loss: LossBytes) -> dict[str, float]:
    """Return the bytes of activations, batch and loss by name, each at its own peak."""
    parts = {
        "activations kept": found.before + work.in_flight * sum(block.kept for block in found.blocks),
        "inside of one block": max(max(block.forward, block.backward) for block in found.blocks),
        "batch": float(count_batch_bytes(work)),
    }
    return parts | (
        {"logits and loss": found.of_loss + max(loss.forward, loss.backward)} if work.is_last else {}
    )
