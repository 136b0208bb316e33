"""Rows of tokens for the model, out of a store of documents: the ways of `data.packing`.

Shapes: B rows, T = sequence_length. What a batch holds is said under `PackedDataset`.
"""

from __future__ import annotations

import resource
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.utils.data import Dataset

from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.bundle import Batch, JoinedDataset

if TYPE_CHECKING:
    from pipeline.data.prepared.part_files import TokenStore


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DocumentPieces:
    """Documents, or parts of them, in their order.

    Attributes:
        starts: (N,) offset of the first token.
        lengths: (N,) tokens that take a place in a row, 2 to `size`.
        is_end: (N,) whether the piece ends its document; otherwise one more token of it follows.
        documents_cut: Documents that are in more than one piece.
    """

    starts: Ints
    lengths: NDArray[np.int32]
    is_end: NDArray[np.bool_]
    documents_cut: int


def concatenate_pieces(several: Sequence[DocumentPieces]) -> DocumentPieces:
    """Return the pieces of all, one behind the other."""
    return DocumentPieces(
        starts=np.concatenate([np.empty(0, np.int64), *(pieces.starts for pieces in several)]),
        lengths=np.concatenate([np.empty(0, np.int32), *(pieces.lengths for pieces in several)]),
        is_end=np.concatenate([np.empty(0, np.bool_), *(pieces.is_end for pieces in several)]),
        documents_cut=sum(pieces.documents_cut for pieces in several),
    )


def cut_documents(ends: Ints, size: int, first: int = 0) -> DocumentPieces:
    """Return the documents that end at `ends` (offsets, increasing), in pieces of at most `size` tokens.

    A single last token is left out: nothing is predicted from it. So is a document of one token.

    Args:
        first: Where the first document starts; added to every offset.
    """
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    full = np.maximum(ends - begins - 1, 0) // size  # pieces with a token of the same document behind them
    rest = ends - begins - full * size
    counts = full + (rest > 1)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_end = number == full[document]
    return DocumentPieces(
        starts=begins[document] + number * size + first,
        lengths=np.where(is_end, rest[document], size).astype(np.int32),
        is_end=is_end,
        documents_cut=int((counts > 1).sum()),
    )


def assign_best_fit(lengths: NDArray[np.int32], size: int) -> Ints:
    """Return the bin (N,) of each length; bins hold `size` each and are numbered by their first item.

    Every item, the longest first, goes to the fullest bin it fits in. All items of a length and all bins with
    the same room are one step, so millions take seconds; the result depends on the lengths alone.
    """
    order = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=size + 1)
    bins = np.empty(len(lengths), dtype=np.int64)  # of the items in `order`
    with_room: list[list[Ints]] = [[] for _ in range(size + 1)]
    occupied = 0  # bit r is set where a bin has room for r: the next larger one is found in C
    num_bins = item = 0
    for length in range(size, 0, -1):
        left = int(counts[length])
        while left:
            reachable = occupied >> length
            if reachable:
                room = length + (reachable & -reachable).bit_length() - 1
                open_bins = np.concatenate(with_room[room])
                with_room[room] = []
                occupied &= ~(1 << room)
            else:
                room = size
                open_bins = np.arange(num_bins, num_bins + -(-left // (size // length)))
                num_bins += len(open_bins)
            each = room // length
            whole, rest = divmod(min(left, each * len(open_bins)), each)
            groups = [(open_bins[:whole], room - each * length), (open_bins[whole + bool(rest) :], room)]
            bins[item : item + whole * each] = np.repeat(open_bins[:whole], each)
            item += whole * each
            left -= whole * each
            if rest:
                bins[item : item + rest] = open_bins[whole]
                item += rest
                left -= rest
                groups.append((open_bins[whole : whole + 1], room - rest * length))
            for group, remaining in groups:
                if len(group) and remaining:
                    with_room[remaining].append(group)
                    occupied |= 1 << remaining
    return _by_first_item(bins, order, num_bins)


def _by_first_item(bins: Ints, order: Ints, num_bins: int) -> Ints:
    """Return the bins in the order of the items. Else the first rows would hold the longest documents."""
    of_item = np.empty_like(bins)
    of_item[order] = bins
    first = np.full(num_bins, len(bins))
    np.minimum.at(first, of_item, np.arange(len(bins)))
    number = np.empty(num_bins, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_bins)
    return number[of_item]


MOST_OPEN = 512  # parts of a data set: 16 GB of JSONL


def get_max_open_parts() -> int:
    """Return how many parts a data set keeps mapped, the last used ones: a descriptor or two each."""
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
        self._open = lru_cache(get_max_open_parts())(self._open_part)

    def _open_part(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return tokens and loss mask of a part, mapped."""
        part = self._parts[number]
        mask = part.loss_mask
        # Plain arrays: slices of numpy's memmap class are slow.
        return np.asarray(part.tokens), None if mask is None else np.asarray(mask).view(np.bool_)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""

    def __getitem__(self, index: int) -> Batch:
        """Return one row: each (T,)."""
        return {key: rows[0] for key, rows in self.__getitems__([index]).items()}

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_parts", "_open")  # each process maps the files itself
        return {key: value for key, value in self.__dict__.items() if key not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def _batch(self, pair: NDArray[np.int64], begins: Ints | None) -> Batch:
        """Make a batch of inputs and labels (2, B, T); begins: of documents in the B * T places."""
        inputs, labels = torch.from_numpy(pair)
        batch = {"input_ids": inputs, "shift_labels": labels}
        if begins is not None:
            size = self.sequence_length
            bounds = np.sort(np.concatenate([begins, np.arange(0, inputs.numel() + 1, size)]))
            starts = np.repeat(bounds[:-1] % size, bounds[1:] - bounds[:-1]).reshape(inputs.shape)
            batch["position_ids"] = torch.from_numpy(np.subtract(np.arange(size), starts, out=starts))
        return batch


def compute_offsets(sizes: Any) -> Ints:
    """Return where each of several things one behind the other starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


class PiecePlacement(NamedTuple):
    """Where the N pieces of a batch of B rows lie in its B * T places."""

    rows: int
    pieces: Ints
    """(N,) their numbers."""
    lengths: Ints
    """(N,)"""
    of_row: Ints
    """(N,) the row of each, from 0."""
    places: Ints
    """(N,) where each begins."""
    row_ends: Ints
    """(B,) where the padding of each row begins."""


class PaddedRows(PackedDataset):
    """Rows of pieces, padded on the right. A piece whose document goes on predicts its next token.

    Keeps 13 bytes a piece and 8 a row in memory.
    """

    def _arrange(self, pieces: DocumentPieces, share_rows: bool, units: Ints | None = None) -> Ints:
        """Put pieces in rows, once; return their new order.

        Args:
            share_rows: Several units to a row where they fit, else each has one of its own.
            units: (N,) from 0, not decreasing: pieces of one unit stay together. None: each is one.
        """
        sizes = pieces.lengths if units is None else np.bincount(units, pieces.lengths).astype(np.int32)
        row = assign_best_fit(sizes, self.sequence_length) if share_rows else np.arange(len(sizes))
        row = row if units is None else row[units]
        order = np.argsort(row, kind="stable")
        self._starts, self._lengths = pieces.starts[order], pieces.lengths[order]
        self._is_end = pieces.is_end[order]
        self._bounds = compute_offsets(np.bincount(row))  # row i holds the pieces [bounds[i], bounds[i + 1])
        self.pad_id = self.end_id
        self.documents_cut = pieces.documents_cut
        places = len(self) * self.sequence_length
        self.padding_share = 1.0 - int(self._lengths.sum()) / places if places else 0.0
        return order

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @cached_property
    def _first(self) -> Ints:
        """Where the tokens of each part begin; they run on from part to part."""
        return compute_offsets([part.num_tokens for part in self._parts])

    def _place(self, indices: Sequence[int]) -> PiecePlacement:
        rows = np.asarray(indices, dtype=np.int64)
        counts = self._bounds[rows + 1] - self._bounds[rows]
        before = np.cumsum(counts) - counts  # pieces of this batch before each row's
        pieces = np.repeat(self._bounds[rows] - before, counts) + np.arange(counts.sum())
        lengths = self._lengths[pieces].astype(np.int64)
        filled = np.cumsum(lengths)
        of_row = np.repeat(np.arange(len(rows)), counts)
        row_filled = np.add.reduceat(lengths, before)
        row_begins = np.arange(len(rows)) * self.sequence_length
        places = filled - lengths + (row_begins - (np.cumsum(row_filled) - row_filled))[of_row]
        return PiecePlacement(
            rows=len(rows),
            pieces=pieces,
            lengths=lengths,
            of_row=of_row,
            places=places,
            row_ends=row_begins + row_filled,
        )

    def _fill(self, placed: PiecePlacement) -> NDArray[np.int64]:
        """Return inputs and labels (2, B, T)."""
        starts = self._starts[placed.pieces]
        parts = self._first.searchsorted(starts, side="right") - 1
        starts -= self._first[parts]
        predicted = placed.lengths - self._is_end[placed.pieces]
        pair = np.empty((2, placed.rows, self.sequence_length), dtype=np.int64)
        pair[0], pair[1] = self.end_id, IGNORE_INDEX
        inputs, labels = pair.reshape(2, -1)
        table = np.stack([parts, starts, placed.places, placed.lengths, predicted], axis=1).tolist()
        for part, start, place, length, followed in table:
            tokens, mask = self._open(part)
            inputs[place : place + length] = tokens[start : start + length]
            target = tokens[start + 1 : start + 1 + followed]
            if mask is not None:
                in_loss = mask[start + 1 : start + 1 + followed]
                labels[place : place + followed] = np.where(in_loss, target.astype(np.int64), IGNORE_INDEX)
            else:
                labels[place : place + followed] = target
        return pair


class ConcatenatedRows(PackedDataset):
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
        self._first = compute_offsets(counts)  # row of each part

    def _open_part(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return both in windows (rows of the part, T + 1) that overlap by one; no copy."""
        tokens, mask = super()._open_part(number)
        return self._windows(tokens), None if mask is None else self._windows(mask)

    def _windows(self, values: NDArray[Any]) -> NDArray[Any]:
        size = self.sequence_length
        shape = max(0, len(values) - 1) // size, size + 1
        return as_strided(values, shape, (size * values.itemsize, values.itemsize), writeable=False)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
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
        """Return copies: a batch of rows of as many parts keeps none of them open."""
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


class DocumentRows(PaddedRows):
    """`best_fit` and `none`: documents, and pieces of those longer than a row.

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
        cut = [
            cut_documents(np.asarray(part.ends), sequence_length, int(first))
            for part, first in zip(self._parts, self._first, strict=False)
        ]
        self._arrange(concatenate_pieces(cut), share_rows)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        placed = self._place(indices)
        pair = self._fill(placed)
        if not self.separate_documents:
            return self._batch(pair, None)
        return self._batch(pair, np.concatenate([placed.places, placed.row_ends]))


def pack_documents(
    store: TokenStore, packing: str, sequence_length: int, separate_documents: bool, end_id: int
) -> PackedDataset:
    """Return the rows of `data.packing`: `concatenate`, `best_fit` or `none`. There may be none at all.

    Args:
        end_id: The end-of-document token.
    """
    if packing == "concatenate":
        return ConcatenatedRows([store], sequence_length, separate_documents, end_id)
    share_rows = {"best_fit": True, "none": False}[packing]
    return DocumentRows([store], sequence_length, separate_documents, end_id, share_rows=share_rows)


def join_datasets(datasets: Sequence[PackedDataset]) -> Dataset[Batch]:
    """Return the rows of all, one behind the other; several have the attribute `datasets`."""
    return datasets[0] if len(datasets) == 1 else JoinedDataset(datasets)
