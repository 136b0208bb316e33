"""What every kind of data comes down to: data sets, how to batch and mix them, what a model must know."""

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


@dataclass(frozen=True)
class DataBundle:
    """Data that is ready to be loaded; the same on every rank that was given the same recipe.

    Attributes:
        train: Map-style data set (`__len__`, `__getitem__`) of samples (see batches.py). Random numbers it
            draws from torch's, numpy's or Python's own generators are seeded for each batch; one that says
            `is_deterministic = True` draws none, and is spared the 0.1 ms. Where it has
            `augmented(index, draw)`, training samples come from that: `draw` is a random 64-bit number that
            belongs to the sample's place in the run.
        eval: Held-out samples by name, such as each source's. Empty: none.
        collate: Makes a batch (see batches.as_batch) of what the data set's `__getitems__` (or a list of
            `__getitem__`) returned.
        tokenizer: Text only.
        vocab_size: Token ids are below this (special tokens included). Text only.
        num_classes: Labels are below this. Classification only.
        fingerprint: Changes when the samples or their order in the data set do; a resumed run can compare it.
        mixture: What `train` consists of, in its order. Empty: one source.
        num_channels: Of the images. Images only.
        longest: Tokens of the longest text that positions count through. `None`: those of a sequence.
        eval_sets: Further sets to evaluate on, by name, which are no part of `eval/loss`.
        answers: Number of judged answers that are trained on, by kind (see preference_layouts.py). Empty: not
            known.
        weights_at: Weights of the sources at a step, see curriculum.py. `None`: they do not change.
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
    longest: int | None = None
    eval_sets: Mapping[str, Dataset[Any]] = field(default_factory=dict)
    answers: Mapping[int, int] = field(default_factory=dict)
    weights_at: Callable[[int], Sequence[float]] | None = None

    @property
    def sources(self) -> tuple[SourceShare, ...]:
        """The mixture, also where there is one source."""
        return self.mixture or (SourceShare("train", len(self.train)),)  # type: ignore[arg-type]


class JoinedDataset(Dataset[Batch]):
    """Data sets of tokens one behind the other: the training data of several sources.

    Each makes a batch of its own rows (its `__getitems__`), all of the same keys and shapes; what is returned
    has them in the order that was asked for.
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
        """Return a whole batch: each tensor (B, ...)."""
        rows = np.asarray(indices)
        owners = np.searchsorted(self._ends, rows, side="right")
        batch: dict[str, Tensor] = {}
        for number in np.unique(owners).tolist():
            mine = owners == number
            dataset = self.datasets[number]
            part: Batch = dataset.__getitems__((rows[mine] - self._ends[number] + len(dataset)).tolist())
            if mine.all():
                return part
            for key, tensor in part.items():
                whole = batch.setdefault(key, tensor.new_empty((len(rows), *tensor.shape[1:])))
                whole.numpy()[mine] = tensor.numpy()  # torch would wake all its threads for a few kB
        return batch
