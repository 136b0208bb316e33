"""Shows training data: statistics, text, conversations and images.

Tokens that count in the loss are marked by colour or brackets. A token counts if it is a target, that is, if
the label at the position before it is not -100.
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

POSITIONS_AT_ONCE = 1 << 20  # tokens whose labels are read at once: 16 MB


def read_lengths(stores: Iterable[TokenStore]) -> NDArray[np.int64]:
    """Return the number of tokens of each document in the stores."""
    parts = [np.diff(np.asarray(part.ends), prepend=0) for store in stores for part in store.parts]
    return np.concatenate([np.empty(0, np.int64), *parts])


def read_hashes(stores: Iterable[TokenStore]) -> NDArray[np.uint64]:
    """Return the hash of each document, sorted; equal documents have equal hashes."""
    parts = [
        np.array(part.hashes) for store in stores for part in store.parts
    ]  # copies, so that no file stays mapped
    hashes = np.concatenate([np.empty(0, np.uint64), *parts])
    hashes.sort()
    return hashes


def count_copies(hashes: NDArray[np.uint64]) -> int:
    """Return the number of documents that copy an earlier one; the hashes are sorted."""
    return int((hashes[1:] == hashes[:-1]).sum())


def count_shared(hashes: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """Return the number of `hashes` that are also in `others`; both are sorted."""
    if len(others) == 0:
        return 0
    places = np.searchsorted(others, hashes)
    return int((others[np.minimum(places, len(others) - 1)] == hashes).sum())


def count_targets(rows: PackedDataset, advance: Callable[[int], object]) -> int:
    """Return the number of positions in all rows whose next token counts in the loss.

    `advance` is called with the number of rows just counted, to move a progress bar.
    """
    at_once = max(1, POSITIONS_AT_ONCE // rows.sequence_length)
    in_loss = 0
    for first in range(0, len(rows), at_once):
        indices = range(first, min(first + at_once, len(rows)))
        in_loss += int((rows.__getitems__(indices)["shift_labels"] != IGNORE_INDEX).sum())
        advance(len(indices))
    return in_loss


# Styles of rich.
IN_LOSS = "bold green"
CONTEXT = "dim"
MARK = "cyan"
STYLE_OF_KIND = {CHOSEN: IN_LOSS, REJECTED: "bold red", MISMATCHED: "bold yellow"}
# Brackets around tokens in the loss, without colours.
OPEN = "⟦"
CLOSE = "⟧"
MAX_TOKENS = 2048  # number of tokens that are shown of one row


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
    """Show rows as the model gets them, with tokens in the loss marked.

    If `pad_id` is `None`, the rows have no padding.
    """
    screen.title("The first rows of the run")
    kinds = batch.get("segment_kinds")
    margins = batch.get("margins")
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
    """Consecutive tokens of one document that all count in the loss, or all do not."""

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
    """Return a row as runs of tokens, and the number of padded positions.

    The target of the last position is no input of this row. If it counts in the loss, it ends the last run.

    Args:
        input_ids: Token ids of the row, (T,).
        labels: Token after each position, or -100, (T,).
        position_ids: Positions within documents, (T,): 0 where a document starts. `None` if documents start
            after `end_id`.
        end_id: Id of the end-of-document token.
        pad_id: Id of the padding token; `None` if there is no padding.
    """
    in_loss = np.concatenate([[False], labels != IGNORE_INDEX])  # (T + 1,)
    ids = np.append(input_ids, labels[-1])
    size = len(ids) if in_loss[-1] else len(ids) - 1
    real = np.flatnonzero((ids[:size] != pad_id) | in_loss[:size])
    filled = int(real[-1]) + 1 if len(real) else 0
    if position_ids is not None and filled < size:
        # The padding token may also end documents. Padding starts at position 0, and an end does not.
        begins = np.flatnonzero(position_ids[filled:] == 0)
        filled = filled + int(begins[0]) if len(begins) else size
    padding = size - filled
    size = filled
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
    """Return a row's text with tokens in the loss in colour, or in double brackets without colours.

    Args:
        runs: Runs of the row.
        padding: Number of padded positions.
        tokenizer: Tokenizer that decodes the ids.
        is_coloured: Whether to mark tokens by colour.
        answers: (kind, margin) of each document of preference data; a kind has its own colour. Empty for
            other data.
    """
    text = Text()
    left = MAX_TOKENS
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
            f"{OPEN}{words}{CLOSE}" if bracketed else words, STYLE_OF_KIND[kind] if run.in_loss else CONTEXT
        )
        left -= len(run.ids)
        if left <= 0:
            rest = sum(len(other.ids) for other in runs) - MAX_TOKENS
            text.append(f"\n--- {rest:,} more tokens ---" if rest else "", MARK)
            break
    if padding:
        text.append(f"\n--- padding: {padding:,} of the row's places ---", MARK)
    return text


def format_caption(is_coloured: bool, are_answers: bool = False) -> Text:
    """Return the legend of rows that `format_row` returns."""
    if is_coloured and are_answers:
        named = [part for kind, name in KIND_NAMES.items() for part in ((name, STYLE_OF_KIND[kind]), ", ")]
        return Text.assemble("answers: ", *named, ("context", CONTEXT))
    if is_coloured:
        return Text.assemble(("in the loss", IN_LOSS), ", ", ("context", CONTEXT))
    return Text(f"in the loss: {OPEN}in double brackets{CLOSE}; the rest is context")


MAX_CLASSES = 30  # number of classes that are shown


def show_classes(screen: Screen, train: Any, held_out: Sequence[Any]) -> None:
    """Show the number of images of each class, counted in the `labels` (N,) of the data sets."""
    names = read_class_names(train)
    counts = _counts(train.labels, len(names))
    others = sum((_counts(dataset.labels, len(names)) for dataset in held_out), np.zeros_like(counts))
    screen.title(f"{counts.sum():,} training images, {others.sum():,} held out, {len(names):,} classes")
    order = np.argsort(-counts, kind="stable")[:MAX_CLASSES].tolist()
    if len(names) > MAX_CLASSES:
        screen.line(f"the {MAX_CLASSES} largest classes")
    rows = [(names[number], f"{counts[number]:,}", f"{others[number]:,}") for number in order]
    screen.table(("class", "training images", "held out"), rows)


def show_shared_images(screen: Screen, train: Any, held_out: Mapping[str, Any]) -> None:
    """Show the number of held-out image files that are also trained on, compared by size and last bytes."""
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
