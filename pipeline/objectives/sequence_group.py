"""The ranks that hold parts of the same rows, where a sequence is cut: sums over whole rows need all of
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.objectives.model_call import unwrapped

_NAME = "sequence_group"


@dataclass(frozen=True)
class SequenceGroup:
    """How many ranks share a row, and how they are heard."""

    size: int = 1
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """In place. Collective."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over the group's ranks, each of which then computes the same of it, and reports its share:
        a `size`-th. Its gradient is that of all of them, without a collective. Collective.
        """
        if self.size == 1:
            return values
        total: Tensor = _Total.apply(values, self)
        return total


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        ctx.size = group.size
        return group.all_reduce_sum(values.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


ALONE = SequenceGroup()


def note_group(model: nn.Module, group: SequenceGroup) -> None:
    """The model is given a part of each row."""
    setattr(model, _NAME, group)


def group_of(model: Any) -> SequenceGroup:
    """Of a model, wrapped or not; one of a single rank where rows are whole."""
    group: SequenceGroup = getattr(unwrapped(model), _NAME, ALONE)
    return group
