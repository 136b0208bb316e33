"""Rows of tokens for the model, out of a store of documents: torch Datasets that fetch a whole batch at once.

Shapes: B rows, T = sequence_length. What a batch holds is said under `PackedDataset`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from pipeline.data.best_fit import Ints, best_fit, cut_documents
from pipeline.data.bundle import Batch

IGNORED = -100  # the label that counts in no loss


class TokenPart(Protocol):
    """Documents one behind the other."""

    @property
    def tokens(self) -> NDArray[Any]:
        """(n,) unsigned integers, each document with its end-of-document token."""

    @property
    def ends(self) -> NDArray[Any]:
        """(documents,) int64: where each document ends, increasing."""

    @property
    def learned(self) -> NDArray[Any] | None:
        """(n,), 0 where a token is read and not learned; None: all are learned."""


class TokenStore(Protocol):
    """Parts that can be sent to another process and are mapped there."""

    @property
    def parts(self) -> Sequence[TokenPart]: ...


class PackedDataset(Dataset[Batch]):
    """Map-style; `__getitems__` returns a batch of `input_ids` and `shift_labels`, both (B, T) int64.

    Position t of `shift_labels` is the token that comes after position t, or -100 where nothing is to be
    predicted: behind a document's end, in padding, and where the token is not one to be learned. With
    separate documents there are also `position_ids` (B, T) int64, which start from 0 at every document (and at
    the padding), by which models keep documents apart.

    Attributes:
        documents_cut: Documents that do not lie whole in one row; None where that is not counted.
        padding_share: Part of all places that hold no token of a document, 0 to 1.
    """

    documents_cut: int | None = None
    padding_share = 0.0

    def __init__(self, store: TokenStore, sequence_length: int, separate_documents: bool) -> None:
        self.store = store
        self.sequence_length = sequence_length
        self.separate_documents = separate_documents
        self._map()

    def _map(self) -> None:
        parts = self.store.parts
        # Plain arrays: slices of numpy's memmap class are slow.
        self._tokens = [np.asarray(part.tokens) for part in parts]
        self._ends = [np.asarray(part.ends) for part in parts]
        masks = [part.learned for part in parts]
        self._learned = [np.asarray(mask).view(np.bool_) for mask in masks if mask is not None]
        assert len(self._learned) in (0, len(parts)), "a mask for all parts, or for none"

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
        mapped = ("_tokens", "_ends", "_learned")  # each process maps the files itself
        return {key: value for key, value in self.__dict__.items() if key not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def _batch(self, pair: NDArray[np.int64], begins: Ints | None) -> Batch:
        """pair (2, B, T): inputs and labels; begins: where documents start in the B * T places, increasing."""
        inputs, labels = torch.from_numpy(pair)
        batch = {"input_ids": inputs, "shift_labels": labels}
        if begins is not None:
            batch["position_ids"] = torch.from_numpy(_restarting(begins, inputs.numel())).view_as(inputs)
        return batch


class Stream(PackedDataset):
    """`concatenate`: row i of a part is its tokens [i T, i T + T], the last of them only predicted.

    Rows cross from document to document, never from part to part; a part's last tokens that fill no row are
    left out.
    """

    def __init__(self, store: TokenStore, sequence_length: int, separate_documents: bool) -> None:
        super().__init__(store, sequence_length, separate_documents)
        rows = [max(0, len(tokens) - 1) // sequence_length for tokens in self._tokens]
        self._first = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])  # row of each part

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch of these rows."""
        size = self.sequence_length
        rows = np.asarray(indices, dtype=np.int64)
        of_part = self._first.searchsorted(rows, side="right") - 1
        starts = ((rows - self._first[of_part]) * size).tolist()
        parts = of_part.tolist()
        windows = np.empty((len(parts), size + 1), dtype=self._tokens[parts[0]].dtype)
        for window, part, start in zip(windows, parts, starts, strict=True):
            window[:] = self._tokens[part][start : start + size + 1]
        pair = np.empty((2, len(parts), size), dtype=np.int64)
        pair[0] = windows[:, :-1]
        pair[1] = windows[:, 1:]
        if self._learned:
            for labels, part, start in zip(pair[1], parts, starts, strict=True):
                labels[~self._learned[part][start + 1 : start + size + 1]] = IGNORED
        if not self.separate_documents:
            return self._batch(pair, None)
        found = []
        for row, (part, start) in enumerate(zip(parts, starts, strict=True)):
            ends = self._ends[part]
            low, high = ends.searchsorted((start + 1, start + size + 1))
            found.append(ends[low:high] + (row * size - start))
        ends = np.concatenate(found)  # as places of this batch
        pair[1].reshape(-1)[ends - 1] = IGNORED
        return self._batch(pair, np.sort(np.concatenate([ends, np.arange(len(parts)) * size])))


class Bins(PackedDataset):
    """`best_fit` and `none`: documents, and pieces of those longer than a row, padded on the right.

    Keeps 13 bytes a piece and 8 a row in memory. A piece whose document goes on predicts the next token of it.

    Args:
        share_rows: Several pieces to a row where they fit, else each has one of its own.
        pad_id: The token of padded places; nothing attends to it or is predicted from it.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        separate_documents: bool,
        *,
        share_rows: bool,
        pad_id: int,
    ) -> None:
        super().__init__(store, sequence_length, separate_documents)
        self.pad_id = pad_id
        # Offsets run on from part to part.
        self._first = np.concatenate([[0], np.cumsum([len(t) for t in self._tokens], dtype=np.int64)])
        cut = [
            cut_documents(ends, sequence_length, int(first))
            for ends, first in zip(self._ends, self._first, strict=False)
        ]
        self._starts = np.concatenate([np.empty(0, np.int64), *(pieces.starts for pieces in cut)])
        self._lengths = np.concatenate([np.empty(0, np.int32), *(pieces.lengths for pieces in cut)])
        self._is_end = np.concatenate([np.empty(0, np.bool_), *(pieces.is_end for pieces in cut)])
        self.documents_cut = sum(pieces.documents_cut for pieces in cut)
        bounds = np.arange(len(self._lengths) + 1)
        if share_rows:
            row = best_fit(self._lengths, sequence_length)
            order = np.argsort(row, kind="stable")
            self._starts, self._lengths = self._starts[order], self._lengths[order]
            self._is_end = self._is_end[order]
            bounds = np.concatenate([[0], np.cumsum(np.bincount(row))])
        self._bounds = bounds  # row i holds the pieces [bounds[i], bounds[i + 1])
        places = len(self) * sequence_length
        self.padding_share = 1.0 - int(self._lengths.sum()) / places if places else 0.0

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch of these rows."""
        size = self.sequence_length
        rows = np.asarray(indices, dtype=np.int64)
        counts = self._bounds[rows + 1] - self._bounds[rows]
        before = np.cumsum(counts) - counts  # pieces of this batch before each row's
        pieces = np.repeat(self._bounds[rows] - before, counts) + np.arange(counts.sum())
        lengths = self._lengths[pieces].astype(np.int64)
        filled = np.cumsum(lengths)
        of_row = np.repeat(np.arange(len(rows)), counts)
        row_filled = np.add.reduceat(lengths, before)
        places = filled - lengths + (of_row * size - (np.cumsum(row_filled) - row_filled)[of_row])
        starts = self._starts[pieces]
        parts = self._first.searchsorted(starts, side="right") - 1
        starts -= self._first[parts]
        predicted = lengths - self._is_end[pieces]
        pair = np.empty((2, len(rows), size), dtype=np.int64)
        pair[0], pair[1] = self.pad_id, IGNORED
        inputs, labels = pair.reshape(2, -1)
        table = np.stack([parts, starts, places, lengths, predicted], axis=1).tolist()
        for part, start, place, length, followed in table:
            tokens = self._tokens[part]
            inputs[place : place + length] = tokens[start : start + length]
            target = tokens[start + 1 : start + 1 + followed]
            if self._learned:
                is_learned = self._learned[part][start + 1 : start + 1 + followed]
                labels[place : place + followed] = np.where(is_learned, target.astype(np.int64), IGNORED)
            else:
                labels[place : place + followed] = target
        if not self.separate_documents:
            return self._batch(pair, None)
        padding = np.arange(len(rows)) * size + row_filled
        return self._batch(pair, np.sort(np.concatenate([places, padding])))


def pack(
    store: TokenStore, packing: str, sequence_length: int, separate_documents: bool, pad_id: int = 0
) -> PackedDataset:
    """The rows of `data.packing`: `concatenate`, `best_fit` or `none`. There may be none at all."""
    if packing == "concatenate":
        return Stream(store, sequence_length, separate_documents)
    assert packing in ("best_fit", "none"), packing
    return Bins(
        store, sequence_length, separate_documents, share_rows=packing == "best_fit", pad_id=pad_id
    )


def _restarting(begins: Ints, total: int) -> Ints:
    """0, 1, 2, ... from each of `begins` (increasing, the first is 0; equal ones and `total` count once)."""
    lengths = np.diff(begins, append=total)
    positions = np.arange(total)
    positions -= np.repeat(begins, lengths)
    return positions

