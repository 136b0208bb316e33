"""Rows of tokens as text for the terminal: tokens that count in the loss stand out, in colour or in brackets.

A token counts where it is a target: where the label of the place before it is not -100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.preference_layouts import CHOSEN, KIND_NAMES, MISMATCHED, REJECTED
from pipeline.errors import printable

IN_LOSS, CONTEXT, MARK = "bold green", "dim", "cyan"
OF_KIND = {CHOSEN: IN_LOSS, REJECTED: "bold red", MISMATCHED: "bold yellow"}
OPEN, CLOSE = "⟦", "⟧"
MOST_TOKENS = 2048  # of one row
MOST_CHARACTERS = 600  # of one document


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
