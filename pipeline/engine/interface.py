"""Interface of an engine, and the arithmetic that turns loss sums into exact means.

Every token counts once. A step counts the valid tokens of all its micro-batches on the host and sums the
count over all ranks in one all-reduce. Before backward it scales each micro-batch's loss *sum* by
`backward_scale`. No other module divides a training loss. Every rank reports its share of loss and count,
and the shares add up over all ranks: ranks that process the same samples never count them twice.
"""

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
    """Return the batch with the bounds of its documents (see document_attention).

    The bounds follow from `position_ids`; a batch without them is returned as it is. The loader's copy on the
    host is read, so that nothing waits for the device. Only a batch that was made on the device is copied
    back, which waits.
    """
    host_batch = get_host_batch(batch)
    positions = host_batch.get("position_ids")
    ids = host_batch.get("input_ids")
    # transformers separates documents only in batches without an attention mask.
    if BOUNDS_KEY in batch or "attention_mask" in batch:
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
    """Upper limits of a step's loss and gradient norm.

    A step that exceeds one, or whose loss or norm is infinite or NaN, leaves the parameters unchanged.
    """

    loss: float
    """Upper limit of the global batch's mean loss."""
    grad_norm: float
    """Upper limit of the global gradient norm before clipping."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Tensors are 0-dim on the device; reading one waits for the device."""

    loss_sum: Tensor
    """This rank's share of the global batch's loss sum; the shares of all ranks add up to the sum."""
    global_count: Tensor
    """Number of valid tokens (or samples) of the global batch."""
    grad_norm: Tensor | float | None
    """Global gradient norm before clipping; `None` if DeepSpeed computed none."""
    skipped: Tensor
    """1 if the parameters were left unchanged, else 0.

    A step is skipped if its gradient is not finite or it exceeds a limit.
    """
    flags: Tensor
    """Sum of all ranks' stop and save flags; see distributed.stopping."""
    loss_scale: float | None
    """fp16 loss scale after the step; `None` in other precisions."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """This rank's shares of the objective's further sums, by name."""
    loss: Tensor | None = None
    """Mean loss of the global batch; `None` if the step had no limits."""
    is_loss_scale_search: bool = False
    """Whether the step was skipped because the fp16 loss scale was too high and could fall.

    Always false for a step without limits.
    """


class Evaluator(Protocol):
    """Computes the loss of evaluation batches. `eval_step` is collective: all ranks enter it together."""

    device: torch.device
    dp_rank: int
    """Data-parallel rank; ranks with equal values read the same samples."""
    dp_world_size: int

    @property
    def module(self) -> nn.Module:
        """Return the user's model, or this rank's part of it, without any wrapper."""
        ...

    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """Return this rank's share of one micro-batch's loss and counts.

        The model computes without gradients and in evaluation mode.
        """
        ...


class Engine(Evaluator, TextGenerator, EngineState, Protocol):
    """Steps a model. Every method is collective: all ranks enter it together."""

    precision: str
    """Precision of the computation: fp32, bf16 or fp16."""
    seed_rank: int
    """Rank for seeding; ranks with equal values compute the same activations and draw the same numbers."""
    num_parameters: int
    """Number of parameters of the whole model, over all ranks."""
    phases: Phases
    """Timeline of the step's phases; the `time/` columns are read from it."""
    replicas: ReplicaDigests | None
    """Digests of the tensors that other ranks hold too; `None` if this rank shares none."""

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
            micro_batches: This rank's micro-batches of the global batch, on the host or the device.
            objective: Computes the loss of a micro-batch.
            learning_rate: Learning rate of this step, before the groups' own factors.
            flags: This rank's stop and save flags (distributed.stopping), summed over ranks with the counts.
            limits: Limits of the step. A step that exceeds them leaves parameters, optimizer state and
                buffers unchanged. With limits a step costs one more collective.
        """
        ...

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Set micro-batch size and accumulation steps of the next steps. Call it between two steps."""
        ...

    def observe_gradients(self, take: Callable[[Shard], None]) -> AbstractContextManager[None]:
        """Return a context; `take` receives the gradients of the step made inside of it.

        Each value is passed once over all ranks. Gradients are averaged over the global batch, unscaled and
        clipped. A skipped step may pass none.
        """
        ...

    def close(self) -> None:
        """Destroy the engine's process groups and release its model, hooks and buffers.

        The engine cannot be used afterwards. A second call does nothing.
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
        batch: Batch on the host or on a device.
        device: Target device.
        float_dtype: Dtype of the model's floating-point inputs; `None` leaves them as they are.
        inputs: Keys that the model receives. Only these are cast, and targets among them are not.
    """

    def move(key: str, tensor: Tensor) -> Tensor:
        is_cast = tensor.is_floating_point() and key in inputs and key not in TARGET_KEYS
        return tensor.to(device, dtype=float_dtype if is_cast else None, non_blocking=True)

    return map_tensors(batch, move)


def require_gradient_graph(loss: LossSum) -> None:
    """Raise an error if the loss has no autograd graph.

    Raises:
        ModelError: the loss does not depend on a trained parameter.
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
    """Return this rank's share of the count and its flags, ready to be summed over the ranks.

    Args:
        micro_batches: This rank's micro-batches.
        objective: Counts the valid tokens or samples of a micro-batch.
        flags: This rank's stop and save flags.
        device: Device of the result.
        copies: Number of ranks that process these same micro-batches.

    Returns:
        (share, flags), shape (2,), fp64.
    """
    count = sum(objective.count(batch).to(torch.float64) for batch in micro_batches)
    share = torch.as_tensor(count, dtype=torch.float64) / copies
    # On the batches' device: a fill does not wait for it, a copy from the host would.
    own_flags = torch.full_like(share, float(flags))
    return torch.stack([share, own_flags]).to(device, non_blocking=True)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of the whole model, also of one that ZeRO-3 has sharded."""
    return sum(map(count_elements, model.parameters()))


def backward_scale(global_count: Tensor, averaged_over: int) -> Tensor:
    """Return the factor of a micro-batch's loss sum before backward.

    The engine later averages gradients over `averaged_over` ranks: the data-parallel ones times those that
    share a sequence. Therefore the sum is multiplied by that number: the average over ranks of
    (sum x ranks / count) equals the sum of all sums / count. Accumulation adds plain sums, since the engine
    does not divide by its steps. A batch without any valid token gives a zero gradient.
    """
    return averaged_over / _replace_zero_by_one(global_count)


def mean_loss(loss_sum: Tensor, count: Tensor) -> Tensor:
    """Return the logged mean per token (or sample) in fp64, from sums over all ranks."""
    return loss_sum.to(torch.float64) / _replace_zero_by_one(count.to(torch.float64))


def compute_evaluation_loss(
    sums: Mapping[str, Tensor],
    means: Mapping[str, tuple[str, str]],
    weighted: Mapping[str, float],
) -> float:
    """Return the loss of an evaluation from its sums over all ranks.

    An evaluation knows its counts only at its end. So terms with counts of their own are not part of the
    `loss` sum; their weighted means are added here.

    Args:
        sums: Sums over all ranks, by name; `loss` and `count` among them.
        means: See Objective.means.
        weighted: See Objective.weighted.
    """
    loss = mean_loss(sums["loss"], sums["count"])
    for name, weight in weighted.items():
        part, whole = means[name]
        loss = loss + weight * mean_loss(sums[part], sums[whole])
    return float(loss)


def compute_extra_means(sums: Mapping[str, Tensor], means: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Return the objective's further metrics, each a mean of its sums over all ranks.

    A metric whose count is 0 is left out.

    Args:
        sums: Sums over all ranks, by name.
        means: See Objective.means.
    """
    return {
        name: float(mean_loss(sums[part], sums[whole]))
        for name, (part, whole) in means.items()
        if sums[whole]
    }


def _replace_zero_by_one(count: Tensor) -> Tensor:
    """Return the count, or 1 if it is 0. A count may be a sum of weights and lie below 1."""
    return torch.where(count > 0, count, 1.0)
