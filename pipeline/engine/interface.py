"""Interface of an engine, and the arithmetic that turns loss sums into exact means.

Every token counts once. A step counts the valid tokens of all its micro-batches on the host and sums the
count over all ranks in one all-reduce. Before backward the engine scales each micro-batch's loss *sum* by
`backward_scale`. No other module divides a training loss. Every rank reports a share of loss and count, and
the shares add up over all ranks: samples that several ranks process are never counted twice.
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtype, by the name of the precision."""


def add_document_bounds(batch: Batch) -> Batch:
    """Return the batch with the bounds of its documents, computed from `position_ids`.

    See models/document_attention.py for the bounds. A batch without usable `position_ids`, with an attention
    mask, or with bounds is returned unchanged. Positions are read from the loader's copy on the host, which
    does not synchronize with the device. For a batch without such a copy they are copied from the device,
    which synchronizes.
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
    if positions.is_cuda or positions.is_pinned():  # then the copy to the device does not synchronize
        bounds = bounds.pin_memory()
    return LoadedBatch({**batch, BOUNDS_KEY: bounds}).copy_metadata_from(batch)


@dataclass(frozen=True)
class StepLimits:
    """Upper limits of a step's loss and gradient norm.

    A step that exceeds a limit, or whose loss or norm is infinite or NaN, leaves the parameters unchanged.
    """

    loss: float
    """Upper limit of the global batch's mean loss."""
    grad_norm: float
    """Upper limit of the global gradient norm before clipping."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Tensors are 0-dim and on the device; reading one on the host synchronizes with the device.
    """

    loss_sum: Tensor
    """This rank's share of the global batch's loss sum, not scaled; the shares of all ranks add up to it."""
    global_count: Tensor
    """Number of valid tokens (or samples) of the global batch, over all ranks; fp64."""
    grad_norm: Tensor | float | None
    """Global gradient norm before clipping; `None` if DeepSpeed computed none."""
    skipped: Tensor
    """1 if the parameters were left unchanged, else 0.

    A step is skipped if its gradient is not finite or it exceeds a limit.
    """
    flags: Tensor
    """Sum of all ranks' flags, fp64; see the constants in distributed/stopping.py."""
    loss_scale: float | None
    """fp16 loss scale after the step; `None` in other precisions."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """This rank's shares of the objective's further sums (LossSum.extras), by name."""
    loss: Tensor | None = None
    """Mean loss of the global batch, equal on all ranks; `None` if the step had no limits."""
    is_loss_scale_search: bool = False
    """Whether the step was skipped because the fp16 loss scale was too high and above its minimum.

    Always false for a step without limits.
    """


class Evaluator(Protocol):
    """Computes the loss of evaluation batches. `eval_step` is collective: all ranks enter it together."""

    device: torch.device
    """Device on which this rank computes."""
    dp_rank: int
    """Data-parallel rank; ranks with equal values read the same samples."""
    dp_world_size: int
    """Number of data-parallel ranks, and of different micro-batches in one forward of all ranks."""

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
    """Trains a model step by step. Every method is collective: all ranks enter it together."""

    precision: str
    """Precision of the computation: fp32, bf16 or fp16."""
    seed_rank: int
    """Rank in the seed (seed, step, rank) of a step's random numbers.

    It is equal on ranks that compute the same activations.
    """
    num_parameters: int
    """Number of parameters of the whole model, over all ranks."""
    phases: Phases
    """Timeline of the step's phases; the `time/` columns are read from it."""
    replicas: ReplicaDigests | None
    """Digests of the tensors that other ranks have copies of; `None` if there are no copies."""

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
            flags: This rank's flags (distributed/stopping.py), summed over ranks with the counts.
            limits: Limits of the step; `None` if only a non-finite gradient skips it. A step that exceeds
                them leaves parameters, optimizer state and buffers unchanged. A step with limits takes one
                more collective.

        Raises:
            ModelError: the loss does not depend on a trained parameter.
        """
        ...

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Set micro-batch size and accumulation steps of the next steps. Call it between two steps."""
        ...

    def observe_gradients(self, take: Callable[[Shard], None]) -> AbstractContextManager[None]:
        """Return a context in which a step passes its gradients to `take`, as shards.

        Each value is passed by exactly one rank. Gradients are averaged over the global batch and clipped,
        and the loss scale is removed. A skipped step may pass no gradient.
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
        inputs: Keys that the model receives. Only these are cast, except targets (TARGET_KEYS).

    Returns:
        The copy. From pinned host memory it is made without synchronizing with the device.
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
        flags: This rank's flags; see distributed/stopping.py.
        device: Device of the result.
        copies: Number of ranks that process these same micro-batches.

    Returns:
        (share, flags), shape (2,), fp64.
    """
    count = sum(objective.count(batch).to(torch.float64) for batch in micro_batches)
    share = torch.as_tensor(count, dtype=torch.float64) / copies
    # On the batches' device: full_like does not synchronize with it, a copy from the host would.
    own_flags = torch.full_like(share, float(flags))
    return torch.stack([share, own_flags]).to(device, non_blocking=True)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of the whole model, also if ZeRO-3 has sharded it."""
    return sum(map(count_elements, model.parameters()))


def backward_scale(global_count: Tensor, averaged_over: int) -> Tensor:
    """Return the factor of a micro-batch's loss sum before backward.

    The engine later averages gradients over ranks. Therefore the loss sum is multiplied by their number: the
    average over ranks of (sum x ranks / count) equals the sum of all sums / count. Gradient accumulation adds
    plain sums, since the engine does not divide by the number of micro-batches. A global batch without any
    valid token gives a zero gradient.

    Args:
        global_count: Number of valid tokens (or samples) of the global batch.
        averaged_over: Number of ranks over which the engine averages gradients: data-parallel ranks times
            ranks per sequence.
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

    A term that is averaged over another count cannot be part of the `loss` sum, since an evaluation knows
    its counts only at its end. Its mean, times its weight, is added here.

    Args:
        sums: Sums over all ranks, by name; `loss` and `count` among them.
        means: Name of a metric -> (name of its sum, name of its count) in `sums`, see Objective.means.
        weighted: Name of a metric in `means` -> its weight in the loss, see Objective.eval_weights.
    """
    loss = mean_loss(sums["loss"], sums["count"])
    for name, weight in weighted.items():
        sum_key, count_key = means[name]
        loss = loss + weight * mean_loss(sums[sum_key], sums[count_key])
    return float(loss)


def compute_extra_means(sums: Mapping[str, Tensor], means: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Return the objective's further metrics, each a mean of its sums over all ranks.

    A metric whose count is 0 is left out.

    Args:
        sums: Sums over all ranks, by name.
        means: Name of a metric -> (name of its sum, name of its count) in `sums`, see Objective.means.
    """
    return {
        name: float(mean_loss(sums[sum_key], sums[count_key]))
        for name, (sum_key, count_key) in means.items()
        if sums[count_key]
    }


def _replace_zero_by_one(count: Tensor) -> Tensor:
    """Return the count, or 1 if it is 0. A count between 0 and 1, a sum of weights, stays as it is."""
    return torch.where(count > 0, count, 1.0)
