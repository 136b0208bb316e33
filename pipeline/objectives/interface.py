"""The interface of objectives: (model, batch) -> LossSum, which is a sum and a count, never a mean.

Every token counts once. engine/interface.py is the only place that divides: a step sums the counts of all its
micro-batches over all ranks before the first backward, and scales each loss sum by that global count. Ranks
that see the same samples (a tensor or pipeline group) each report their share of the loss and the count, and
shares add up over all ranks.

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

# Entries of a batch that belong to the loss, also where the model's forward has an argument of that name.
TARGET_KEYS = ("labels", "shift_labels", "targets", "label", "target")


@dataclass(frozen=True)
class LossSum:
    """The loss of one micro-batch as sums, each a 0-dim tensor on the device."""

    loss_sum: Tensor
    count: Tensor
    """Number of tokens or samples (or the sum of their weights) that the loss is a sum over."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Further sums, such as `correct`, that Objective.means names; a missing one counts as 0."""
    penalty_sum: Tensor | None = None
    """Sum that is minimised in addition, divided by the same count, but is not part of the logged loss."""

    @property
    def minimised(self) -> Tensor:
        """Loss that backward starts from, with the penalty."""
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
    """Return the sums over micro-batches, 0 for an extra that none reports; penalties are left out."""
    none = torch.zeros((), device=device)
    extras: dict[str, Tensor] = {}
    for loss in losses:
        for key, value in loss.extras.items():
            extras[key] = extras[key] + value if key in extras else value
    return LossSum(
        sum((loss.loss_sum for loss in losses[1:]), losses[0].loss_sum) if losses else none,
        sum((loss.count for loss in losses[1:]), losses[0].count) if losses else none,
        {key: extras.get(key, none) for key in list_extra_sums(means)},
    )


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of a training step's batch, and a collective over the parts of the other ranks."""

    model: Callable[..., Any]
    micro_batches: Sequence[Batch]
    to_device: Callable[[Batch], Batch]
    """Function that moves a micro-batch to the model's device."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """Function that returns the sum of a tensor on `device` over the ranks that divide the batch."""
    device: torch.device


class Objective(Protocol):
    """Minimises the sum of `loss_sum` divided by the sum of `count`, both over the global batch."""

    unit: str
    """Unit of the count: `tokens`, `samples`, `pairs` or `examples`."""
    means: Mapping[str, tuple[str, str]]
    """Keys of LossSum.extras for each metric: the dividend and the divisor, both over the global batch."""
    targets: Sequence[str]
    """Entries of a batch that the objective reads and no model is given."""
    weighted: Mapping[str, float]
    """Weights of metrics whose means are added to an evaluation's loss: terms with a count of their own.

    A training step knows the global counts of both terms (see `prepare_step`), so there such a term is part
    of `loss_sum`. An evaluation knows its counts only at its end.
    """

    def count(self, batch: Batch) -> Tensor:
        """Return the micro-batch's count (0-dim), from the batch alone, since the first backward needs it."""
        ...

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """Return the entries of the batch that go to the model."""
        ...

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Compute the facts of the global batch that the loss needs, before a step's first forward.

        Collective if the loss needs any.
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
    """The rows of an output layer that this rank holds, and collectives over the ranks of the others."""

    start: int
    """Token id of the first row."""
    largest: int
    """Number of rows of the largest part, by which all ranks choose the same number of tokens a chunk."""
    gather: Callable[[Tensor], Tensor]
    """Collective that stacks one tensor of each rank in a new first dimension."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """Collective that sums a tensor over the ranks, in place."""


def get_vocabulary_part(layer: nn.Module | None) -> VocabularyPart | None:
    """Return the part of the vocabulary that a layer holds; `None`: all of it."""
    part: VocabularyPart | None = getattr(layer, _PART_ATTRIBUTE, None)
    return part


def set_vocabulary_part(layer: nn.Module, part: VocabularyPart) -> None:
    """Record that the weight of `layer` holds `part` of the vocabulary, while its outputs cover all words."""
    setattr(layer, _PART_ATTRIBUTE, part)
