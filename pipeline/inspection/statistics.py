"""What prepared documents amount to: how many, how long, how often the same, how they fill rows. Exact.

Goes through the stores part by part; kept in memory are 8 bytes a document (hashes, to find copies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batches import IGNORE_INDEX

if TYPE_CHECKING:
    from pipeline.data.packed import PackedDataset
    from pipeline.data.prepared.part_files import TokenStore

PLACES_AT_ONCE = 1 << 20  # tokens of rows looked at together: 16 MB


@dataclass(frozen=True)
class Lengths:
    """How many documents there are of each length, in tokens: the exact distribution, and small."""

    values: NDArray[np.int64]
    """Lengths that occur, increasing."""
    counts: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.values * self.counts).sum())

    @property
    def mean(self) -> float:
        return self.tokens / self.documents if self.documents else 0.0

    def percentile(self, percent: float) -> int:
        """The smallest length that at least this share of the documents do not exceed."""
        if self.documents == 0:
            return 0
        rank = max(1, int(np.ceil(percent / 100 * self.documents)))
        return int(self.values[np.searchsorted(np.cumsum(self.counts), rank)])


def together(several: Iterable[Lengths]) -> Lengths:
    """The documents of all of them."""
    found = [Lengths(np.empty(0, np.int64), np.empty(0, np.int64)), *several]
    values, places = np.unique(np.concatenate([each.values for each in found]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, np.concatenate([each.counts for each in found]))
    return Lengths(values, counts)


def lengths_of(stores: Iterable[TokenStore]) -> Lengths:
    """Of the documents of all the stores."""
    total = together([])
    for part in (part for store in stores for part in store.parts):
        values, counts = np.unique(np.diff(np.asarray(part.ends), prepend=0), return_counts=True)
        total = together([total, Lengths(values.astype(np.int64), counts)])
    return total


def hashes_of(stores: Iterable[TokenStore]) -> NDArray[np.uint64]:
    """The hash of each document, sorted; equal documents have equal ones."""
    parts = [np.array(part.hashes) for store in stores for part in store.parts]  # copies: none stays mapped
    hashes = np.concatenate([np.empty(0, np.uint64), *parts])
    hashes.sort()
    return hashes


def count_copies(hashes: NDArray[np.uint64]) -> int:
    """Documents beyond the first of each kind; the hashes are sorted."""
    return int((hashes[1:] == hashes[:-1]).sum())


def count_shared(hashes: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """How many of the first are among the others; both are sorted."""
    if len(others) == 0:
        return 0
    places = np.searchsorted(others, hashes)
    return int((others[np.minimum(places, len(others) - 1)] == hashes).sum())


@dataclass(frozen=True)
class RowCounts:
    """How rows are filled.

    Attributes:
        rows: Samples for the model.
        places: rows x sequence_length.
        padded: Places that hold no token of a document.
        in_loss: Places whose next token counts in the loss.
        documents_cut: Documents in more than one row; None where rows are cut wherever they are full.
    """

    rows: int
    places: int
    padded: int
    in_loss: int
    documents_cut: int | None


def count_rows(rows: PackedDataset, advance: Callable[[int], object]) -> RowCounts:
    """Looks at the labels of every row; `advance` is called with the number of rows done."""
    at_once = max(1, PLACES_AT_ONCE // rows.sequence_length)
    in_loss = 0
    for first in range(0, len(rows), at_once):
        indices = range(first, min(first + at_once, len(rows)))
        in_loss += int((rows.__getitems__(indices)["shift_labels"] != IGNORE_INDEX).sum())
        advance(len(indices))
    places = len(rows) * rows.sequence_length
    padded = round(rows.padding_share * places)
    return RowCounts(len(rows), places, padded, in_loss, rows.documents_cut)
