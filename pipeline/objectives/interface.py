"""The interface of objectives: (model, batch) -> LossSum, which is a sum and a count, never a mean.

Every token counts once. engine/interface.py is the only place that divides: a step sums the counts of all its
micro-batches over all ranks before the first backward, and divides each loss sum by that global count.
Ranks of a sequence-parallel group compute the loss of the same samples together: each reports a part of the
loss and the count, and the parts add up over all ranks. Under tensor parallelism each rank reports the whole
loss, and the engine divides it.

An engine times the forward of an objective; an objective measures nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = Mapping[str, Any]
"""Entries of a micro-batch by name."""

TARGET_KEYS = ("labels", "shift_labels", "targets", "label", "target")
"""Entries of a batch that only the loss reads, even if the model's forward has an argument of that name."""


@dataclass(frozen=True)
class LossSum:
    """This rank's loss of one micro-batch as sums, each a 0-dim tensor on the device."""

    loss_sum: Tensor
    """Sum that is minimised and logged after division by the global count, with its autograd graph."""
    count: Tensor
    """Number of tokens or samples (or the sum of their weights) that the loss is a sum over."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Further sums, such as `correct`, by the names that Objective.means uses; a missing sum counts as 0."""
    penalty_sum: Tensor | None = None
    """Sum that is minimised in addition, divided by the same count, but is not part of the logged loss."""

    @property
    def minimised(self) -> Tensor:
        """Sum that backward starts from: the loss with the penalty."""
        return self.loss_sum if self.penalty_sum is None else self.loss_sum + self.penalty_sum

    def detached(self) -> LossSum:
        """Return the sums without their autograd graph, and without the penalty."""
        extras = {key: value.detach() for key, value in self.extras.items()}
        return LossSum(self.loss_sum.detach(), self.count, extras)


def list_extra_sums(means: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the names of the sums that these means are computed from: the keys of LossSum.extras."""
    return list(dict.fromkeys(chain.from_iterable(means.values())))


def sum_losses(
    losses: Sequence[LossSum], means: Mapping[str, tuple[str, str]], device: torch.device
) -> LossSum:
    """Return the sums over micro-batches, without penalties.

    Args:
        losses: Losses of the micro-batches; if there are none, all sums are 0.
        means: See Objective.means. The result has each extra that they name; one that no loss reports is 0.
        device: Device of sums that no loss reports.
    """
    zero = torch.zeros((), device=device)
    extras: dict[str, Tensor] = {}
    for loss in losses:
        for key, value in loss.extras.items():
            extras[key] = extras[key] + value if key in extras else value
    return LossSum(
        sum((loss.loss_sum for loss in losses[1:]), losses[0].loss_sum) if losses else zero,
        sum((loss.count for loss in losses[1:]), losses[0].count) if losses else zero,
        {key: extras.get(key, zero) for key in list_extra_sums(means)},
    )


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of a training step's batch, and a collective that adds up the parts of all ranks."""

    model: Callable[..., Any]
    """The model as the engine calls it, with its wrappers."""
    micro_batches: Sequence[Batch]
    """This rank's micro-batches of the step, as the loader returned them: on the host."""
    to_device: Callable[[Batch], Batch]
    """Function that moves a micro-batch to the model's device."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """Collective that returns the sum of a tensor on `device` over all ranks.

    Ranks with the same samples each add them, so only the ratio of two such sums has a meaning.
    """
    device: torch.device
    """The model's device."""


class Objective(Protocol):
    """Minimises the sum of `loss_sum` divided by the sum of `count`, both over the global batch."""

    unit: str
    """Unit of the count: `tokens`, `samples`, `pairs`, `examples` or `answers`."""
    means: Mapping[str, tuple[str, str]]
    """Metrics by name: the keys in LossSum.extras of the sum and of the count that it is divided by.

    Both are summed over the global batch before the division.
    """
    targets: Sequence[str]
    """Entries of a batch that the objective reads, and that are not passed to the model."""
    eval_weights: Mapping[str, float]
    """Weights of the metrics in `means` that an evaluation adds to its loss: terms with their own count.

    In a training step, `loss_sum` has such a term, since `prepare_step` knows the global counts of both
    terms. An evaluation knows its counts only at its end, so there `loss_sum` lacks it.
    """

    def count(self, batch: Batch) -> Tensor:
        """Return the micro-batch's count (0-dim) without a forward, since the first backward needs it."""
        ...

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """Return the names of the batch's entries that are passed to the model."""
        ...

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Compute what the loss needs to know of the global batch, before a step's first forward.

        Collective if the loss needs anything.
        """
        ...

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Return the loss of the model on a batch that is on the model's device."""
        ...


class TwoPassObjective(ABC):
    """An objective whose evaluation needs a mean over all held-out data before its first batch."""

    @property
    @abstractmethod
    def first_pass(self) -> Objective:
        """Objective whose mean over all held-out data is needed."""

    @abstractmethod
    def set_first_pass_mean(self, mean: float) -> None:
        """Set the mean of `first_pass` for the evaluation that follows."""


_PART_ATTRIBUTE = "vocabulary_part"


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of an output layer on this rank, and collectives over its tensor-parallel group."""

    start: int
    """Token id of the first row on this rank."""
    max_rows: int
    """Number of rows on the rank with the most, from which all ranks compute the same chunk size."""
    gather: Callable[[Tensor], Tensor]
    """Collective that stacks one tensor of each rank in a new first dimension."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """Collective that sums a tensor over the ranks in place, and returns it."""


def get_vocabulary_part(layer: nn.Module | None) -> VocabularyPart | None:
    """Return the part of the vocabulary that a layer has on this rank; `None`: all of it."""
    part: VocabularyPart | None = getattr(layer, _PART_ATTRIBUTE, None)
    return part


def set_vocabulary_part(layer: nn.Module, part: VocabularyPart) -> None:
    """Record that the weight of `layer` has only `part` of the vocabulary; its outputs cover all words."""
    setattr(layer, _PART_ATTRIBUTE, part)
