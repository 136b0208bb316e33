"""(model, batch) -> LossSum: a sum and a count, never a mean. engine/normalize.py alone divides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

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
    """Further sums over the same count, such as `correct`."""


class Objective(Protocol):
    """What is minimised: the sum of `loss_sum` over the sum of `count`, both over the global batch."""

    unit: str
    """What is counted: `tokens` or `samples`."""
    extra_keys: tuple[str, ...]
    """Names of the further sums in LossSum.extras."""

    def count(self, batch: Batch) -> Tensor:
        """The micro-batch's count (0-dim), from the batch alone: it is needed before the first backward."""
        ...

    def inputs(self, model: Callable[..., Any], batch: Batch) -> frozenset[str]:
        """The entries of the batch that go to the model."""
        ...

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """Runs the model on a batch that is on its device."""
        ...
