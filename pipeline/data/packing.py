"""Packs documents from a token store into rows of equal length, as `data.packing` says.

Several documents share a row and are separated by position ids that restart from 0. The usual alternative, a
(B, T, T) mask, costs a multiple of attention itself. `PackedDataset` describes the entries of a batch.

Shapes: B rows, T = sequence_length.
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
    """Documents, or pieces of long ones, in order.

    Attributes:
        starts: (N,) offset of the first token.
        lengths: (N,) number of tokens that a row contains, 2 to `size`.
        is_end: (N,) whether the piece ends its document; otherwise the document has at least one more token.
        documents_cut: Number of documents that are divided into several pieces.
    """

    starts: Ints
    lengths: NDArray[np.int32]
    is_end: NDArray[np.bool_]
    documents_cut: int


def concatenate_pieces(several: Sequence[DocumentPieces]) -> DocumentPieces:
    """Concatenate several sequences of pieces."""
    return DocumentPieces(
        starts=np.concatenate([np.empty(0, np.int64), *(pieces.starts for pieces in several)]),
        lengths=np.concatenate([np.empty(0, np.int32), *(pieces.lengths for pieces in several)]),
        is_end=np.concatenate([np.empty(0, np.bool_), *(pieces.is_end for pieces in several)]),
        documents_cut=sum(pieces.documents_cut for pieces in several),
    )


def cut_documents(ends: Ints, size: int, first: int = 0) -> DocumentPieces:
    """Divide documents into pieces of at most `size` tokens.

    A piece of a single token is left out, because nothing is predicted from it.

    Args:
        ends: (documents,) increasing offsets after the last token of each document.
        size: Maximum number of tokens in a piece.
        first: Offset of the first document, which is added to every offset.
    """
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    full = (
        np.maximum(ends - begins - 1, 0) // size
    )  # pieces that are followed by a token of the same document
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
    """Assign items to bins of capacity `size` by best fit, and return the bin (N,) of each item.

    Items are assigned from the longest to the shortest, each to the fullest bin in which it fits. All items
    of one length and all bins with the same room are handled together, so that millions of items take
    seconds. The result depends on the lengths alone. Bins are numbered by their first item.
    """
    order = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=size + 1)
    bins = np.empty(len(lengths), dtype=np.int64)  # bin of each item, in `order`
    with_room: list[list[Ints]] = [[] for _ in range(size + 1)]
    occupied = 0  # bit r is set if a bin has room for r; integer operations find the next larger room fast
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
    return _renumber_bins(bins, order, num_bins)


def _renumber_bins(bins: Ints, order: Ints, num_bins: int) -> Ints:
    """Renumber the bins by their first item; otherwise the first rows would contain the longest documents."""
    of_item = np.empty_like(bins)
    of_item[order] = bins
    first = np.full(num_bins, len(bins))
    np.minimum.at(first, of_item, np.arange(len(bins)))
    number = np.empty(num_bins, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_bins)
    return number[of_item]


MAX_OPEN = 512  # parts of a data set: 16 GB of JSONL


def get_max_open_parts() -> int:
    """Return the number of parts that a data set keeps mapped; the least recently used one is closed first.

    A map takes one or two file descriptors and one of the 65,530 maps that Linux allows a process. Mapping
    another part takes about 50 microseconds.
    """
    return max(8, min(MAX_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 64))


class PackedDataset(Dataset[Batch]):
    """Map-style data set of rows; `__getitems__` returns `input_ids` and `shift_labels`, both (B, T) int64.

    Position t of `shift_labels` is the token after position t, or -100 if it is not in the loss: after the
    end of a document, in padding, and where the loss mask is 0. With separate documents a batch also has
    `position_ids` (B, T) int64, which restart from 0 at every document and at the padding. Models use them to
    separate documents.

    Attributes:
        documents_cut: Number of documents that are divided over rows; `None` if not counted.
        padding_share: Share of all positions that are padding, 0 to 1.
        pad_id: Token of the padding; `None` if there is no padding.
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
        """Return the memory-mapped tokens and loss mask of a part."""
        part = self._parts[number]
        mask = part.loss_mask
        # Convert to plain arrays, because slicing numpy's memmap class is slow.
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
        mapped = ("_parts", "_open")  # each process maps the files for itself
        return {key: value for key, value in self.__dict__.items() if key not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def _batch(self, pair: NDArray[np.int64], begins: Ints | None) -> Batch:
        """Return a batch of inputs and labels (2, B, T).

        `begins` are the starts of documents in the B * T positions; `None` for no position ids.
        """
        inputs, labels = torch.from_numpy(pair)
        batch = {"input_ids": inputs, "shift_labels": labels}
        if begins is not None:
            size = self.sequence_length
            bounds = np.sort(np.concatenate([begins, np.arange(0, inputs.numel() + 1, size)]))
            starts = np.repeat(bounds[:-1] % size, bounds[1:] - bounds[:-1]).reshape(inputs.shape)
            batch["position_ids"] = torch.from_numpy(np.subtract(np.arange(size), starts, out=starts))
        return batch


def compute_offsets(sizes: Any) -> Ints:
    """Return the cumulative offsets of consecutive items with these sizes; the last offset is the total."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


class PiecePlacement(NamedTuple):
    """Positions of the N pieces in the B * T positions of a batch."""

    rows: int
    """Number of rows, B."""
    pieces: Ints
    """(N,) numbers of the pieces in the data set."""
    lengths: Ints
    """(N,) number of tokens of each piece."""
    of_row: Ints
    """(N,) row of each piece, from 0."""
    places: Ints
    """(N,) position of each piece's first token."""
    row_ends: Ints
    """(B,) position at which the padding of each row begins."""


class PaddedRows(PackedDataset):
    """Rows of pieces, padded on the right.

    The last token of a piece predicts the next token of its document, if there is one. The index takes 13
    bytes per piece and 8 bytes per row in memory.
    """

    def _arrange(self, pieces: DocumentPieces, share_rows: bool, units: Ints | None = None) -> Ints:
        """Assign the pieces to rows, and return their new order. Called once.

        Args:
            pieces: Pieces of all documents.
            share_rows: Whether several units share a row if they fit; otherwise each has a row of its own.
            units: (N,) unit of each piece, from 0 and not decreasing; pieces of one unit stay in one row.
                `None` if each piece is a unit.
        """
        sizes = pieces.lengths if units is None else np.bincount(units, pieces.lengths).astype(np.int32)
        row = assign_best_fit(sizes, self.sequence_length) if share_rows else np.arange(len(sizes))
        row = row if units is None else row[units]
        order = np.argsort(row, kind="stable")
        self._starts = pieces.starts[order]
        self._lengths = pieces.lengths[order]
        self._is_end = pieces.is_end[order]
        self._bounds = compute_offsets(np.bincount(row))  # row i has the pieces [bounds[i], bounds[i + 1])
        self.pad_id = self.end_id
        self.documents_cut = pieces.documents_cut
        places = len(self) * self.sequence_length
        self.padding_share = 1.0 - int(self._lengths.sum()) / places if places else 0.0
        return order

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @cached_property
    def _first(self) -> Ints:
        """Offset of each part's first token, counted over all parts."""
        return compute_offsets([part.num_tokens for part in self._parts])

    def _place(self, indices: Sequence[int]) -> PiecePlacement:
        """Return the positions of the pieces in a batch of these rows."""
        rows = np.asarray(indices, dtype=np.int64)
        counts = self._bounds[rows + 1] - self._bounds[rows]
        before = np.cumsum(counts) - counts  # number of pieces in the rows before each row
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
        """Return the inputs and labels of a batch, (2, B, T)."""
        starts = self._starts[placed.pieces]
        parts = self._first.searchsorted(starts, side="right") - 1
        starts -= self._first[parts]
        predicted = placed.lengths - self._is_end[placed.pieces]
        pair = np.empty((2, placed.rows, self.sequence_length), dtype=np.int64)
        pair[0] = self.end_id
        pair[1] = IGNORE_INDEX
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
    """Rows of `data.packing: concatenate`: row i of a part has its tokens [i T, i T + T].

    The last of these tokens is a label only. Rows contain the ends and starts of several documents, but never
    of two parts. The last tokens of a part that do not fill a row are left out. A document's end is found by
    `end_id`, which plain text never contains: looking up every row in `ends` would take several times as long
    as reading the row.
    """

    def __init__(
        self, stores: Sequence[TokenStore], sequence_length: int, separate_documents: bool, end_id: int
    ) -> None:
        super().__init__(stores, sequence_length, separate_documents, end_id)
        counts = [max(0, part.num_tokens - 1) // sequence_length for part in self._parts]
        self._first = compute_offsets(counts)  # number of each part's first row

    def _open_part(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return tokens and loss mask as overlapping windows (rows of the part, T + 1), without a copy."""
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
        windows, in_loss = self._read_rows(parts, rows)  # each (B, T + 1); reads the files once
        pair = np.empty((2, len(rows), size), dtype=np.int64)
        pair[0] = windows[:, :-1]
        pair[1] = windows[:, 1:]
        if in_loss is not None:
            pair[1][~in_loss[:, 1:]] = IGNORE_INDEX
        if not self.separate_documents:
            return self._batch(pair, None)
        ends = np.flatnonzero(windows[:, :-1] == self.end_id)  # positions in the batch that end a document
        pair[1].reshape(-1)[ends] = IGNORE_INDEX
        return self._batch(pair, ends + 1)

    def _read_rows(self, parts: Ints, rows: Ints) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return copies of the rows' tokens and loss masks, so that the batch keeps no part open."""
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
    """Rows of `data.packing: best_fit` and `none`: whole documents, and pieces of those longer than a row.

    Args:
        stores: Stores of the documents.
        sequence_length: Tokens of a row, T.
        separate_documents: Whether batches have `position_ids` that separate documents.
        end_id: Token of the padding, which is not in the loss.
        share_rows: Whether several pieces share a row if they fit; otherwise each has a row of its own.
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
    """Return the rows of a store's documents; there may be none.

    Args:
        store: Store of the documents.
        packing: Value of `data.packing`: `concatenate`, `best_fit` or `none`.
        sequence_length: Tokens of a row.
        separate_documents: Whether batches have `position_ids` that separate documents.
        end_id: Id of the end-of-document token.
    """
    if packing == "concatenate":
        return ConcatenatedRows([store], sequence_length, separate_documents, end_id)
    share_rows = {"best_fit": True, "none": False}[packing]
    return DocumentRows([store], sequence_length, separate_documents, end_id, share_rows=share_rows)


def join_datasets(datasets: Sequence[PackedDataset]) -> Dataset[Batch]:
    """Return the concatenated rows: the data set itself if there is one, else a JoinedDataset."""
    return datasets[0] if len(datasets) == 1 else JoinedDataset(datasets)
