"""Shows text and conversations: what was prepared, what a model is given of it, what counts in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.batches import IGNORE_INDEX, Batch
from pipeline.inspection.pictures import draw_lengths, length_bars
from pipeline.inspection.screen import Screen, percent
from pipeline.inspection.statistics import (
    Lengths,
    RowCounts,
    count_copies,
    count_rows,
    count_shared,
    hashes_of,
    lengths_of,
    together,
)
from pipeline.inspection.tokens import caption, first_documents, show_row, split_row

if TYPE_CHECKING:
    from pipeline.data.packed import PackedDataset
    from pipeline.data.prepared.prepare import PreparedSource


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
