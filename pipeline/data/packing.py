"""Packs documents from a token store into rows of equal length, by the method that `data.packing` names.

Several documents can share a row. Position ids that restart from 0 separate them. The usual alternative, a
(B, T, T) mask, costs several times as much as attention itself. `PackedDataset` describes the entries of a
batch.

A token store consists of parts, files that were prepared independently (see prepared/part_files.py).

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
    """Documents in order, of which long ones are cut into pieces. Each piece fits into a row.

    Attributes:
        starts: (N,) offset of the piece's first token, counted over all parts.
        lengths: (N,) number of the piece's tokens.
        is_end: (N,) whether the piece ends its document; otherwise the document has at least one more token.
        documents_cut: Number of documents that are cut into several pieces.
    """

    starts: Ints
    lengths: NDArray[np.int32]
    is_end: NDArray[np.bool_]
    documents_cut: int


def concatenate_pieces(sequences: Sequence[DocumentPieces]) -> DocumentPieces:
    """Concatenate several sequences of pieces; no sequence gives no pieces."""
    return DocumentPieces(
        starts=np.concatenate([np.empty(0, np.int64), *(pieces.starts for pieces in sequences)]),
        lengths=np.concatenate([np.empty(0, np.int32), *(pieces.lengths for pieces in sequences)]),
        is_end=np.concatenate([np.empty(0, np.bool_), *(pieces.is_end for pieces in sequences)]),
        documents_cut=sum(pieces.documents_cut for pieces in sequences),
    )


def cut_documents(ends: Ints, size: int, first: int = 0) -> DocumentPieces:
    """Cut documents into pieces of at most `size` tokens.

    A last piece of a single token is left out, because nothing is predicted from it.

    Args:
        ends: (documents,) increasing offsets after the last token of each document; the first begins at 0.
        size: Maximum number of tokens in a piece.
        first: Offset that is added to the start of every piece.
    """
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    # (documents,): pieces that a token of the same document follows, and tokens of the last piece.
    full = np.maximum(ends - begins - 1, 0) // size
    rest = ends - begins - full * size
    counts = full + (rest > 1)
    # (N,): document of each piece, and number of the piece in its document.
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_end = number == full[document]
    return DocumentPieces(
        starts=begins[document] + number * size + first,
        lengths=np.where(is_end, rest[document], size).astype(np.int32),
        is_end=is_end,
        documents_cut=int((counts > 1).sum()),
    )


def assign_best_fit(lengths: NDArray[np.int32], capacity: int) -> Ints:
    """Assign items to bins by best fit, and return the bin (N,) of each item.

    Items are assigned from the longest to the shortest, each to the fullest bin in which it fits. All items
    of one length and all bins with the same room are handled together, so that millions of items take
    seconds. The result depends on the lengths alone. Bins are numbered by their first item.

    Args:
        lengths: (N,) length of each item, 1 to `capacity`.
        capacity: Largest sum of the lengths in a bin.
    """
    order = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    bins = np.empty(len(lengths), dtype=np.int64)  # bin of each item, in `order`
    bins_by_room: list[list[Ints]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if a bin has room r; integer operations find the next larger room fast
    num_bins = 0
    item = 0  # number of items that have a bin
    for length in range(capacity, 0, -1):
        unassigned = int(counts[length])
        while unassigned:
            fitting_rooms = rooms >> length
            if fitting_rooms:
                room = length + (fitting_rooms & -fitting_rooms).bit_length() - 1
                open_bins = np.concatenate(bins_by_room[room])
                bins_by_room[room] = []
                rooms &= ~(1 << room)
            else:
                room = capacity
                open_bins = np.arange(num_bins, num_bins + -(-unassigned // (capacity // length)))
                num_bins += len(open_bins)
            items_per_bin = room // length
            # Bins that get `items_per_bin` items, and the items of the one bin that gets fewer.
            full, rest = divmod(min(unassigned, items_per_bin * len(open_bins)), items_per_bin)
            groups = [
                (open_bins[:full], room - items_per_bin * length),
                (open_bins[full + bool(rest) :], room),
            ]
            bins[item : item + full * items_per_bin] = np.repeat(open_bins[:full], items_per_bin)
            item += full * items_per_bin
            unassigned -= full * items_per_bin
            if rest:
                bins[item : item + rest] = open_bins[full]
                item += rest
                unassigned -= rest
                groups.append((open_bins[full : full + 1], room - rest * length))
            for group, remaining_room in groups:
                if len(group) and remaining_room:
                    bins_by_room[remaining_room].append(group)
                    rooms |= 1 << remaining_room
    return _renumber_bins(bins, order, num_bins)


def _renumber_bins(bins: Ints, order: Ints, num_bins: int) -> Ints:
    """Renumber the bins by their first item; otherwise the first rows would contain the longest documents.

    Args:
        bins: Bin of each item, in `order`.
        order: Indices of the items.
        num_bins: Number of bins.
    """
    bin_of_item = np.empty_like(bins)
    bin_of_item[order] = bins
    first_item = np.full(num_bins, len(bins))
    np.minimum.at(first_item, bin_of_item, np.arange(len(bins)))
    new_number = np.empty(num_bins, dtype=np.int64)
    new_number[np.argsort(first_item)] = np.arange(num_bins)
    return new_number[bin_of_item]


MAX_OPEN_PARTS = 512  # parts of a data set that are mapped at once: 16 GB of JSONL


def get_max_open_parts() -> int:
    """Return the number of parts that a data set keeps mapped; the least recently used one is closed first.

    A mapped part takes one or two file descriptors, and one of the 65,530 maps that Linux allows a process.
    Mapping another part takes about 50 microseconds. Each data set may use only 1/64 of the file descriptors,
    since a process has one data set for each source.
    """
    return max(8, min(MAX_OPEN_PARTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 64))


class PackedDataset(Dataset[Batch]):
    """Map-style data set of rows; `__getitems__` returns `input_ids` and `shift_labels`, both (B, T) int64.

    `shift_labels` at position t is the token after position t, or -100 if that token is not in the loss:
    after the end of a document, in padding, and where the loss mask is 0. With `separate_documents` a batch
    also has `position_ids` (B, T) int64, which restart from 0 at every document and at the padding. Models
    use them to separate documents.

    Args:
        stores: Stores of the documents.
        sequence_length: Tokens of a row, T.
        separate_documents: Whether batches have `position_ids`.
        end_id: Id of the end-of-document token, which is also the padding.

    Attributes:
        documents_cut: Number of documents that are cut into several pieces; `None` if not counted.
        padding_share: Share of all positions that are padding, 0 to 1.
        pad_id: Token id of the padding; `None` if there is no padding.
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
        self._prepare_parts()

    def _prepare_parts(self) -> None:
        """List the parts of all stores; a part is mapped when a row of it is first read."""
        self._parts = [part for store in self.stores for part in store.parts]
        self._open_cached = lru_cache(get_max_open_parts())(self._open_part)

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
        mapped = ("_parts", "_open_cached")  # each process maps the files for itself
        return {key: value for key, value in self.__dict__.items() if key not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare_parts()

    def _make_batch(self, pair: NDArray[np.int64], begins: Ints | None) -> Batch:
        """Return a batch without copying the values.

        Args:
            pair: (2, B, T) inputs and labels.
            begins: Starts of documents and of padding in the B * T positions; `None` for no position ids.
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
    """Return the offsets (N + 1,) of N consecutive items with these sizes; the last offset is the total."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


class PiecePlacement(NamedTuple):
    """Places of the N pieces of a batch, where a place is an index into its B * T positions."""

    num_rows: int
    """Number of rows, B."""
    pieces: Ints
    """(N,) numbers of the pieces in the data set."""
    lengths: Ints
    """(N,) number of tokens of each piece."""
    row_of_piece: Ints
    """(N,) row of each piece in the batch, from 0."""
    places: Ints
    """(N,) place of each piece's first token."""
    row_ends: Ints
    """(B,) place at which the padding of each row begins."""


class PaddedRows(PackedDataset):
    """Rows of pieces, padded on the right.

    If a piece does not end its document, the label of its last token is the document's next token. The index
    takes 13 bytes per piece and 8 bytes per row in memory.
    """

    def _arrange(self, pieces: DocumentPieces, share_rows: bool, units: Ints | None = None) -> Ints:
        """Assign the pieces to rows, and set the attributes that depend on the rows.

        The `__init__` of a subclass calls this method once.

        Args:
            pieces: Pieces of all documents.
            share_rows: Whether several units share a row if they fit; otherwise each has its own row.
            units: (N,) unit of each piece, from 0 and not decreasing; pieces of one unit stay in one row.
                `None` if each piece is a unit.

        Returns:
            (N,) indices of the pieces, in the order of the rows.
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
        num_places = len(self) * self.sequence_length
        self.padding_share = 1.0 - int(self._lengths.sum()) / num_places if num_places else 0.0
        return order

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @cached_property
    def _first_tokens(self) -> Ints:
        """Offset of each part's first token, counted over all parts."""
        return compute_offsets([part.num_tokens for part in self._parts])

    def _place_pieces(self, indices: Sequence[int]) -> PiecePlacement:
        """Return the places of the pieces in a batch of these rows."""
        rows = np.asarray(indices, dtype=np.int64)
        counts = self._bounds[rows + 1] - self._bounds[rows]
        before = np.cumsum(counts) - counts  # number of pieces in the rows before each row
        pieces = np.repeat(self._bounds[rows] - before, counts) + np.arange(counts.sum())
        lengths = self._lengths[pieces].astype(np.int64)
        row_of_piece = np.repeat(np.arange(len(rows)), counts)
        tokens_before = np.cumsum(lengths) - lengths  # number of tokens before each piece, without padding
        row_lengths = np.add.reduceat(lengths, before)
        row_begins = np.arange(len(rows)) * self.sequence_length
        padding_before = row_begins - (np.cumsum(row_lengths) - row_lengths)  # in the rows before each row
        places = tokens_before + padding_before[row_of_piece]
        return PiecePlacement(
            num_rows=len(rows),
            pieces=pieces,
            lengths=lengths,
            row_of_piece=row_of_piece,
            places=places,
            row_ends=row_begins + row_lengths,
        )

    def _read_pieces(self, placed: PiecePlacement) -> NDArray[np.int64]:
        """Return the inputs and labels of a batch, (2, B, T)."""
        starts = self._starts[placed.pieces]
        parts = self._first_tokens.searchsorted(starts, side="right") - 1
        starts -= self._first_tokens[parts]
        # A document's last token has no label, because no token of the document follows.
        num_labels = placed.lengths - self._is_end[placed.pieces]
        pair = np.empty((2, placed.num_rows, self.sequence_length), dtype=np.int64)
        pair[0] = self.end_id
        pair[1] = IGNORE_INDEX
        inputs, labels = pair.reshape(2, -1)
        table = np.stack([parts, starts, placed.places, placed.lengths, num_labels], axis=1).tolist()
        for part, start, place, length, label_count in table:
            tokens, mask = self._open_cached(part)
            inputs[place : place + length] = tokens[start : start + length]
            target = tokens[start + 1 : start + 1 + label_count]
            if mask is not None:
                in_loss = mask[start + 1 : start + 1 + label_count]
                labels[place : place + label_count] = np.where(in_loss, target.astype(np.int64), IGNORE_INDEX)
            else:
                labels[place : place + label_count] = target
        return pair


class ConcatenatedRows(PackedDataset):
    """Rows of `data.packing: concatenate`: row i of a part has the part's tokens i * T to i * T + T.

    These are T + 1 tokens, of which the last one is a label only. A row can contain the end of one document
    and the start of the next, but no tokens of two parts. The last tokens of a part that do not fill a row
    are left out. A document's end is found by `end_id`, which plain text never contains: looking up every row
    in the part's `ends` would take several times as long as reading the row.
    """

    def __init__(
        self, stores: Sequence[TokenStore], sequence_length: int, separate_documents: bool, end_id: int
    ) -> None:
        super().__init__(stores, sequence_length, separate_documents, end_id)
        counts = [max(0, part.num_tokens - 1) // sequence_length for part in self._parts]
        self._first_rows = compute_offsets(counts)  # number of each part's first row

    def _open_part(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return tokens and loss mask of a part as overlapping windows (rows, T + 1), without a copy."""
        tokens, mask = super()._open_part(number)
        return self._view_windows(tokens), None if mask is None else self._view_windows(mask)

    def _view_windows(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return a view (rows, T + 1) of the values; neighbouring rows share one value."""
        size = self.sequence_length
        shape = max(0, len(values) - 1) // size, size + 1
        return as_strided(values, shape, (size * values.itemsize, values.itemsize), writeable=False)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        size = self.sequence_length
        rows = np.array(indices, dtype=np.int64)
        parts = self._first_rows.searchsorted(rows, side="right") - 1
        rows -= self._first_rows[parts]
        windows, in_loss = self._read_rows(parts, rows)  # each (B, T + 1); reads the files once
        pair = np.empty((2, len(rows), size), dtype=np.int64)
        pair[0] = windows[:, :-1]
        pair[1] = windows[:, 1:]
        if in_loss is not None:
            pair[1][~in_loss[:, 1:]] = IGNORE_INDEX
        if not self.separate_documents:
            return self._make_batch(pair, None)
        ends = np.flatnonzero(windows[:, :-1] == self.end_id)  # positions in the batch that end a document
        pair[1].reshape(-1)[ends] = IGNORE_INDEX
        return self._make_batch(pair, ends + 1)

    def _read_rows(self, parts: Ints, rows: Ints) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return copies (B, T + 1) of the tokens and loss masks, so that the batch keeps no part open.

        Args:
            parts: (B,) number of each row's part.
            rows: (B,) number of each row in its part.

        Returns:
            The tokens, and the loss masks; `None` in place of the masks if the first part has none.
        """
        tokens, mask = self._open_cached(int(parts[0]))
        if len(self._parts) == 1:
            return tokens[rows], None if mask is None else mask[rows]
        windows = np.empty((len(rows), self.sequence_length + 1), dtype=tokens.dtype)
        in_loss = None if mask is None else np.ones(windows.shape, dtype=np.bool_)
        for index, (part, row) in enumerate(zip(parts.tolist(), rows.tolist(), strict=True)):
            tokens, mask = self._open_cached(part)
            windows[index] = tokens[row]
            if in_loss is not None and mask is not None:
                in_loss[index] = mask[row]
        return windows, in_loss


class DocumentRows(PaddedRows):
    """Rows of `data.packing: best_fit` and `none`: documents, of which those longer than a row are cut.

    Args:
        stores: Stores of the documents.
        sequence_length: Tokens of a row, T.
        separate_documents: Whether batches have `position_ids` that separate documents.
        end_id: Token of the padding, which is not in the loss.
        share_rows: Whether several pieces share a row if they fit; otherwise each has its own row.
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
        pieces_by_part = [
            cut_documents(np.asarray(part.ends), sequence_length, int(first))
            for part, first in zip(self._parts, self._first_tokens, strict=False)
        ]
        self._arrange(concatenate_pieces(pieces_by_part), share_rows)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        placed = self._place_pieces(indices)
        pair = self._read_pieces(placed)
        if not self.separate_documents:
            return self._make_batch(pair, None)
        return self._make_batch(pair, np.concatenate([placed.places, placed.row_ends]))


def pack_documents(
    store: TokenStore, packing: str, sequence_length: int, separate_documents: bool, end_id: int
) -> PackedDataset:
    """Return the rows of a store's documents; the data set may be empty.

    Args:
        store: Store of the documents.
        packing: Value of `data.packing`: `concatenate`, `best_fit` or `none`.
        sequence_length: Tokens of a row.
        separate_documents: Whether batches have `position_ids` that separate documents.
        end_id: Id of the end-of-document token, which is also the padding.
    """
    if packing == "concatenate":
        return ConcatenatedRows([store], sequence_length, separate_documents, end_id)
    share_rows = {"best_fit": True, "none": False}[packing]
    return DocumentRows([store], sequence_length, separate_documents, end_id, share_rows=share_rows)


def join_datasets(datasets: Sequence[PackedDataset]) -> Dataset[Batch]:
    """Return the concatenated rows: a JoinedDataset, or the data set itself if there is only one."""
    return datasets[0] if len(datasets) == 1 else JoinedDataset(datasets)
