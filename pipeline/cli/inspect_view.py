"""Shows training data: statistics, text, conversations and images, and what of it counts in the loss.

Tokens that count in the loss stand out, in colour or in brackets. A token counts where it is a target: where
the label of the place before it is not -100.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from pipeline.cli.screen import Screen, percent
from pipeline.data.batches import IGNORE_INDEX, Batch
from pipeline.data.images.dataset import describe
from pipeline.data.preference_layouts import CHOSEN, KIND_NAMES, MISMATCHED, REJECTED
from pipeline.errors import ConfigError, printable

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.data.packing import PackedDataset
    from pipeline.data.prepared.part_files import TokenStore
    from pipeline.data.prepared.prepare import PreparedSource

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


IN_LOSS, CONTEXT, MARK = "bold green", "dim", "cyan"
OF_KIND = {CHOSEN: IN_LOSS, REJECTED: "bold red", MISMATCHED: "bold yellow"}
OPEN, CLOSE = "⟦", "⟧"
MOST_TOKENS = 2048  # of one row
MOST_CHARACTERS = 600  # of one document


def show_documents(screen: Screen, sources: Sequence[PreparedSource]) -> dict[str, Lengths]:
    """Counts and lengths; returns each source's lengths."""
    rows, lengths = [], {}
    for source in sources:
        found = lengths_of([source.train, source.eval])
        held_out = lengths_of([source.eval]).documents
        lengths[source.name] = found
        rows.append(
            [
                source.name,
                f"{found.documents:,}",
                f"{found.tokens:,}",
                f"{held_out:,} ({percent(held_out, found.documents)})",
                f"{found.mean:,.0f}",
                *(f"{found.percentile(share):,}" for share in (50, 95, 100)),
            ]
        )
    screen.title("Documents")
    columns = ["source", "documents", "tokens", "held out", "mean tokens", "median", "95 %", "longest"]
    screen.table(columns, rows)
    for source in sources:
        for line in source.tally.lines():
            screen.line(f"{source.name}: {line}")
    return lengths


def show_copies(screen: Screen, sources: Sequence[PreparedSource], eval_sets: Sequence[str]) -> None:
    """Exact copies within and across sources, and of training documents in what they are tested with."""
    screen.title("Exact copies")
    everything = []
    for source in sources:
        hashes = hashes_of([source.train, source.eval])
        everything.append(hashes)
        copies = count_copies(hashes)
        screen.line(
            f"{source.name}: {copies:,} of {len(hashes):,} documents ({percent(copies, len(hashes))})"
        )
    if len(sources) > 1:
        hashes = np.sort(np.concatenate(everything))
        copies = count_copies(hashes)
        del everything
        screen.line(f"all together: {copies:,} of {len(hashes):,} ({percent(copies, len(hashes))})")
    trained = hashes_of([source.train for source in sources])
    for source in sources:
        held_out = hashes_of([source.eval])
        shared = count_shared(held_out, trained)
        if source.name in eval_sets or shared:
            screen.line(
                f"{source.name}: {shared:,} of {len(held_out):,} held-out documents are also trained on"
            )


def show_rows(screen: Screen, datasets: Mapping[str, PackedDataset], sequence_length: int) -> None:
    """How the training rows of each source are filled."""
    with screen.progress("looking at rows", sum(map(len, datasets.values()))) as advance:
        counted = [count_rows(dataset, advance) for dataset in datasets.values()]
    table = [[name, *_row_cells(counts)] for name, counts in zip(datasets, counted, strict=True)]
    if len(counted) > 1:
        known = [counts.documents_cut for counts in counted if counts.documents_cut is not None]
        total = RowCounts(
            rows=sum(counts.rows for counts in counted),
            places=sum(counts.places for counts in counted),
            padded=sum(counts.padded for counts in counted),
            in_loss=sum(counts.in_loss for counts in counted),
            documents_cut=sum(known) if known else None,
        )
        table.append(["together", *_row_cells(total)])
    screen.title(f"Training rows of {sequence_length:,} tokens")
    screen.table(["source", "rows", "padding", "in the loss, of what is not padding", "documents cut"], table)


def _row_cells(counts: RowCounts) -> list[str]:
    return [
        f"{counts.rows:,}",
        percent(counts.padded, counts.places),
        percent(counts.in_loss, counts.places - counts.padded),
        "wherever a row is full" if counts.documents_cut is None else f"{counts.documents_cut:,}",
    ]


def show_lengths(screen: Screen, lengths: dict[str, Lengths], sequence_length: int, path: Path) -> None:
    """A sketch of the lengths here, and a picture at `path`."""
    screen.title("Documents by length in tokens")
    for line in length_bars(together(lengths.values())):
        screen.line(line)
    draw_lengths(lengths, sequence_length, path)
    screen.line(f"picture: {path}")


def show_samples(screen: Screen, sources: Sequence[PreparedSource], number: int, tokenizer: Any) -> None:
    """The first documents of each source, decoded from their tokens."""
    for source in sources:
        store = source.train if source.train.parts else source.eval
        found = first_documents(store.parts, number, tokenizer)
        for place, (length, words) in enumerate(found, start=1):
            screen.title(f"{source.name}, document {place}: {length:,} tokens")
            screen.line(words)


def show_batch(screen: Screen, batch: Batch, tokenizer: Any, pad_id: int | None) -> None:
    """Rows as the model gets them, tokens in the loss marked; without `pad_id` nothing is padded."""
    screen.title("The first rows of the run")
    kinds, margins = batch.get("segment_kinds"), batch.get("margins")
    screen.line(caption(screen.is_coloured, kinds is not None))
    positions = batch.get("position_ids")
    for row, (input_ids, labels) in enumerate(
        zip(batch["input_ids"].numpy(), batch["shift_labels"].numpy(), strict=True)
    ):
        own = None if positions is None else positions[row].numpy()
        runs, padding = split_row(input_ids, labels, own, tokenizer.eos_token_id, pad_id)
        counted = int((labels != IGNORE_INDEX).sum())
        screen.title(f"row {row + 1}: {counted:,} of {len(labels):,} tokens count in the loss")
        answers: list[tuple[int, float]] = []
        if kinds is not None:
            better = [0.0] * kinds.shape[1] if margins is None else margins[row].tolist()
            answers = list(zip(kinds[row].tolist(), better, strict=True))
        screen.line(show_row(runs, padding, tokenizer, screen.is_coloured, answers))


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one document that all count in the loss, or all do not."""

    ids: list[int]
    in_loss: bool
    document: int


def split_row(
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64] | None,
    end_id: int | None,
    pad_id: int | None,
) -> tuple[list[Run], int]:
    """A row (T,) as runs, and how many places of it are padding.

    The target of the last place is no input of this row, and ends the last run where it counts in the loss.

    Args:
        input_ids: (T,)
        labels: (T,) the token after each place, or -100.
        position_ids: (T,) 0 where a document starts; None: it starts after `end_id`.
        end_id: The end-of-document token.
        pad_id: The token of padded places; None: nothing is padded.
    """
    in_loss = np.concatenate([[False], labels != IGNORE_INDEX])  # (T + 1,)
    ids = np.append(input_ids, labels[-1])
    size = len(ids) if in_loss[-1] else len(ids) - 1
    real = np.flatnonzero((ids[:size] != pad_id) | in_loss[:size])
    filled = int(real[-1]) + 1 if len(real) else 0
    if position_ids is not None and filled < size:
        # Where the padding token ends documents too: padding starts at position 0, and an end does not.
        begins = np.flatnonzero(position_ids[filled:] == 0)
        filled = filled + int(begins[0]) if len(begins) else size
    padding, size = size - filled, filled
    starts = np.zeros(len(ids), dtype=bool)
    if position_ids is None:
        starts[1:] = input_ids == end_id
    else:
        starts[:-1] = position_ids == 0
    documents = np.cumsum(starts[:size])
    marked = zip(ids[:size].tolist(), in_loss[:size].tolist(), documents.tolist(), strict=True)
    runs = [
        Run([token for token, _, _ in group], bool(key[0]), int(key[1]))
        for key, group in groupby(marked, key=lambda entry: entry[1:])
    ]
    return runs, padding


def show_row(
    runs: list[Run],
    padding: int,
    tokenizer: Any,
    is_coloured: bool,
    answers: Sequence[tuple[int, float]] = (),
) -> Text:
    """The row's text: tokens in the loss green, others dim; without colours the former in double brackets.

    Args:
        answers: Of judged answers the kind of each document, which has its own colour, and its margin.
    """
    text = Text()
    left = MOST_TOKENS
    for number, run in enumerate(runs):
        kind, margin = answers[run.document - 1] if answers else (CHOSEN, 0.0)
        is_new = number == 0 or run.document != runs[number - 1].document
        if is_new and answers:
            better = f", better by {margin:g}" if margin else ""
            text.append(f"{chr(10) * (number > 0)}--- {KIND_NAMES[kind]}{better} ---\n", MARK)
        elif is_new and number:
            text.append("\n--- next document ---\n", MARK)
        words = printable(tokenizer.decode(run.ids[:left]))
        bracketed = run.in_loss and not is_coloured
        text.append(
            f"{OPEN}{words}{CLOSE}" if bracketed else words, OF_KIND[kind] if run.in_loss else CONTEXT
        )
        left -= len(run.ids)
        if left <= 0:
            rest = sum(len(other.ids) for other in runs) - MOST_TOKENS
            text.append(f"\n--- {rest:,} more tokens ---" if rest else "", MARK)
            break
    if padding:
        text.append(f"\n--- padding: {padding:,} of the row's places ---", MARK)
    return text


def caption(is_coloured: bool, are_answers: bool = False) -> Text:
    """How to read `show_row`."""
    if is_coloured and are_answers:
        named = [part for kind, name in KIND_NAMES.items() for part in ((name, OF_KIND[kind]), ", ")]
        return Text.assemble("answers: ", *named, ("context", CONTEXT))
    if is_coloured:
        return Text.assemble(("in the loss", IN_LOSS), ", ", ("context", CONTEXT))
    return Text(f"in the loss: {OPEN}in double brackets{CLOSE}; the rest is context")


def first_documents(parts: Any, number: int, tokenizer: Any) -> Iterator[tuple[int, str]]:
    """Tokens, and the text as the model reads it, cut where it is long, of the first documents of a store."""
    for part in parts:
        begin = 0
        for end in np.asarray(part.ends[:number]).tolist():
            ids = np.asarray(part.tokens[begin : min(end, begin + MOST_CHARACTERS)]).tolist()
            words = tokenizer.decode(ids)
            is_cut = end - begin > len(ids) or len(words) > MOST_CHARACTERS
            yield end - begin, words[:MOST_CHARACTERS] + (" ..." if is_cut else "")
            begin = end
            number -= 1
        if number <= 0:
            return


MOST_CLASSES = 30  # shown one by one
MOST_NAMED = 5


@dataclass(frozen=True)
class StoredImages:
    """What the files of a split are like.

    Attributes:
        sizes: (N, 2) width and height in pixels of those that can be read.
        hashes: (N,) of their content, sorted.
        broken: A line for each that cannot be opened.
    """

    sizes: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    broken: list[str]


def look_at_files(dataset: Any, advance: Callable[[int], object]) -> StoredImages:
    """Reads every file of an ImageDataset, and decodes none."""
    from PIL import Image

    sizes, hashes, broken = [], [], []
    for row in dataset.rows.tolist():
        try:
            content = dataset.images.encoded(row)
            with Image.open(io.BytesIO(content)) as image:
                sizes.append(image.size)
            hashes.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"))
        except Exception as error:  # Pillow's decoders raise what they like
            broken.append(f"{dataset.images.where(row)}: {describe(error)}")
        advance(1)
    return StoredImages(
        np.array(sizes, dtype=np.int64).reshape(-1, 2), np.sort(np.array(hashes, dtype=np.uint64)), broken
    )


def show_classes(screen: Screen, train: Any, held_out: Sequence[Any]) -> None:
    """Images of each class; `labels` (N,) of the data sets are read."""
    names = class_names(train)
    counts = _counts(train.labels, len(names))
    others = sum((_counts(dataset.labels, len(names)) for dataset in held_out), np.zeros_like(counts))
    screen.title(f"{counts.sum():,} training images, {others.sum():,} held out, {len(names):,} classes")
    order = list(range(len(names)))
    if len(names) > MOST_CLASSES:
        largest = np.argsort(-counts, kind="stable")
        order = [*largest[: MOST_CLASSES // 2].tolist(), *largest[-MOST_CLASSES // 2 :].tolist()]
        screen.line(f"the {MOST_CLASSES // 2} largest classes, and the {MOST_CLASSES // 2} smallest")
    lines = bars([names[number] for number in order], [int(counts[number]) for number in order])
    for number, line in zip(order, lines, strict=True):
        screen.line(f"{line}  (+ {others[number]:,} held out)" if others[number] else line)


def class_names(dataset: Any) -> tuple[str, ...]:
    """Their names, or numbers where they have none."""
    names = getattr(dataset, "class_names", None)
    return names or tuple(str(number) for number in range(int(np.asarray(dataset.labels).max()) + 1))


def _counts(labels: Any, length: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(labels), minlength=length)


def show_files(screen: Screen, train: Any, held_out: Mapping[str, Any]) -> None:
    """Sizes and copies of stored images."""
    total = len(train) + sum(map(len, held_out.values()))
    with screen.progress("reading images", total) as advance:
        found = look_at_files(train, advance)
        others = {name: look_at_files(dataset, advance) for name, dataset in held_out.items()}
    screen.title("Stored images")
    if len(found.sizes):
        width, height = np.median(found.sizes, axis=0).astype(int)
        small = int((found.sizes.min(axis=1) < train.image_size).sum())
        (low_w, low_h), (high_w, high_h) = found.sizes.min(axis=0), found.sizes.max(axis=0)
        screen.line(
            f"width {low_w:,} to {high_w:,}, median {width:,}; height {low_h:,} to {high_h:,}, "
            f"median {height:,} pixels; all become {train.image_size} x {train.image_size}"
        )
        if small:
            screen.line(f"{small:,} ({percent(small, len(found.sizes))}) are smaller and are enlarged")
    copies = count_copies(found.hashes)
    screen.line(f"exact copies: {copies:,} of {len(found.hashes):,} ({percent(copies, len(found.hashes))})")
    for name, other in others.items():
        shared = count_shared(other.hashes, found.hashes)
        screen.line(f"{name}: {shared:,} of {len(other.hashes):,} held-out images are also trained on")
    broken = found.broken + [line for other in others.values() for line in other.broken]
    for line in broken[:MOST_NAMED]:
        screen.line(f"cannot be opened: {line}")
    if len(broken) > MOST_NAMED:
        screen.line(f"cannot be opened: {len(broken) - MOST_NAMED:,} more")


def show_sheet(screen: Screen, batch: Batch, train: Any, path: Path) -> None:
    """A picture of a batch at `path`, each image with the name of its class."""
    inputs: Tensor = batch["inputs"]  # (B, C, H, W)
    if hasattr(train, "std"):
        inputs = inputs * train.std + train.mean
    images = inputs.clamp(0, 1).permute(0, 2, 3, 1).numpy()
    names = class_names(train)
    draw_contact_sheet(list(images), [names[label] for label in batch["labels"].tolist()], path)
    screen.title("The first images of the run, as the model gets them")
    screen.line(f"picture: {path}")
