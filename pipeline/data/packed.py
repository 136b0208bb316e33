"""What rows of tokens have in common: a torch Dataset that fetches a whole batch at once out of mapped files.

Shapes: B rows, T = sequence_length. What a batch holds is said under `PackedDataset`.
"""

from __future__ import annotations

import resource
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from pipeline.data.best_fit import Ints
from pipeline.data.bundle import Batch

if TYPE_CHECKING:
    from pipeline.data.prepared.part_files import TokenStore

MOST_OPEN = 512  # parts of a data set: 16 GB of JSONL


def parts_kept_open() -> int:
    """How many parts a data set keeps mapped, the last used ones: a descriptor or two each."""
    return max(8, min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 64))


class PackedDataset(Dataset[Batch]):
    """Map-style; `__getitems__` returns a batch of `input_ids` and `shift_labels`, both (B, T) int64.

    Position t of `shift_labels` is the token that comes after position t, or -100 where nothing is to be
    predicted: behind a document's end, in padding, and where the token counts in no loss. With
    separate documents there are also `position_ids` (B, T) int64, which start from 0 at every document and
    at the padding; models keep documents apart by them.

    Attributes:
        documents_cut: Documents that do not lie whole in one row; None where that is not counted.
        padding_share: Part of all places that hold no token of a document, 0 to 1.
        pad_id: The token of those places; None where there are none.
    """

    documents_cut: int | None = None
    padding_share = 0.0
    pad_id: int | None = None

    is_deterministic = True  # draws no random numbers

    def __init__(
        self, stores: Sequence[TokenStore], sequence_length: int, separate_documents: bool, end_id: int
    ) -> None:
        self.stores = stores
        self.sequence_length = sequence_length
        self.separate_documents = separate_documents
        self.end_id = end_id
        self._map()

    def _map(self) -> None:
        self._parts = [part for store in self.stores for part in store.parts]
        self._open = lru_cache(parts_kept_open())(self._open_part)

    def _open_part(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Tokens and loss mask of a part, mapped."""
        part = self._parts[number]
        mask = part.loss_mask
        # Plain arrays: slices of numpy's memmap class are slow.
        return np.asarray(part.tokens), None if mask is None else np.asarray(mask).view(np.bool_)

    @abstractmethod
    def __len__(self) -> int:
        """Rows."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch of these rows."""

    def __getitem__(self, index: int) -> Batch:
        """One row: each (T,)."""
        return {key: rows[0] for key, rows in self.__getitems__([index]).items()}

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_parts", "_open")  # each process maps the files itself
        return {key: value for key, value in self.__dict__.items() if key not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def _batch(self, pair: NDArray[np.int64], begins: Ints | None) -> Batch:
        """pair (2, B, T): inputs and labels; begins: of documents in the B * T places, besides the rows'."""
        inputs, labels = torch.from_numpy(pair)
        batch = {"input_ids": inputs, "shift_labels": labels}
        if begins is not None:
            size = self.sequence_length
            bounds = np.sort(np.concatenate([begins, np.arange(0, inputs.numel() + 1, size)]))
            starts = np.repeat(bounds[:-1] % size, bounds[1:] - bounds[:-1]).reshape(inputs.shape)
            batch["position_ids"] = torch.from_numpy(np.subtract(np.arange(size), starts, out=starts))
        return batch


def offsets(sizes: Any) -> Ints:
    """Where each of several things one behind the other starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
