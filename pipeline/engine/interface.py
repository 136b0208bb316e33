"""Interface of an engine: one optimizer step, one evaluation batch, text, its state; division of a loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.checkpoint.shards import EngineState, Shard
from pipeline.data.batches import LoadedBatch, get_host_batch, map_tensors
from pipeline.distributed.phases import Phases
from pipeline.engine.replicas import ReplicaDigests
from pipeline.errors import ModelError
from pipeline.models.document_attention import BOUNDS_KEY, find_document_bounds
from pipeline.models.generation import TextGenerator
from pipeline.models.sharding import count_elements
from pipeline.objectives import TARGET_KEYS, Batch, LossSum, Objective


def add_document_bounds(batch: Batch) -> Batch:
    """Return the batch with the bounds of its documents (see document_attention), if `position_ids` tell
    them.

    What a loader moved to a device is looked at on the host; only where a batch was made on the device is the
    device waited for.
    """
    seen = get_host_batch(batch)
    positions, ids = seen.get("position_ids"), seen.get("input_ids")
    if (
        BOUNDS_KEY in batch or "attention_mask" in batch
    ):  # transformers looks for documents without a mask only
        return batch
    if not (isinstance(positions, Tensor) and isinstance(ids, Tensor) and positions.shape == ids.shape):
        return batch
    bounds = find_document_bounds(positions.cpu())
    is_pinned = positions.is_cuda or positions.is_pinned()
    return LoadedBatch(
        {**batch, BOUNDS_KEY: bounds.pin_memory() if is_pinned else bounds}
    ).copy_metadata_from(batch)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepLimits:
    """What a step may not exceed, if it is to be taken; nor may it be infinite or NaN."""

    loss: float
    """Mean loss of the global batch."""
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Tensors are 0-dim on the device: reading one waits for it."""

    loss_sum: Tensor
    """This rank's share of the global batch's loss sum: all ranks' shares add up to it."""
    global_count: Tensor
    """Valid tokens (or samples) of the global batch."""
    grad_norm: Tensor | float | None
    """Global norm before clipping."""
    skipped: Tensor
    """1 where the gradient was not finite or a limit exceeded, and the parameters were left alone, else 0."""
    flags: Tensor
    """Sum over ranks of their stop and save flags; see distributed.stopping."""
    loss_scale: float | None
    """fp16 only."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """This rank's share of the objective's further sums, as `loss_sum` is."""
    loss: Tensor | None = None
    """Mean loss of the global batch; None: the step had no limits."""
    is_loss_scale_search: bool = False
    """fp16, where the step had limits: it was skipped since the loss scale was too high, which has fallen."""


class Evaluator(Protocol):
    """What can be evaluated. Collective: all ranks enter `eval_step` together."""

    device: torch.device
    dp_rank: int
    """Ranks with the same one take the same samples."""
    dp_world_size: int

    @property
    def module(self) -> nn.Module:
        """Return the user's model, or this rank's part of it, without any wrapper."""
        ...

    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """Return this rank's share of one micro-batch's loss and counts, without gradients, dropout off."""
        ...


class Engine(Evaluator, TextGenerator, EngineState, Protocol):
    """Steps a model. Every method is collective: all ranks enter it together."""

    precision: str
    seed_rank: int
    """Ranks with the same one draw the same random numbers: those that compute the same activations."""
    num_parameters: int
    """Of the whole model, wherever its parts lie."""
    phases: Phases
    """Timeline of the step's phases, from which the `time/` columns come."""
    replicas: ReplicaDigests | None
    """What other ranks hold the same of; None: nothing."""

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        objective: Objective,
        learning_rate: float,
        flags: int,
        limits: StepLimits | None = None,
    ) -> StepResult:
        """Run forward and backward over the micro-batches, then one optimizer step.

        Args:
            flags: This rank's stop and save flags (distributed.stopping), summed over ranks with the counts.
            limits: Of a step that exceeds them nothing stays. With any, a collective more.
        """
        ...

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Set how the next steps' batches are divided. Call it between two steps."""
        ...

    def observe_gradients(self, take: Callable[[Shard], None]) -> AbstractContextManager[None]:
        """Call `take` with the gradients of the step inside it, each value once over all ranks.

        They are averaged over the global batch, unscaled and clipped. A step that is not taken may show none.
        """
        ...

    def close(self) -> None:
        """End the engine's process groups, and release its model, hooks and buffers.

        Nothing else of the engine can be used afterwards. A second call does nothing.
        """
        ...


def to_device(
    batch: Batch,
    device: torch.device,
    float_dtype: torch.dtype | None,
    inputs: Collection[str] = frozenset(),
) -> LoadedBatch:
    """Copy the batch to the device.

    Args:
        inputs: What goes to the model: floating ones of it in `float_dtype`, but for targets.
    """

    def move(key: str, tensor: Tensor) -> Tensor:
        is_cast = tensor.is_floating_point() and key in inputs and key not in TARGET_KEYS
        return tensor.to(device, dtype=float_dtype if is_cast else None, non_blocking=True)

    return map_tensors(batch, move)


def require_gradient_graph(loss: LossSum) -> None:
    """Check that a backward has a graph to go through.

    Raises:
        ModelError: there is nothing to go back through.
    """
    if not loss.loss_sum.requires_grad:
        raise ModelError(
            "the loss does not depend on any parameter that is trained; look for .detach(), .item(), .data, "
            "torch.no_grad() or torch.tensor(...) between the model's parameters and the loss"
        )


def stack_count_and_flags(
    micro_batches: Sequence[Batch],
    objective: Objective,
    flags: int,
    device: torch.device,
    copies: int = 1,
) -> Tensor:
    """Return (this rank's share of the count, its flags), fp64, on the device, to be summed over ranks.

    Args:
        copies: Ranks that were handed these same micro-batches.
    """
    count = sum(objective.count(batch).to(torch.float64) for batch in micro_batches)
    share = torch.as_tensor(count, dtype=torch.float64) / copies
    own_flags = torch.full_like(share, float(flags))  # where the batches are; a fill does not wait
    return torch.stack([share, own_flags]).to(device, non_blocking=True)


def count_parameters(model: nn.Module) -> int:
    """Count all parameters of the whole model, also where ZeRO-3 holds them in shards."""
    return sum(map(count_elements, model.parameters()))


def backward_scale(global_count: Tensor, averaged_over: int) -> Tensor:
    """Return the factor of a micro-batch's loss sum before backward.

    Gradients are averaged over `averaged_over` ranks afterwards (data-parallel ones, times the ranks that
    share a sequence), so the sum is scaled up by their number: average over ranks of (sum x ranks / count) =
    sum of sums / count. Accumulation adds plain sums; the engine is told not to divide by its steps. A batch
    without one valid token gives a zero gradient.
    """
    return averaged_over / _or_one(global_count)


def mean_loss(loss_sum: Tensor, count: Tensor) -> Tensor:
    """Return the token (or sample) mean that is logged, from sums over all ranks, in fp64."""
    return loss_sum.to(torch.float64) / _or_one(count.to(torch.float64))


def compute_evaluation_loss(
    sums: Mapping[str, Tensor],
    means: Mapping[str, tuple[str, str]],
    weighted: Mapping[str, float],
) -> float:
    """Return an evaluation's loss from the sums over all ranks: `loss` over `count`, and terms with own
    counts.

    Args:
        means, weighted: See Objective.
    """
    loss = mean_loss(sums["loss"], sums["count"])
    for name, weight in weighted.items():
        part, whole = means[name]
        loss = loss + weight * mean_loss(sums[part], sums[whole])
    return float(loss)


def compute_extra_means(sums: Mapping[str, Tensor], means: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Return an objective's further metrics from its further sums over all ranks; none without a count.

    Args:
        means: See Objective.means.
    """
    return {
        name: float(mean_loss(sums[part], sums[whole]))
        for name, (part, whole) in means.items()
        if sums[whole]
    }


def _or_one(count: Tensor) -> Tensor:
    """Return the count, which may be a sum of weights below 1, or 1 where nothing was counted."""
    return torch.where(count > 0, count, 1.0)
