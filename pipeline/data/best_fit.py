"""Which pieces of documents share a row: best-fit decreasing, as in Ding et al. 2024, "Fewer Truncations".

Works on lengths alone. Documents longer than a row are cut first; see `cut_documents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
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


def joined(several: Sequence[Pieces]) -> Pieces:
    """The pieces of all, one behind the other."""
    return Pieces(
        starts=np.concatenate([np.empty(0, np.int64), *(pieces.starts for pieces in several)]),
        lengths=np.concatenate([np.empty(0, np.int32), *(pieces.lengths for pieces in several)]),
        is_end=np.concatenate([np.empty(0, np.bool_), *(pieces.is_end for pieces in several)]),
        documents_cut=sum(pieces.documents_cut for pieces in several),
    )


def cut_documents(ends: Ints, size: int, first: int = 0) -> Pieces:
    """The documents that end at `ends` (offsets, increasing), in pieces of at most `size` tokens.

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
    return Pieces(
        starts=begins[document] + number * size + first,
        lengths=np.where(is_end, rest[document], size).astype(np.int32),
        is_end=is_end,
        documents_cut=int((counts > 1).sum()),
    )


def best_fit(lengths: NDArray[np.int32], size: int) -> Ints:
    """The bin (N,) that each length goes to; the bins hold `size` each and are numbered by their first item.

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
    """The bins in the order of the items again. Else the first rows would hold the longest documents."""
    of_item = np.empty_like(bins)
    of_item[order] = bins
    first = np.full(num_bins, len(bins))
    np.minimum.at(first, of_item, np.arange(len(bins)))
    number = np.empty(num_bins, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_bins)
    return number[of_item]
