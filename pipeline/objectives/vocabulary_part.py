"""Which words a rank's output layer, and the embedding tied to it, hold under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

_NAME = "vocabulary_part"


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


def note_part(layer: nn.Module, part: VocabularyPart) -> None:
    """The layer's weight is this part of the vocabulary; its outputs are those of all ranks."""
    setattr(layer, _NAME, part)


def part_of_vocabulary(layer: nn.Module | None) -> VocabularyPart | None:
    """None: the layer holds all words."""
    part: VocabularyPart | None = getattr(layer, _NAME, None)
    return part
