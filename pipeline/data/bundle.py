"""What every kind of data comes down to: two data sets, how to batch them, what a model must know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset, default_collate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Batch = dict[str, Tensor]
Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class DataBundle:
    """Data that is ready to be loaded; the same on every rank that was given the same recipe.

    Attributes:
        train: Map-style data set (`__len__`, `__getitem__`) of dicts of tensors.
        eval: The held-out split, or None where there is none.
        collate: Makes a batch of what the data set's `__getitems__` (or a list of `__getitem__`) returned.
        tokenizer: Text only.
        vocab_size: Token ids are below this (special tokens included). Text only.
        num_classes: Labels are below this. Classification only.
        fingerprint: Changes when the samples or their order in the data set do; a resumed run can compare it.
    """

    train: Dataset[Any]
    eval: Dataset[Any] | None
    collate: Collate
    tokenizer: PreTrainedTokenizerFast | None
    vocab_size: int | None
    num_classes: int | None
    fingerprint: str


def collate_items(items: list[Batch] | Batch) -> Batch:
    """A batch as it is (from a vectorised `__getitems__`), or items stacked along a new first axis."""
    if isinstance(items, dict):
        return items
    batch: Batch = default_collate(items)
    return batch
