"""Estimates the memory of a rank: its parts by name, and its peak over the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
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
from pipeline.planner.model import DecoderDimensions, ModelSpec, ParameterSpec
from pipeline.planner.rank import EMBEDDING_NAMES, INPUT_EMBEDDING_NAMES, RankSlice
from pipeline.planner.states import EngineBuffers, RankStates, count_buffers, count_states

# Bytes that a process takes before it has a model. `cpu`: of a rank that computes on a CPU, Python with torch
# and transformers. `cuda`: on the GPU, the CUDA context and its libraries. `host`: on the host of a GPU.
PROCESS_BYTES = {"cpu": 460 * MIB, "cuda": 890 * MIB, "host": 3 * GIB}
DEEPSPEED_BYTES = 122 * MIB  # DeepSpeed's modules and their buffers, in a rank on a CPU
NCCL_BYTES = 300 * MIB  # NCCL's buffers, in a rank on a GPU that has peers
# The following shares are of the bytes that are allocated and freed in a step. They were fitted to published
# runs (docs/explanation/performance-and-planning.md).
RESERVED_SHARE = 0.11  # bytes that the allocator typically reserves above those in use
# Bytes that must be available above those in use. With a smaller share, a published run that ran out of
# memory would be planned to fit.
FRAGMENT_SHARE = 0.165
# For runs with tensor parallelism or pipeline stages: the same, and the usable share of the GPU's memory.
MODEL_PARALLEL_FRAGMENT_SHARE = 0.25
MODEL_PARALLEL_USABLE_SHARE = 0.91


@dataclass(frozen=True)
class RankMemory:
    """Estimated memory of one rank in bytes."""

    states: RankStates
    """Weights, gradients and optimizer states of the rank."""
    parts: dict[str, float]
    """Bytes by name of the part, each at its own peak. The peaks are at different times, so their sum exceeds
    `peak`."""
    phases: dict[str, float]
    """Peak bytes of all parts together in each phase of a step."""
    framework: float
    """Bytes that a process takes in addition to its tensors."""
    host: float
    """Bytes in main memory; all of the rank's bytes if it computes on a CPU."""
    is_complete: bool
    """Whether the bytes of activations are known and included."""
    spare_bytes: float = 0.0
    """Bytes that have to stay free, because fragments of freed memory cannot always be reused."""
    usable_share: float = 1.0
    """Share of the device's memory that the run may take."""
    overestimate: str = ""
    """Reason why the bytes of activations are an upper bound; empty if they are exact."""
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
    work: MicroBatchSpec, own: ModelSpec, states: RankStates, buffers: EngineBuffers
) -> dict[str, float]:
    """Return the peak bytes of tensors on the rank's device in each phase of a step.

    The phases are `step`, and if the activations are known also `forward`, `backward` and, on a rank with the
    output layer, `loss`.

    Args:
        work: How the rank computes a micro-batch.
        own: Part of the model that the rank has.
        states: States of the rank.
        buffers: Buffers of the rank's engine.
    """
    dimensions = own.dimensions
    on_device = states.device
    fixed = float(on_device.weights + on_device.masters + on_device.moments)
    fixed += buffers.always + count_batch_bytes(work) + count_transfer_bytes(work, dimensions)
    phases = {"step": fixed + on_device.gradients + buffers.step}
    activations = None if dimensions is None else estimate_activations(work, dimensions)
    if dimensions is None or activations is None:
        return phases
    loss = count_rank_loss_bytes(work, own, dimensions)
    # In a pipeline, activations of the other micro-batches that wait for their backward.
    fixed += (work.in_flight - 1) * sum(block.kept_backward for block in activations.blocks)
    before = fixed + buffers.forward + (on_device.gradients if buffers.keeps_gradients else 0)
    live = activations.before
    peak = activations.start
    for block in activations.blocks:
        peak = max(peak, live + block.forward)
        live += block.kept
    if work.is_last:
        peak = max(peak, live + activations.end)
        phases["loss"] = before + live + activations.of_loss + loss.forward
    phases["forward"] = before + peak
    backward_peak = _compute_backward_peak(
        work, own, gradients=on_device.gradients, buffers=buffers, activations=activations, loss=loss
    )
    phases["backward"] = fixed + buffers.backward + backward_peak
    return phases


def count_batch_bytes(work: MicroBatchSpec) -> int:
    """Return the bytes of a step's token ids, labels and positions; a GPU has the next step's, too."""
    entries = 3 if work.apart else 2
    return 8 * entries * work.rows * work.length * work.micro_batches * (2 if work.device == "cuda" else 1)


def count_transfer_bytes(work: MicroBatchSpec, dimensions: DecoderDimensions | None) -> int:
    """Return the bytes of hidden states and gradients that pipeline stages send to each other.

    A stage has the received hidden states of each micro-batch in flight, the gradient of one, and receive
    buffers for both neighbours. The last stage keeps those of its micro-batch until the loss is freed.
    """
    if work.stages == 1 or dimensions is None:
        return 0
    from_previous = min(work.micro_batches, max(2, work.in_flight)) + 2 if work.stage else 0
    from_next = 2 if work.is_last else 1
    return work.product_element_size * work.tokens * dimensions.hidden * (from_previous + from_next)


def count_rank_loss_bytes(work: MicroBatchSpec, own: ModelSpec, dimensions: DecoderDimensions) -> LossBytes:
    """Return the bytes of output layer and loss, on a rank that has the output layer."""
    embeddings = [p for p in own.parameters if p.name.endswith(EMBEDDING_NAMES)]
    # The output layer is the last of the embeddings; a tied weight is listed once.
    trained = not embeddings or embeddings[-1].trains
    return count_loss_bytes(work, dimensions.hidden, dimensions.vocabulary // work.tensor, trained)


def _compute_backward_peak(
    work: MicroBatchSpec,
    own: ModelSpec,
    gradients: int,
    buffers: EngineBuffers,
    activations: ActivationBytes,
    loss: LossBytes,
) -> float:
    """Return the peak bytes of activations and gradients in a backward.

    Args:
        work: How the rank computes a micro-batch.
        own: Part of the model that the rank has.
        gradients: Bytes of all gradients on the rank's device.
        buffers: Buffers of the rank's engine.
        activations: Activations of the rank.
        loss: Bytes of output layer and loss.
    """
    from_start = buffers.keeps_gradients  # the gradients exist when the backward begins
    outside = [p for p in own.parameters if p.name.endswith(EMBEDDING_NAMES)]
    input_embeddings = [p for p in outside if p.name.endswith(INPUT_EMBEDDING_NAMES) and work.stage == 0]
    is_tied = own.dimensions is not None and own.dimensions.tied and work.stages == 1
    is_tied = is_tied and any(p.trains for p in input_embeddings)
    # On a last stage that is not the first, the tied weight is the output layer.
    output_layers = input_embeddings if is_tied else [p for p in outside if p not in input_embeddings]
    embedding = _share_gradients(gradients, input_embeddings, own)
    head = _share_gradients(gradients, output_layers, own)
    of_blocks = gradients - head - (0.0 if is_tied else embedding)
    # A new gradient exists next to the one that it is added to. `buffers.backward` includes it.
    largest = max((p.numel for p in own.parameters if p.trains and p not in outside), default=0)
    extra = largest * work.weight_element_size if from_start and not buffers.backward else 0
    kept = sum(block.kept_backward for block in activations.blocks)
    peak = activations.before + kept + (gradients if from_start else 0.0)
    if work.is_last:
        peak += activations.of_loss + loss.backward
    for done, block in enumerate(reversed(activations.blocks)):
        # The output layer's gradient of a tied weight is kept until the embedding's exists.
        existing = head + of_blocks * done / len(activations.blocks)
        if from_start:
            existing = gradients + extra + (head if is_tied else 0.0)
        peak = max(peak, existing + activations.carried + kept + block.backward)
        kept -= block.kept_backward
    # The embedding's gradient is added to the one that exists; for a tied weight both exist before their sum.
    added = embedding * (from_start + 2 * is_tied)
    return max(peak, gradients + added + activations.carried)


def _share_gradients(gradients: int, parameters: Sequence[ParameterSpec], own: ModelSpec) -> float:
    """Return the bytes of these parameters' gradients, a share of the bytes of all."""
    return gradients * sum(p.numel for p in parameters if p.trains) / max(1, own.trained)


def estimate_memory(model: ModelSpec, config: RunConfig, resolved: ResolvedSettings, kind: str) -> RankMemory:
    """Return the memory of the rank that needs most; `host` is the largest of any rank.

    Args:
        model: Whole model, before any split.
        config: Recipe of the run.
        resolved: Resolved settings.
        kind: Kind of the device, `cpu` or `cuda`.

    Raises:
        ConfigError, ModelError: The model cannot be split as the settings say, or nothing of it is trained.
    """
    stages = resolved.split.pipeline_stages
    ranks_per_stage = resolved.split.world_size // stages
    ranks = []
    for stage in range(stages):  # no rank of a stage needs more than the stage's first one
        number = stage * ranks_per_stage
        rank = RankSlice.from_run(model, config, resolved, number, on_cpu=kind == "cpu")
        ranks.append(_estimate_rank(rank, kind, stage))
    fullest = max(ranks, key=lambda memory: memory.peak + memory.spare_bytes)
    return replace(fullest, host=max(memory.host for memory in ranks))


def _estimate_rank(rank: RankSlice, kind: str, stage: int) -> RankMemory:
    """Return the memory of one rank."""
    own = rank.own
    buffers = count_buffers(rank)
    states = count_states(rank)
    split = rank.split
    on_device = states.device
    work = MicroBatchSpec.from_run(rank.config, rank.resolved, own, kind, stage)
    parts = {
        "parameters": float(on_device.weights),
        "gradients": float(on_device.gradients),
        "optimizer states": float(on_device.masters + on_device.moments),
        "buckets, gathered weights": float(buffers.always + max(buffers.forward, buffers.backward)),
        "temporaries of the step": float(buffers.step),
    }
    phases = {"step": float(on_device.total + buffers.always + buffers.step)}
    activations = None
    offloaded = 0.0
    if work is not None and own.dimensions is not None:
        phases = compute_phase_peaks(work, own, states, buffers)
        parts["buckets, gathered weights"] += count_transfer_bytes(work, own.dimensions)
        activations = estimate_activations(work, own.dimensions)
        if activations is not None:
            loss = count_rank_loss_bytes(work, own, own.dimensions)
            parts |= _name_activation_parts(work, activations, loss)
            offloaded = work.in_flight * activations.host
    temporary = max(phases.values()) - on_device.weights - on_device.masters - on_device.moments
    is_model_parallel = split.tensor_parallel * split.pipeline_stages > 1
    on_cpu = kind == "cpu"
    framework = PROCESS_BYTES[kind] + RESERVED_SHARE * temporary
    host = states.host.total + buffers.host + offloaded
    spare = 0.0
    if on_cpu:
        framework += DEEPSPEED_BYTES * (rank.resolved.deepspeed is not None)
        phases = {name: size + host for name, size in phases.items()}
        host = max(phases.values()) + framework
    else:
        framework += NCCL_BYTES * (split.world_size > 1)
        fragment_share = MODEL_PARALLEL_FRAGMENT_SHARE if is_model_parallel else FRAGMENT_SHARE
        spare = (fragment_share - RESERVED_SHARE) * temporary
        host += PROCESS_BYTES["host"]
    parts["framework and allocator"] = framework
    return RankMemory(
        states=states,
        parts=parts,
        phases={name: size + framework for name, size in phases.items()},
        framework=framework,
        host=host,
        is_complete=activations is not None,
        spare_bytes=spare,
        usable_share=MODEL_PARALLEL_USABLE_SHARE if is_model_parallel and not on_cpu else 1.0,
        overestimate="" if activations is None else activations.overestimate,
        stage=stage,
    )


def _name_activation_parts(
    work: MicroBatchSpec, activations: ActivationBytes, loss: LossBytes
) -> dict[str, float]:
    """Return the bytes of activations, batch and loss by name, each at its own peak."""
    blocks = activations.blocks
    parts = {
        "activations kept": activations.before + work.in_flight * sum(block.kept for block in blocks),
        "inside of one block": max(max(block.forward, block.backward) for block in blocks),
        "batch": float(count_batch_bytes(work)),
    }
    if work.is_last:
        parts["logits and loss"] = activations.of_loss + max(loss.forward, loss.backward)
    return parts
