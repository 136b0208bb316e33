"""Prints a model and training data for the command `inspect`: statistics, text, conversations and images.

Tokens that count in the loss are marked by colour or brackets. A token counts if it is a target: then the
label at the position before it is not -100. Mismatched answers do not count: they only give KTO's baseline.
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
from pipeline.errors import PipelineError, escape_unprintable

if TYPE_CHECKING:
    from pipeline.data.packing import PackedDataset
    from pipeline.data.prepared.part_files import TokenStore
    from pipeline.data.prepared.prepare import PreparedSource
    from pipeline.evaluation.sources import ModelSource

TOKENS_AT_ONCE = 1 << 20  # tokens of the rows that are read at once; their ids and labels take 16 MB


def read_lengths(stores: Iterable[TokenStore]) -> NDArray[np.int64]:
    """Return the number of tokens of each document in the stores."""
    lengths = [np.diff(np.asarray(part.ends), prepend=0) for store in stores for part in store.parts]
    return np.concatenate([np.empty(0, np.int64), *lengths])


def read_hashes(stores: Iterable[TokenStore]) -> NDArray[np.uint64]:
    """Return the hash of each document in the stores, sorted; equal documents have equal hashes."""
    # `np.array` copies, so that no file stays mapped.
    copies = [np.array(part.hashes) for store in stores for part in store.parts]
    hashes = np.concatenate([np.empty(0, np.uint64), *copies])
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
    rows_at_once = max(1, TOKENS_AT_ONCE // rows.sequence_length)
    num_targets = 0
    for first in range(0, len(rows), rows_at_once):
        indices = range(first, min(first + rows_at_once, len(rows)))
        num_targets += int((read_loss_labels(rows.__getitems__(indices)) != IGNORE_INDEX).sum())
        advance(len(indices))
    return num_targets


def read_loss_labels(batch: Batch) -> NDArray[np.int64]:
    """Return the labels (B, T) of a batch, with -100 in mismatched answers, which have no loss."""
    labels = batch["shift_labels"].numpy()
    if "segments" not in batch:
        return labels
    # Segment -1, the padding, takes the last segment's kind, but the padding has no labels.
    kinds = np.take_along_axis(batch["segment_kinds"].numpy(), batch["segments"].numpy(), axis=1)
    return np.where(kinds == MISMATCHED, IGNORE_INDEX, labels)


# Styles of rich: for tokens in the loss, other tokens, and lines between them.
LOSS_STYLE = "bold green"
CONTEXT_STYLE = "dim"
MARKER_STYLE = "cyan"
ANSWER_STYLES = {CHOSEN: LOSS_STYLE, REJECTED: "bold red"}
"""Style of the tokens in the loss of an answer in preference data, by the kind of the answer."""
# Brackets around tokens in the loss, used without colours.
OPEN = "⟦"
CLOSE = "⟧"
MAX_TOKENS_SHOWN = 2048  # of one row


def show_documents(screen: Screen, sources: Sequence[PreparedSource]) -> None:
    """Show the number of documents of each source, training and held-out, and their lengths in tokens.

    Below the table, each source has lines on documents that were skipped or changed, if there were any.
    """
    rows = []
    for source in sources:
        lengths = read_lengths([source.train, source.eval])
        num_held_out = len(read_lengths([source.eval]))
        percentiles = ["", "", ""]
        if len(lengths):
            percentiles = [
                f"{np.percentile(lengths, percent, method='inverted_cdf'):,}" for percent in (50, 95, 100)
            ]
        cells = [
            source.name,
            f"{len(lengths):,}",
            f"{num_held_out:,} ({format_percent(num_held_out, len(lengths))})",
            f"{lengths.sum():,}",
            f"{lengths.mean() if len(lengths) else 0:,.0f}",
        ]
        rows.append(cells + percentiles)
    screen.title("Documents, and their lengths in tokens")
    columns = ["source", "documents", "held out", "tokens", "mean", "median", "95 %", "longest"]
    screen.table(columns, rows)
    for source in sources:
        for line in source.tally.format_lines():
            screen.line(f"{source.name}: {line}")


def show_copies(screen: Screen, sources: Sequence[PreparedSource], eval_sets: Sequence[str]) -> None:
    """Show exact copies within and across sources, and held-out documents that are also trained on.

    Args:
        screen: Console to print to.
        sources: Sources of the training data, and evaluation sets.
        eval_sets: Names of the evaluation sets among `sources`. They have a line on held-out documents even
            if none is trained on.
    """
    screen.title("Exact copies")
    hashes_by_source = []
    for source in sources:
        hashes = read_hashes([source.train, source.eval])
        hashes_by_source.append(hashes)
        copies = count_copies(hashes)
        screen.line(
            f"{source.name}: {copies:,} of {len(hashes):,} documents ({format_percent(copies, len(hashes))})"
        )
    if len(sources) > 1:
        hashes = np.sort(np.concatenate(hashes_by_source))
        copies = count_copies(hashes)
        del hashes_by_source  # 8 bytes for each document
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
    """Show the padding, the tokens in the loss and the cut documents of the training rows of each source.

    Args:
        screen: Console to print to.
        datasets: Training rows of each source, by its name.
        sequence_length: Tokens of a row, with padding.
    """
    table = []
    with screen.progress("counting tokens in the loss", sum(map(len, datasets.values()))) as advance:
        for name, rows in datasets.items():
            num_positions = len(rows) * rows.sequence_length
            num_padded = round(rows.padding_share * num_positions)
            in_loss = format_percent(count_targets(rows, advance), num_positions - num_padded)
            documents_cut = "at row ends" if rows.documents_cut is None else f"{rows.documents_cut:,}"
            padding = format_percent(num_padded, num_positions)
            table.append([name, f"{len(rows):,}", padding, in_loss, documents_cut])
    screen.title(f"Training rows of {sequence_length:,} tokens")
    screen.table(["source", "rows", "padding", "in the loss (padding excluded)", "documents cut"], table)


def show_batch(screen: Screen, batch: Batch, tokenizer: Any, pad_id: int | None) -> None:
    """Show the rows of a batch as the model gets them, with tokens in the loss marked.

    Args:
        screen: Console to print to.
        batch: Batch of text, conversations or preference data.
        tokenizer: Tokenizer that decodes the ids.
        pad_id: Id of the padding token; `None` if the rows have no padding.
    """
    screen.title("The first rows of the run")
    # Preference data has the kind of each answer of a row, and may have margins.
    kinds = batch.get("segment_kinds")
    margins = batch.get("margins")
    screen.line(format_legend(screen.is_coloured, has_answers=kinds is not None))
    positions = batch.get("position_ids")
    for row, (input_ids, labels) in enumerate(
        zip(batch["input_ids"].numpy(), read_loss_labels(batch), strict=True)
    ):
        position_ids = None if positions is None else positions[row].numpy()
        runs, padding = split_row(input_ids, labels, position_ids, tokenizer.eos_token_id, pad_id)
        num_targets = int((labels != IGNORE_INDEX).sum())
        screen.title(f"row {row + 1}: {num_targets:,} of {len(labels):,} tokens count in the loss")
        answers: list[tuple[int, float]] = []
        if kinds is not None:
            row_margins = [0.0] * kinds.shape[1] if margins is None else margins[row].tolist()
            answers = list(zip(kinds[row].tolist(), row_margins, strict=True))
        screen.line(format_row(runs, padding, tokenizer, screen.is_coloured, answers))


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one document that all count in the loss, or all do not."""

    ids: list[int]
    """Token ids."""
    in_loss: bool
    """Whether the tokens count in the loss."""
    document: int
    """Number of the document in its row: from 1, or from 0 if the row has no position ids."""


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
        end_id: Id of the end-of-document token; `None` if the tokenizer has none.
        pad_id: Id of the padding token; `None` if there is no padding.
    """
    in_loss = np.concatenate([[False], labels != IGNORE_INDEX])  # (T + 1,)
    ids = np.append(input_ids, labels[-1])  # (T + 1,)
    num_ids = len(ids) if in_loss[-1] else len(ids) - 1
    num_filled = _count_filled(ids[:num_ids], in_loss[:num_ids], position_ids, pad_id)
    is_start = np.zeros(len(ids), dtype=bool)
    if position_ids is None:
        is_start[1:] = input_ids == end_id
    else:
        is_start[:-1] = position_ids == 0
    documents = np.cumsum(is_start[:num_filled])
    marked = zip(ids[:num_filled].tolist(), in_loss[:num_filled].tolist(), documents.tolist(), strict=True)
    runs = [
        TokenRun([token for token, _, _ in group], bool(key[0]), int(key[1]))
        for key, group in groupby(marked, key=lambda entry: entry[1:])
    ]
    return runs, num_ids - num_filled


def _count_filled(
    ids: NDArray[np.int64],
    in_loss: NDArray[np.bool_],
    position_ids: NDArray[np.int64] | None,
    pad_id: int | None,
) -> int:
    """Return the number of positions before the padding at the end of a row.

    Args:
        ids: Token ids of the row. If the target of the last position counts in the loss, its id is the last.
        in_loss: Whether each of the `ids` counts in the loss.
        position_ids: Positions within documents; `None` if unknown.
        pad_id: Id of the padding token; `None` if there is no padding.
    """
    not_padding = np.flatnonzero((ids != pad_id) | in_loss)
    num_filled = int(not_padding[-1]) + 1 if len(not_padding) else 0
    if position_ids is None or num_filled == len(ids):
        return num_filled
    # The padding token may also end documents. Position ids restart at 0 where padding begins, but not at the
    # end token of a document.
    starts = np.flatnonzero(position_ids[num_filled:] == 0)
    return num_filled + int(starts[0]) if len(starts) else len(ids)


def format_row(
    runs: list[TokenRun],
    padding: int,
    tokenizer: Any,
    is_coloured: bool,
    answers: Sequence[tuple[int, float]] = (),
) -> Text:
    """Return a row's text with tokens in the loss in colour, or in double brackets without colours.

    At most MAX_TOKENS_SHOWN tokens are shown.

    Args:
        runs: Runs of the row.
        padding: Number of padded positions.
        tokenizer: Tokenizer that decodes the ids.
        is_coloured: Whether to mark tokens by colour.
        answers: (kind, margin) of each answer of preference data, in which each document is one answer. The
            colour of an answer depends on its kind. Empty for other data.
    """
    text = Text()
    tokens_left = MAX_TOKENS_SHOWN
    for number, run in enumerate(runs):
        kind, margin = answers[run.document - 1] if answers else (CHOSEN, 0.0)
        is_first_run = number == 0
        is_new_document = is_first_run or run.document != runs[number - 1].document
        if is_new_document and not is_first_run:
            text.append("\n")
        if is_new_document and answers:
            better_by = f", better by {margin:g}" if margin else ""
            text.append(f"--- {KIND_NAMES[kind]}{better_by} ---\n", MARKER_STYLE)
        elif is_new_document and not is_first_run:
            text.append("--- next document ---\n", MARKER_STYLE)
        decoded = escape_unprintable(tokenizer.decode(run.ids[:tokens_left]))
        if run.in_loss and not is_coloured:
            decoded = f"{OPEN}{decoded}{CLOSE}"
        text.append(decoded, ANSWER_STYLES[kind] if run.in_loss else CONTEXT_STYLE)
        tokens_left -= len(run.ids)
        if tokens_left <= 0:
            num_hidden = sum(len(other.ids) for other in runs) - MAX_TOKENS_SHOWN
            if num_hidden:
                text.append(f"\n--- {num_hidden:,} more tokens ---", MARKER_STYLE)
            break
    if padding:
        text.append(f"\n--- padding: {padding:,} position{'s' * (padding > 1)} ---", MARKER_STYLE)
    return text


def format_legend(is_coloured: bool, *, has_answers: bool) -> Text:
    """Return the legend of rows that `format_row` returns; `has_answers` for rows of preference data."""
    if is_coloured and has_answers:
        legend = Text("answers: ")
        for kind, style in ANSWER_STYLES.items():
            legend.append(KIND_NAMES[kind], style)
            legend.append(", ")
        return legend.append("context", CONTEXT_STYLE)
    if is_coloured:
        return Text.assemble(("in the loss", LOSS_STYLE), ", ", ("context", CONTEXT_STYLE))
    return Text(f"tokens in the loss are {OPEN}in double brackets{CLOSE}; the rest is context")


EXAMPLE = ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."})
"""Conversation that shows the text of a chat template."""


def show_model(screen: Screen, source: ModelSource) -> None:
    """Show the size, end tokens and chat template of a language model. Weights are not read.

    Raises:
        PipelineError: The model's config or its tokenizer cannot be read, or it is no language model.
    """
    from pipeline.evaluation.conversation import ChatFormat
    from pipeline.evaluation.sources import SOURCE, find_end_ids
    from pipeline.models.generation import get_max_positions
    from pipeline.models.huggingface import build_empty_model

    whole = source.whole_model
    tokenizer = source.load_tokenizer()
    model = build_empty_model(whole.location, whole.trust_remote_code, SOURCE)
    name = f"{source.kind} {source.location if source.run is None else source.run.checkpoint}"
    num_parameters = f"{sum(p.numel() for p in model.parameters()):,}"
    if source.base is not None:
        name += f" over {whole.kind} {whole.location}"
        num_parameters += ", without the adapter's"
    positions = get_max_positions(model)
    end_ids = sorted(find_end_ids(model, tokenizer))
    rows = [
        ["architecture", type(model).__name__],
        ["parameters", num_parameters],
        ["precision", str(model.dtype).removeprefix("torch.") if whole.run is None else whole.run.precision],
        ["positions", "no limit" if positions is None else f"{positions:,}"],
        ["vocabulary", f"{model.config.get_text_config().vocab_size:,} rows, {len(tokenizer):,} tokens"],
        ["end tokens", ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in end_ids)],
    ]
    screen.table(["source", name], rows, text_columns=["source", name])
    screen.title("Two turns in the chat template, up to the next answer")
    try:
        screen.line(tokenizer.decode(ChatFormat(tokenizer).render(EXAMPLE)))
    except PipelineError as error:  # there is no template, or it refuses them
        screen.line(f"{error}")


MAX_CLASSES_SHOWN = 30


def show_classes(screen: Screen, train: Any, held_out: Sequence[Any]) -> None:
    """Show the number of training and held-out images of the largest classes.

    Args:
        screen: Console to print to.
        train: Training images. It has the class of each in `labels` (N,), and may have `class_names`.
        held_out: Data sets of held-out images, with `labels` (N,).
    """
    names = read_class_names(train)
    train_counts = _count_labels(train.labels, len(names))
    held_out_counts = np.zeros_like(train_counts)
    for dataset in held_out:
        held_out_counts += _count_labels(dataset.labels, len(names))
    screen.title(
        f"{train_counts.sum():,} training images, {held_out_counts.sum():,} held out, {len(names):,} classes"
    )
    largest = np.argsort(-train_counts, kind="stable")[:MAX_CLASSES_SHOWN].tolist()
    if len(names) > MAX_CLASSES_SHOWN:
        screen.line(f"the {MAX_CLASSES_SHOWN} largest classes")
    rows = [(names[label], f"{train_counts[label]:,}", f"{held_out_counts[label]:,}") for label in largest]
    screen.table(("class", "training images", "held out"), rows)


def show_shared_images(screen: Screen, train: Any, held_out: Mapping[str, Any]) -> None:
    """Show the number of held-out image files that are also trained on.

    Files count as equal if their hashes of size and last bytes are equal.

    Args:
        screen: Console to print to.
        train: Training images.
        held_out: Data sets of held-out images, by name.
    """
    trained = np.sort(train.images.compute_hashes()[train.rows])
    for name, dataset in held_out.items():
        hashes = np.sort(dataset.images.compute_hashes()[dataset.rows])
        shared = count_shared(hashes, trained)
        screen.line(f"{name}: {shared:,} of {len(hashes):,} held-out images are also trained on")


def read_class_names(dataset: Any) -> tuple[str, ...]:
    """Return the names of the classes of an image data set, or their numbers if they have no names."""
    names = getattr(dataset, "class_names", None)
    return names or tuple(str(number) for number in range(int(np.asarray(dataset.labels).max()) + 1))


def _count_labels(labels: Any, num_classes: int) -> NDArray[np.int64]:
    """Return the number of samples of each class."""
    return np.bincount(np.asarray(labels), minlength=num_classes)
