"""(model, batch) -> LossSum: a sum and a count, never a mean. engine/interface.py alone divides.

An engine measures the forward of an objective; an objective measures nothing itself.
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

# What a batch holds for the loss, also where the model's forward has an argument of that name.
TARGET_KEYS = ("labels", "shift_labels", "targets", "label", "target")


@dataclass(frozen=True)
class LossSum:
    """What one micro-batch adds to the loss. All 0-dim tensors on the device."""

    loss_sum: Tensor
    count: Tensor
    """Tokens or samples (or their weights) the loss is the sum over."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Further sums, such as `correct`, that Objective.means names. 0 where one is missing."""
    penalty_sum: Tensor | None = None
    """What is minimised besides, divided by the same count; no part of the loss that is logged."""

    @property
    def minimised(self) -> Tensor:
        """The loss that backward starts from."""
        return self.loss_sum if self.penalty_sum is None else self.loss_sum + self.penalty_sum

    def detached(self) -> LossSum:
        """Return the sums without their graph."""
        extras = {key: value.detach() for key, value in self.extras.items()}
        return LossSum(self.loss_sum.detach(), self.count, extras)


def list_extra_sums(means: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the names of the sums that these means are made of: the keys of LossSum.extras."""
    return list(dict.fromkeys(chain.from_iterable(means.values())))


def sum_losses(
    losses: Sequence[LossSum], means: Mapping[str, tuple[str, str]], device: torch.device
) -> LossSum:
    """Return the sums over micro-batches; 0 for what none of them reports. Penalties are left out."""
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
    """What a training step is made of: this rank's part of its batch, and the way to the others' parts."""

    model: Callable[..., Any]
    micro_batches: Sequence[Batch]
    to_device: Callable[[Batch], Batch]
    """Brings a micro-batch to the model's device."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """The sum over the ranks that the batch is divided among, of a tensor on `device`."""
    device: torch.device


class Objective(Protocol):
    """What is minimised: the sum of `loss_sum` over the sum of `count`, both over the global batch."""

    unit: str
    """What is counted: `tokens`, `samples`, `pairs` or `examples`."""
    means: Mapping[str, tuple[str, str]]
    """Metric -> which of LossSum.extras is divided by which, both over the global batch."""
    targets: Sequence[str]
    """Entries of a batch that it reads and no model does."""
    weighted: Mapping[str, float]
    """Metric -> what its mean is multiplied by before it is added to an evaluation's loss: terms with a count
    of their own. In training they are part of `loss_sum`, as `prepare_step` tells the global counts."""

    def count(self, batch: Batch) -> Tensor:
        """Return the micro-batch's count (0-dim), from the batch alone: the first backward needs it."""
        ...

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """Return the entries of the batch that go to the model."""
        ...

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Learn what the loss needs of the global batch, before a training step's first forward.

        Collective if it needs something.
        """
        ...

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Return the loss of the model on a batch that is on its device."""
        ...


class TwoPassObjective(ABC):
    """An objective whose evaluation needs a mean over all held-out data before its first batch."""

    @property
    @abstractmethod
    def first_pass(self) -> Objective:
        """The objective whose mean over all held-out data is needed."""

    @abstractmethod
    def set_first_pass_mean(self, mean: float) -> None:
        """Take that mean for the evaluation that follows."""


_PART_ATTRIBUTE = "vocabulary_part"


@dataclass(frozen=True)
class VocabularyPart:
    """Which rows, and how the ranks that hold the others are heard."""

    start: int
    """The word of the first row."""
    largest: int
    """Rows of the largest part: all ranks work on as many tokens at a time."""
    gather: Callable[[Tensor], Tensor]
    """One tensor a rank -> all of them, in a new first dimension. Collective."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """In place. Collective."""


def get_vocabulary_part(layer: nn.Module | None) -> VocabularyPart | None:
    """Return which part of the vocabulary a layer holds; `None`: all of it."""
    part: VocabularyPart | None = getattr(layer, _PART_ATTRIBUTE, None)
    return part


def set_vocabulary_part(layer: nn.Module, part: VocabularyPart) -> None:
    """Record that the weight of `layer` is `part` of the vocabulary; its outputs are those of all ranks."""
    setattr(layer, _PART_ATTRIBUTE, part)
