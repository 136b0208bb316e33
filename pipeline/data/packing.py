"""Rows of tokens for the model, out of a store of documents: torch Datasets that fetch a whole batch at once.

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
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.utils.data import Dataset

from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.best_fit import Ints, best_fit, cut_documents
from pipeline.data.bundle import Batch, JoinedDataset

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


class Stream(PackedDataset):
    """`concatenate`: row i of a part is its tokens [i T, i T + T], the last of them only predicted.

    Rows cross from document to document, never from part to part; a part's last tokens that fill no row are
    left out. Documents are told apart by `end_id`, which no document of plain text has inside: a look-up of
    every row in `ends` would cost several times what fetching the row does.
    """

    def __init__(
        self, stores: Sequence[TokenStore], sequence_length: int, separate_documents: bool, end_id: int
    ) -> None:
        super().__init__(stores, sequence_length, separate_documents, end_id)
        counts = [max(0, part.num_tokens - 1) // sequence_length for part in self._parts]
        self._first = _offsets(counts)  # row of each part

    def _open_part(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """As above, in windows (rows of the part, T + 1) that overlap by one; no copy."""
        tokens, mask = super()._open_part(number)
        return self._windows(tokens), None if mask is None else self._windows(mask)

    def _windows(self, values: NDArray[Any]) -> NDArray[Any]:
        size = self.sequence_length
        shape = max(0, len(values) - 1) // size, size + 1
        return as_strided(values, shape, (size * values.itemsize, values.itemsize), writeable=False)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch of these rows."""
        size = self.sequence_length
        rows = np.array(indices, dtype=np.int64)
        parts = self._first.searchsorted(rows, side="right") - 1
        rows -= self._first[parts]
        windows, in_loss = self._rows(parts, rows)  # each (B, T + 1), the one read of the files
        pair = np.empty((2, len(rows), size), dtype=np.int64)
        pair[0] = windows[:, :-1]
        pair[1] = windows[:, 1:]
        if in_loss is not None:
            pair[1][~in_loss[:, 1:]] = IGNORE_INDEX
        if not self.separate_documents:
            return self._batch(pair, None)
        ends = np.flatnonzero(windows[:, :-1] == self.end_id)  # places of the batch that end a document
        pair[1].reshape(-1)[ends] = IGNORE_INDEX
        return self._batch(pair, ends + 1)

    def _rows(self, parts: Ints, rows: Ints) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Copies: a batch of rows of as many parts keeps none of them open."""
        tokens, mask = self._open(int(parts[0]))
        if len(self._parts) == 1:
            return tokens[rows], None if mask is None else mask[rows]
        windows = np.empty((len(rows), self.sequence_length + 1), dtype=tokens.dtype)
        in_loss = None if mask is None else np.ones(windows.shape, dtype=np.bool_)
        for index, (part, row) in enumerate(zip(parts.tolist(), rows.tolist(), strict=True)):
            tokens, mask = self._open(part)
            windows[index] = tokens[row]
            if in_loss is not None and mask is not None:
                in_loss[index] = mask[row]
        return windows, in_loss


class JoinedStream(Stream):
    """Streams of one kind, one behind the other (`datasets`), and fetched as one: their parts are."""

    def __init__(self, datasets: Sequence[Stream]) -> None:
        self.datasets = datasets
        first = datasets[0]
        stores = [store for dataset in datasets for store in dataset.stores]
        super().__init__(stores, first.sequence_length, first.separate_documents, first.end_id)


class Bins(PackedDataset):
    """`best_fit` and `none`: documents, and pieces of those longer than a row, padded on the right.

    Keeps 13 bytes a piece and 8 a row in memory. A piece whose document goes on predicts its next token.

    Args:
        end_id: The token of padded places; nothing is predicted from it.
        share_rows: Several pieces to a row where they fit, else each has one of its own.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        sequence_length: int,
        separate_documents: bool,
        end_id: int,
        *,
        share_rows: bool,
    ) -> None:
        super().__init__(stores, sequence_length, separate_documents, end_id)
        self.pad_id = end_id
        self._first = _offsets([part.num_tokens for part in self._parts])  # they run on from part to part
        cut = [
            cut_documents(np.asarray(part.ends), sequence_length, int(first))
            for part, first in zip(self._parts, self._first, strict=False)
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
            bounds = _offsets(np.bincount(row))
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
        pair[0], pair[1] = self.end_id, IGNORE_INDEX
        inputs, labels = pair.reshape(2, -1)
        table = np.stack([parts, starts, places, lengths, predicted], axis=1).tolist()
        for part, start, place, length, followed in table:
            tokens, mask = self._open(part)
            inputs[place : place + length] = tokens[start : start + length]
            target = tokens[start + 1 : start + 1 + followed]
            if mask is not None:
                in_loss = mask[start + 1 : start + 1 + followed]
                labels[place : place + followed] = np.where(in_loss, target.astype(np.int64), IGNORE_INDEX)
            else:
                labels[place : place + followed] = target
        if not self.separate_documents:
            return self._batch(pair, None)
        return self._batch(pair, np.concatenate([places, np.arange(len(rows)) * size + row_filled]))


def pack(
    store: TokenStore, packing: str, sequence_length: int, separate_documents: bool, end_id: int
) -> PackedDataset:
    """The rows of `data.packing`: `concatenate`, `best_fit` or `none`. There may be none at all.

    Args:
        end_id: The end-of-document token.
    """
    if packing == "concatenate":
        return Stream([store], sequence_length, separate_documents, end_id)
    share_rows = {"best_fit": True, "none": False}[packing]
    return Bins([store], sequence_length, separate_documents, end_id, share_rows=share_rows)


def join(datasets: Sequence[PackedDataset]) -> Dataset[Batch]:
    """The rows of all, one behind the other; several have the attribute `datasets`."""
    if len(datasets) == 1:
        return datasets[0]
    streams = [dataset for dataset in datasets if isinstance(dataset, Stream)]
    return JoinedStream(streams) if len(streams) == len(datasets) else JoinedDataset(datasets)


def _offsets(sizes: Any) -> Ints:
    """Where each of several things one behind the other starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
