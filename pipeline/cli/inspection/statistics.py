"""Statistics of prepared documents: how many, how long, how often the same, how they fill rows. Exact.
Drawn as histograms and as bars of characters; images are drawn as a contact sheet.

Goes through the stores part by part; kept in memory are 8 bytes a document (hashes, to find copies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batches import IGNORE_INDEX
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.packing import PackedDataset
    from pipeline.data.prepared.part_files import TokenStore


PLACES_AT_ONCE = 1 << 20  # tokens of rows looked at together: 16 MB
BINS = 48
BAR = 40  # characters of the longest one
COLOURS = ("#2a6f97", "#e07a1f", "#4c956c", "#9b5094", "#b23a48", "#6c757d")
MOST_SOURCES = len(COLOURS)  # with a line of its own; the rest are one


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


def draw_lengths(named: dict[str, Lengths], sequence_length: int, path: Path) -> None:
    """Two panels over the length of a document: how many documents, and which share of all tokens.

    Args:
        named: Each source's lengths; sources without documents are left out.
        sequence_length: Tokens of a row, drawn as a line.
        path: Of the PNG.

    Raises:
        ConfigError: it cannot be written.
    """
    named = _few({name: lengths for name, lengths in named.items() if lengths.documents})
    figure, (above, below) = _subplots(2, 1, (8, 6.2), sharex=True)
    longest = max([sequence_length] + [int(lengths.values[-1]) for lengths in named.values()])
    shortest = min([sequence_length] + [int(lengths.values[0]) for lengths in named.values()])
    edges = np.geomspace(max(1, shortest), longest + 1, BINS + 1)
    edges = np.unique(np.ceil(edges))  # whole tokens: narrower bins would be empty by turns
    total = sum(lengths.tokens for lengths in named.values()) or 1
    for colour, (name, lengths) in zip(COLOURS, named.items(), strict=False):
        documents, _ = np.histogram(lengths.values, edges, weights=lengths.counts)
        tokens, _ = np.histogram(lengths.values, edges, weights=lengths.counts * lengths.values)
        for axes, heights in ((above, documents), (below, 100 * tokens / total)):
            axes.stairs(heights, edges, color=colour, fill=len(named) == 1, label=name, lw=1.6)
    for axes in (above, below):
        axes.axvline(sequence_length, color="#333333", ls="--", lw=1)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    below.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    above.annotate(
        f"sequence_length {sequence_length:,}",
        (sequence_length, 1.01),
        xycoords=("data", "axes fraction"),
        ha="center",
        fontsize=9,
    )
    above.set_ylabel("documents")
    below.set_ylabel("tokens (% of all)")
    below.set_xlabel("length of a document (tokens)")
    if len(named) > 1:
        above.legend(frameon=False, fontsize=9)
    _save(figure, path)


def _few(named: dict[str, Lengths]) -> dict[str, Lengths]:
    """The largest sources, and all others together."""
    if len(named) <= MOST_SOURCES:
        return named
    by_size = sorted(named, key=lambda name: -named[name].documents)
    kept = set(by_size[: MOST_SOURCES - 1])
    rest = [lengths for name, lengths in named.items() if name not in kept]
    shown = {name: lengths for name, lengths in named.items() if name in kept}
    return shown | {f"{len(rest)} others": together(rest)}


def draw_contact_sheet(images: Sequence[NDArray[np.float32]], titles: Sequence[str], path: Path) -> None:
    """Images (H, W, 1 or 3), 0 to 1, in rows of eight with their titles.

    Raises:
        ConfigError: it cannot be written.
    """
    columns = min(8, len(images))
    lines = -(-len(images) // columns)
    figure, grid = _subplots(lines, columns, (1.5 * columns, 1.72 * lines), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, image, title in zip(grid.flat, images, titles, strict=False):
        is_grey = image.shape[-1] == 1
        # Few pixels stay visible as such, many are averaged.
        smooth = "nearest" if max(image.shape) < 100 else "antialiased"
        axes.imshow(
            image[..., 0] if is_grey else image,
            cmap="gray" if is_grey else None,
            vmin=0,
            vmax=1,
            interpolation=smooth,
        )
        axes.set_title(title if len(title) <= 18 else title[:17] + "…", fontsize=8, pad=3)
    _save(figure, path)


def bars(labels: Sequence[str], counts: Sequence[int]) -> list[str]:
    """A line of characters for each count; the longest has BAR of them."""
    most = max([*counts, 1])
    width, digits = max(map(len, labels), default=0), max(len(f"{count:,}") for count in [*counts, 0])
    return [
        f"{label:>{width}}  {count:>{digits},}  {'█' * max(round(BAR * count / most), min(count, 1))}"
        for label, count in zip(labels, counts, strict=True)
    ]


def length_bars(lengths: Lengths) -> list[str]:
    """Documents by length, a line for each doubling of it."""
    if lengths.documents == 0:
        return []
    powers = np.floor(np.log2(np.maximum(lengths.values, 1))).astype(np.int64)
    counts = np.bincount(powers, weights=lengths.counts).astype(np.int64)
    shown = range(int(powers.min()), len(counts))
    return bars([f"{2**power:,} to {2 ** (power + 1) - 1:,}" for power in shown], counts[shown].tolist())


def _subplots(lines: int, columns: int, size: tuple[float, float], **how: Any) -> tuple[Any, Any]:
    """Without pyplot, which would look for a screen and keep every figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", dpi=120)
    return figure, figure.subplots(lines, columns, **how)


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(
            f"--output {path.parent}: cannot be written: {error.strerror}; choose another folder"
        ) from error
