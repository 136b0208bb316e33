"""Rows of tokens for the model, out of a store of documents: the ways of `data.packing`.

Shapes: B rows, T = sequence_length. What a batch holds is said under `PackedDataset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.utils.data import Dataset

from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.best_fit import Ints, cut_documents, joined
from pipeline.data.bundle import Batch, JoinedDataset
from pipeline.data.packed import PackedDataset, offsets
from pipeline.data.piece_rows import PieceRows

if TYPE_CHECKING:
    from pipeline.data.prepared.part_files import TokenStore


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
        self._first = offsets(counts)  # row of each part

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


class Bins(PieceRows):
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
        self._arrange(joined(cut), share_rows)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch of these rows."""
        placed = self._place(indices)
        pair = self._fill(placed)
        if not self.separate_documents:
            return self._batch(pair, None)
        return self._batch(pair, np.concatenate([placed.places, placed.row_ends]))


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
