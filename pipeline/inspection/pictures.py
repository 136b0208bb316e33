"""Draws: document lengths as histograms, images as a contact sheet; and bars of characters for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.inspection.statistics import Lengths, together

BINS = 48
BAR = 40  # characters of the longest one
COLOURS = ("#2a6f97", "#e07a1f", "#4c956c", "#9b5094", "#b23a48", "#6c757d")
MOST_SOURCES = len(COLOURS)  # with a line of its own; the rest are one


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
