"""Shows training data: statistics, text, conversations and images, and what of it counts in the loss.

Tokens that count in the loss stand out, in colour or in brackets. A token counts if it is a target: the label
of the place before it is not -100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from pipeline.cli.screen import Screen, format_percent
from pipeline.data.batches import IGNORE_INDEX, Batch
from pipeline.data.preference_layouts import CHOSEN, KIND_NAMES, MISMATCHED, REJECTED
from pipeline.errors import escape_unprintable

if TYPE_CHECKING:
    from pipeline.data.packing import PackedDataset
    from pipeline.data.prepared.part_files import TokenStore
    from pipeline.data.prepared.prepare import PreparedSource

PLACES_AT_ONCE = 1 << 20  # tokens of rows looked at together: 16 MB


def read_lengths(stores: Iterable[TokenStore]) -> NDArray[np.int64]:
    """Return the length in tokens of each document of the stores."""
    parts = [np.diff(np.asarray(part.ends), prepend=0) for store in stores for part in store.parts]
    return np.concatenate([np.empty(0, np.int64), *parts])


def read_hashes(stores: Iterable[TokenStore]) -> NDArray[np.uint64]:
    """Return the hash of each document, sorted; equal documents have equal hashes."""
    parts = [np.array(part.hashes) for store in stores for part in store.parts]  # copies: none stays mapped
    hashes = np.concatenate([np.empty(0, np.uint64), *parts])
    hashes.sort()
    return hashes


def count_copies(hashes: NDArray[np.uint64]) -> int:
    """Return the number of documents beyond the first of each kind; the hashes are sorted."""
    return int((hashes[1:] == hashes[:-1]).sum())


def count_shared(hashes: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """Return how many of the first are among the others; both are sorted."""
    if len(others) == 0:
        return 0
    places = np.searchsorted(others, hashes)
    return int((others[np.minimum(places, len(others) - 1)] == hashes).sum())


def count_targets(rows: PackedDataset, advance: Callable[[int], object]) -> int:
    """Return the number of places of all rows whose next token counts in the loss.

    Args:
        advance: Called with the number of rows done.
    """
    at_once = max(1, PLACES_AT_ONCE // rows.sequence_length)
    in_loss = 0
    for first in range(0, len(rows), at_once):
        indices = range(first, min(first + at_once, len(rows)))
        in_loss += int((rows.__getitems__(indices)["shift_labels"] != IGNORE_INDEX).sum())
        advance(len(indices))
    return in_loss


IN_LOSS, CONTEXT, MARK = "bold green", "dim", "cyan"
OF_KIND = {CHOSEN: IN_LOSS, REJECTED: "bold red", MISMATCHED: "bold yellow"}
OPEN, CLOSE = "⟦", "⟧"
MOST_TOKENS = 2048  # of one row


def show_documents(screen: Screen, sources: Sequence[PreparedSource]) -> None:
    """Show the number and the lengths of the documents of each source."""
    rows = []
    for source in sources:
        lengths = read_lengths([source.train, source.eval])
        held_out = len(read_lengths([source.eval]))
        shares = (50, 95, 100) if len(lengths) else ()
        cells = [
            source.name,
            f"{len(lengths):,}",
            f"{lengths.sum():,}",
            f"{held_out:,} ({format_percent(held_out, len(lengths))})",
            f"{lengths.mean() if len(lengths) else 0:,.0f}",
        ]
        rows.append(cells + [f"{np.percentile(lengths, share, method='inverted_cdf'):,}" for share in shares])
    screen.title("Documents")
    columns = ["source", "documents", "tokens", "held out", "mean tokens", "median", "95 %", "longest"]
    screen.table(columns, rows)
    for source in sources:
        for line in source.tally.lines():
            screen.line(f"{source.name}: {line}")


def show_copies(screen: Screen, sources: Sequence[PreparedSource], eval_sets: Sequence[str]) -> None:
    """Show exact copies within and across sources, and held-out documents that are also trained on."""
    screen.title("Exact copies")
    everything = []
    for source in sources:
        hashes = read_hashes([source.train, source.eval])
        everything.append(hashes)
        copies = count_copies(hashes)
        screen.line(
            f"{source.name}: {copies:,} of {len(hashes):,} documents ({format_percent(copies, len(hashes))})"
        )
    if len(sources) > 1:
        hashes = np.sort(np.concatenate(everything))
        copies = count_copies(hashes)
        del everything
        screen.line(f"all together: {copies:,} of {len(hashes):,} ({format_percent(copies, len(hashes))})")
    trained = read_hashes([source.train for source in sources])
    for source in sources:
        held_out = read_hashes([source.eval])
        shared = count_shared(held_out, trained)
        if source.name in eval_sets or shared:
            screen.line(
                f"{source.name}: {shared:,} of {len(held_out):,} held-out documents are also trained on"
            )


def show_rows(screen: Screen, datasets: Mapping[str, PackedDataset], sequence_length: int) -> None:
    """Show how full the training rows of each source are."""
    table = []
    with screen.progress("looking at rows", sum(map(len, datasets.values()))) as advance:
        for name, rows in datasets.items():
            places = len(rows) * rows.sequence_length
            padded = round(rows.padding_share * places)
            in_loss = format_percent(count_targets(rows, advance), places - padded)
            is_cut_anywhere = rows.documents_cut is None
            documents_cut = "wherever a row is full" if is_cut_anywhere else f"{rows.documents_cut:,}"
            table.append([name, f"{len(rows):,}", format_percent(padded, places), in_loss, documents_cut])
    screen.title(f"Training rows of {sequence_length:,} tokens")
    screen.table(["source", "rows", "padding", "in the loss, of what is not padding", "documents cut"], table)


def show_batch(screen: Screen, batch: Batch, tokenizer: Any, pad_id: int | None) -> None:
    """Show rows as the model gets them, tokens in the loss marked; without `pad_id` nothing is padded."""
    screen.title("The first rows of the run")
    kinds, margins = batch.get("segment_kinds"), batch.get("margins")
    screen.line(format_caption(screen.is_coloured, kinds is not None))
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
        screen.line(format_row(runs, padding, tokenizer, screen.is_coloured, answers))


@dataclass(frozen=True)
class TokenRun:
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
) -> tuple[list[TokenRun], int]:
    """Return a row (T,) as runs, and how many places of it are padding.

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
        TokenRun([token for token, _, _ in group], bool(key[0]), int(key[1]))
        for key, group in groupby(marked, key=lambda entry: entry[1:])
    ]
    return runs, padding


def format_row(
    runs: list[TokenRun],
    padding: int,
    tokenizer: Any,
    is_coloured: bool,
    answers: Sequence[tuple[int, float]] = (),
) -> Text:
    """Return the row's text: tokens in the loss green, others dim; without colours in double brackets.

    Args:
        answers: Kind of each document, which has its own colour, and its margin; empty for other data.
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
        words = escape_unprintable(tokenizer.decode(run.ids[:left]))
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


def format_caption(is_coloured: bool, are_answers: bool = False) -> Text:
    """Return how to read `show_row`."""
    if is_coloured and are_answers:
        named = [part for kind, name in KIND_NAMES.items() for part in ((name, OF_KIND[kind]), ", ")]
        return Text.assemble("answers: ", *named, ("context", CONTEXT))
    if is_coloured:
        return Text.assemble(("in the loss", IN_LOSS), ", ", ("context", CONTEXT))
    return Text(f"in the loss: {OPEN}in double brackets{CLOSE}; the rest is context")


MOST_CLASSES = 30  # shown one by one


def show_classes(screen: Screen, train: Any, held_out: Sequence[Any]) -> None:
    """Show the number of images of each class, by the `labels` (N,) of the data sets."""
    names = read_class_names(train)
    counts = _counts(train.labels, len(names))
    others = sum((_counts(dataset.labels, len(names)) for dataset in held_out), np.zeros_like(counts))
    screen.title(f"{counts.sum():,} training images, {others.sum():,} held out, {len(names):,} classes")
    order = np.argsort(-counts, kind="stable")[:MOST_CLASSES].tolist()
    if len(names) > MOST_CLASSES:
        screen.line(f"the {MOST_CLASSES} largest classes")
    rows = [(names[number], f"{counts[number]:,}", f"{others[number]:,}") for number in order]
    screen.table(("class", "training images", "held out"), rows)


def show_shared_images(screen: Screen, train: Any, held_out: Mapping[str, Any]) -> None:
    """Show how many held-out image files are also trained on, by their size and end."""
    trained = np.sort(train.images.hashes()[train.rows])
    for name, dataset in held_out.items():
        hashes = np.sort(dataset.images.hashes()[dataset.rows])
        shared = count_shared(hashes, trained)
        screen.line(f"{name}: {shared:,} of {len(hashes):,} held-out images are also trained on")


def read_class_names(dataset: Any) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers if they have none."""
    names = getattr(dataset, "class_names", None)
    return names or tuple(str(number) for number in range(int(np.asarray(dataset.labels).max()) + 1))


def _counts(labels: Any, length: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(labels), minlength=length)
