"""The common result of every kind of data: data sets, how to batch and mix them, and sizes for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.data.batches import Batch as Batch
from pipeline.data.sampler import SourceShare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Collate = Callable[[Any], Any]
"""Function that makes a batch of a list of samples, or of the result of `__getitems__`."""


@dataclass(frozen=True)
class DataBundle:
    """Data that is ready to be loaded, the same on every rank that has the same recipe.

    Attributes:
        train: Map-style data set (`__len__`, `__getitem__`) of training samples (see batches.py). The random
            generators of torch, numpy and Python are seeded for each batch and for each sample that
            `__getitem__` returns, which takes 0.1 ms per batch. A data set with the attribute
            `is_deterministic = True` is read without seeding; it must draw no random numbers. If it has a
            method `augmented(index, seed)`, training samples come from that method: `seed` is a random 64-bit
            number that follows from the sample's position in the run.
        eval: Held-out data sets by name, such as one for each source; may be empty.
        collate: Function that makes a batch (see batches.as_batch) of the result of `__getitems__`, or of a
            list of results of `__getitem__`.
        tokenizer: Tokenizer of text data; `None` for other kinds.
        vocab_size: Upper bound of token ids (exclusive), special tokens included; `None` without text.
        num_classes: Upper bound of labels (exclusive); `None` except for classification.
        fingerprint: Text that changes with the samples or their order. A resumed run compares it with the one
            in the checkpoint.
        mixture: Sources of `train`, in its order; empty for a single source.
        num_channels: Channels of the images; `None` for other kinds.
        longest_segment: Tokens of the longest segment with consecutive positions in preference data; `None`
            for other kinds, where positions may count through a whole sequence.
        eval_sets: Further evaluation sets by name, which are not part of `eval/loss`.
        answer_counts: Number of judged training answers by kind (see preference_layouts.py); empty if not
            known.
        weights_at: Function from the number of completed steps to the weights of the sources (see
            curriculum.py); `None` if the weights are constant.
    """

    train: Dataset[Any]
    eval: Mapping[str, Dataset[Any]]
    collate: Collate
    tokenizer: PreTrainedTokenizerFast | None
    vocab_size: int | None
    num_classes: int | None
    fingerprint: str
    mixture: tuple[SourceShare, ...] = ()
    num_channels: int | None = None
    longest_segment: int | None = None
    eval_sets: Mapping[str, Dataset[Any]] = field(default_factory=dict)
    answer_counts: Mapping[int, int] = field(default_factory=dict)
    weights_at: Callable[[int], Sequence[float]] | None = None

    @property
    def sources(self) -> tuple[SourceShare, ...]:
        """Sources of `train`: those of the mixture, or a single one called `train`."""
        return self.mixture or (SourceShare("train", len(self.train)),)  # type: ignore[arg-type]


class JoinedDataset(Dataset[Batch]):
    """Concatenation of token data sets: the training data of several sources.

    The `__getitems__` of each data set must return batches with the same keys and shapes.
    """

    is_deterministic = True

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Batch:
        return {key: tensor[0] for key, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows in the order of `indices`; each tensor is (B, ...)."""
        rows = np.asarray(indices)
        dataset_of_row = np.searchsorted(self._ends, rows, side="right")
        joined: dict[str, Tensor] = {}
        for number in np.unique(dataset_of_row).tolist():
            is_selected = dataset_of_row == number
            dataset = self.datasets[number]
            first_row = self._ends[number] - len(dataset)
            batch: Batch = dataset.__getitems__((rows[is_selected] - first_row).tolist())
            if is_selected.all():
                return batch
            for key, tensor in batch.items():
                target = joined.setdefault(key, tensor.new_empty((len(rows), *tensor.shape[1:])))
                target.numpy()[is_selected] = tensor.numpy()  # torch would start all its threads for a few kB
        return joined
