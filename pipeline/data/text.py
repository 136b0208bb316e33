"""Packs the documents of every source into rows: text, conversations and judged answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.data_schema import ChatDataConfig, DocumentsConfig, PreferenceDataConfig, TextDataConfig
from pipeline.data.batches import collate_items
from pipeline.data.bundle import Batch, DataBundle
from pipeline.data.curriculum import build_weights
from pipeline.data.packing import (
    DocumentPieces,
    Ints,
    PackedDataset,
    PaddedRows,
    compute_offsets,
    join_datasets,
    pack_documents,
)
from pipeline.data.preference_layouts import MISMATCHED
from pipeline.data.prepared import prepare_documents
from pipeline.data.prepared.part_files import MAX_SEGMENTS
from pipeline.data.sampler import SourceShare
from pipeline.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.prepared import PreparedDocuments, PreparedSource, TokenStore

log = logging.getLogger(__name__)


class PreferenceRows(PaddedRows):
    """Rows of undivided preference examples.

    A segment is a prompt and an answer; its tokens attend only to each other. Both answers of a pair are in
    one row, so no pair is divided over ranks, except by Ulysses. The tokens of an answer are in the loss,
    including its end.

    In addition to the entries of PackedDataset, a batch has these, with the segments of a row counted from 0:

    - `segments` (B, T) int64: segment of each token, -1 in padding.
    - `segment_kinds` (B, S) int64: kind of each segment (see preference_layouts.py), 0 if there is none. A
      pair's chosen answer is segment 2k, its rejected answer is segment 2k + 1.
    - `margins` (B, S) float32, if any example has a margin: the margin of each chosen answer; 0 elsewhere.

    Args:
        store: Store of the examples.
        sequence_length: Number of tokens in a row, T.
        end_id: Token of the padding.
        share_rows: Whether several examples share a row if they fit (`best_fit`); otherwise each example has
            its own row (`none`).
        mismatched: Whether to repeat each example's prompts with the answers of the next example. These
            answers are cut if the row is full. If there is only one example, it is dropped.
        answer_length: Maximum number of tokens of a mismatched answer with its prompt; `None` for no limit.

    Attributes:
        longest: Number of tokens of the longest segment. In padding, `position_ids` restart from 0 after
            every `longest` tokens.
        num_segments: Number of segments in a row, S; the largest of all rows until `unify_shapes` raises it.
        has_margins: Whether batches have `margins`.
        num_cut: Number of mismatched answers that are cut.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        end_id: int,
        *,
        share_rows: bool,
        mismatched: bool,
        answer_length: int | None = None,
    ) -> None:
        super().__init__([store], sequence_length, True, end_id)
        examples = _read_examples(store, self._first_tokens)
        segments = examples.find_own_segments()
        self.num_cut = 0
        if mismatched:
            further, self.num_cut = examples.make_mismatched_segments(sequence_length, answer_length)
            segments = _SegmentPieces(*map(np.concatenate, zip(segments, *further, strict=True)))
            if len(examples.kinds) == 1:  # there is no other example's answer
                segments = _SegmentPieces(*(values[:0] for values in segments))
        by_example = np.lexsort((segments.order, segments.examples))
        segments = _SegmentPieces(*(values[by_example] for values in segments))
        ends = np.ones(len(segments.starts), np.bool_)
        pieces = DocumentPieces(segments.starts, segments.lengths.astype(np.int32), ends, 0)
        order = self._arrange(pieces, share_rows, segments.examples)
        self._kinds = segments.kinds[order].astype(np.int8)
        # The margin belongs to the chosen answer, the first of its example.
        margins = np.where(segments.order == 0, examples.margins[segments.examples], np.nan)[order]
        self.has_margins = bool(np.isfinite(margins).any())
        self._margins = np.nan_to_num(margins)
        begins_segment = self._kinds > 0
        segments_before_row = compute_offsets(begins_segment)[self._bounds]
        self.num_segments = int(np.diff(segments_before_row).max(initial=1))
        segment_lengths = np.bincount(np.cumsum(begins_segment), self._lengths)
        self.longest = int(segment_lengths.max(initial=1))

    def count_answers(self) -> Counter[int]:
        """Return the number of segments by kind."""
        return Counter(self._kinds[self._kinds > 0].tolist())

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        placed = self._place_pieces(indices)
        pair = self._read_pieces(placed)
        kinds = self._kinds[placed.pieces]
        begins_segment = kinds > 0
        inputs, labels = pair.reshape(2, -1)
        # The last token of a prompt predicts the first token of another example's answer.
        answer_starts = placed.places[~begins_segment]
        labels[answer_starts - 1] = inputs[answer_starts]
        batch = self._make_batch(pair, np.concatenate([placed.places[begins_segment], placed.row_ends]))
        batch["position_ids"] %= self.longest
        segments_before_row = compute_offsets(
            np.bincount(placed.row_of_piece, begins_segment, placed.num_rows)
        )[:-1]
        segment_numbers = np.cumsum(begins_segment) - 1 - segments_before_row[placed.row_of_piece]
        # Positions of all tokens of the pieces in the batch, which is flattened.
        shifts = placed.places - np.cumsum(placed.lengths) + placed.lengths
        positions = np.repeat(shifts, placed.lengths) + np.arange(placed.lengths.sum())
        segments = np.full(inputs.shape, -1)
        segments[positions] = np.repeat(segment_numbers, placed.lengths)
        batch["segments"] = torch.from_numpy(segments.reshape(pair.shape[1:]))
        rows_and_numbers = (placed.row_of_piece[begins_segment], segment_numbers[begins_segment])
        segment_kinds = np.zeros((placed.num_rows, self.num_segments), dtype=np.int64)
        segment_kinds[rows_and_numbers] = kinds[begins_segment]
        batch["segment_kinds"] = torch.from_numpy(segment_kinds)
        if self.has_margins:
            margins = np.zeros(segment_kinds.shape, dtype=np.float32)
            margins[rows_and_numbers] = self._margins[placed.pieces][begins_segment]
            batch["margins"] = torch.from_numpy(margins)
        return batch


def unify_shapes(datasets: Sequence[PreferenceRows]) -> int | None:
    """Give the batches of all data sets the same entries and shapes; log how many answers are cut.

    The attributes `num_segments` and `has_margins` of the data sets are changed.

    Returns:
        Number of tokens of the longest segment; `None` if there are no data sets.
    """
    num_segments = max((rows.num_segments for rows in datasets), default=1)
    has_margins = any(rows.has_margins for rows in datasets)
    for rows in datasets:
        rows.num_segments = num_segments
        rows.has_margins = has_margins
    num_cut = sum(rows.num_cut for rows in datasets)
    if num_cut:
        log.info(
            "%d mismatched answers (of another example than their prompt, to estimate the KL term) are cut, "
            "because their rows are full; to avoid cuts, raise data.sequence_length",
            num_cut,
        )
    return max((rows.longest for rows in datasets), default=None)


class _SegmentPieces(NamedTuple):
    """N ranges of a store's tokens: each is a segment, or the prompt or the answer of a mismatched segment.

    Attributes:
        starts: (N,) offset of the first token.
        lengths: (N,) number of tokens.
        kinds: (N,) kind of the segment that begins with the piece; 0 if the piece continues a segment.
        examples: (N,) number of the example.
        order: (N,) number that orders the pieces of an example; 0 for its first answer.
    """

    starts: Ints
    lengths: Ints
    kinds: Ints
    examples: Ints
    order: Ints


class _Examples(NamedTuple):
    """All N examples of a store, with up to MAX_SEGMENTS segments, k, each."""

    starts: Ints
    """Offset (N, k) of each segment's first token."""
    prompts: Ints
    """Number of tokens (N, k) of each segment's prompt."""
    lengths: Ints
    """Number of tokens (N, k) of each segment."""
    kinds: Ints
    """Kind (N, k) of each segment; 0 if there is none."""
    margins: NDArray[np.float32]
    """Margin (N,) of each example; NaN if not known."""

    def find_own_segments(self) -> _SegmentPieces:
        """Return all segments of the examples, each as one piece."""
        examples, columns = np.nonzero(self.kinds)
        index = (examples, columns)
        return _SegmentPieces(self.starts[index], self.lengths[index], self.kinds[index], examples, columns)

    def make_mismatched_segments(
        self, row_length: int, max_length: int | None
    ) -> tuple[tuple[_SegmentPieces, _SegmentPieces], int]:
        """Combine each prompt with an answer of the next example; the last example takes the first's.

        Each answer keeps at least one token, since examples are prepared so that there is room.

        Args:
            row_length: Number of tokens in a row.
            max_length: Maximum number of tokens of a prompt and its answer; `None` for no limit.

        Returns:
            Pieces of the prompts and of the answers, and the number of answers that are cut.
        """
        examples, columns = np.nonzero(self.kinds)
        next_examples = (examples + 1) % len(self.kinds)
        # If the next example has no rejected answer, use its chosen answer.
        next_segments = (next_examples, np.where(self.kinds[next_examples, columns] > 0, columns, 0))
        prompt_lengths = self.prompts[examples, columns]
        num_answers = (self.kinds > 0).sum(1)
        repeated_prompts = np.where(self.kinds > 0, self.prompts, 0).sum(1)
        room_per_answer = (row_length - self.lengths.sum(1) - repeated_prompts) // num_answers
        full_lengths = self.lengths[next_segments] - self.prompts[next_segments]
        answer_lengths = np.minimum(full_lengths, room_per_answer[examples])
        if max_length is not None:
            answer_lengths = np.minimum(answer_lengths, max_length - prompt_lengths)
        prompt_order = self.kinds.shape[1] + 2 * columns  # after the example's own segments
        prompts = _SegmentPieces(
            starts=self.starts[examples, columns],
            lengths=prompt_lengths,
            kinds=np.full_like(prompt_lengths, MISMATCHED),
            examples=examples,
            order=prompt_order,
        )
        answers = _SegmentPieces(
            starts=self.starts[next_segments] + self.prompts[next_segments],
            lengths=answer_lengths,
            kinds=np.zeros_like(prompt_lengths),
            examples=examples,
            order=prompt_order + 1,
        )
        return (prompts, answers), int((answer_lengths < full_lengths).sum())


def _read_examples(store: TokenStore, part_starts: Ints) -> _Examples:
    """Return the examples of a store; `part_starts` are the offsets of each part's first token."""
    tables = [np.asarray(part.segments, dtype=np.int64) for part in store.parts]
    table = np.concatenate([np.empty((0, MAX_SEGMENTS, 3), np.int64), *tables])
    kinds, prompts, lengths = np.moveaxis(table, 2, 0)
    example_starts = [
        int(start) + np.concatenate([[0], np.asarray(part.ends)[:-1]])
        for start, part in zip(part_starts, store.parts, strict=False)
    ]
    all_starts = np.concatenate([np.empty(0, np.int64), *example_starts])
    margins = [np.array(part.margins) for part in store.parts]
    return _Examples(
        starts=all_starts[:, None] + np.cumsum(lengths, axis=1) - lengths,
        prompts=prompts,
        lengths=lengths,
        kinds=kinds,
        margins=np.concatenate([np.empty(0, np.float32), *margins]),
    )


def prepare_text(config: TextDataConfig | ChatDataConfig | PreferenceDataConfig) -> DataBundle:
    """Return the rows of every source and evaluation set. Tokenise parts that are not in the cache.

    Raises:
        DataError: A source, the tokenizer or the cache cannot be used, or there is too little text.
    """
    prepared = prepare_documents(config)

    def pack_rows(store: TokenStore) -> PackedDataset:
        end_id = prepared.tokenizer.eos_token_id
        size = config.sequence_length
        preferences = config.preferences
        if preferences is not None:
            return PreferenceRows(
                store,
                size,
                end_id,
                share_rows=preferences.packing == "best_fit",
                mismatched=preferences.is_unpaired,
                answer_length=preferences.answer_length,
            )
        return pack_documents(store, config.packing, size, config.separate_documents, end_id)

    train = {source.name: pack_rows(source.train) for source in prepared.sources}
    if not any(map(len, train.values())):
        raise _make_too_little_data_error(prepared, config)
    held_out = {source.name: pack_rows(source.eval) for source in prepared.sources}
    eval_sets = {source.name: pack_rows(source.eval) for source in prepared.eval_sets}
    datasets = [*train.values(), *held_out.values(), *eval_sets.values()]
    mixture = tuple(
        SourceShare(
            source.name or "",
            len(train[source.name or ""]),
            source.weight if isinstance(source.weight, float | int) else None,
            source.epochs,
        )
        for source in config.all_sources()
    )
    longest = unify_shapes([dataset for dataset in datasets if isinstance(dataset, PreferenceRows)])
    answers = Counter[int]()
    for source in config.all_sources():
        source_rows = train[source.name or ""]
        if source.weight != 0 and isinstance(source_rows, PreferenceRows):
            answers += source_rows.count_answers()
    return DataBundle(
        train=join_datasets(list(train.values())),
        eval=_drop_empty_sets(held_out, prepared.sources, config) if config.eval_fraction else {},
        eval_sets=_drop_empty_sets(eval_sets, prepared.eval_sets, config),
        collate=collate_items,
        tokenizer=prepared.tokenizer,
        vocab_size=prepared.vocab_size,
        num_classes=None,
        fingerprint=prepared.fingerprint,
        longest_segment=longest,
        mixture=mixture,
        weights_at=build_weights(config, mixture),
        answer_counts=answers,
    )


def _drop_empty_sets(
    rows: Mapping[str, PackedDataset], sources: list[PreparedSource], config: DocumentsConfig
) -> dict[str, PackedDataset]:
    """Return the data sets that have a row, and log a warning for each of the others.

    Documents are held out by their hash, so a small source may have none. An evaluation set may be shorter
    than a sequence.
    """
    for source in sources:
        if not len(rows[source.name]):
            size = f"{source.eval.num_tokens} tokens in {source.eval.num_documents} documents"
            minimum = f"one sequence takes {config.sequence_length + 1} tokens"
            if config.preferences is not None and config.preferences.is_unpaired:
                minimum = "unpaired answers need two examples"
            advice = "add documents"
            if source.name not in config.eval_sets:
                size += f" are held out (data.eval_fraction {config.eval_fraction:g})"
                advice = "raise data.eval_fraction, or add documents"
            log.warning(
                "no evaluation on %s: %s, and %s; %s",
                source.name,
                size,
                minimum,
                advice,
            )
    return {name: dataset for name, dataset in rows.items() if len(dataset)}


def _make_too_little_data_error(prepared: PreparedDocuments, config: DocumentsConfig) -> DataError:
    tokens = [source.train.num_tokens for source in prepared.sources]
    documents = [source.train.num_documents for source in prepared.sources]
    if config.preferences is not None:
        num_held_out = sum(source.eval.num_documents for source in prepared.sources)
        minimum = ""
        if config.preferences.is_unpaired:
            minimum = "; unpaired answers need two examples, because each is compared with another one"
        return DataError(
            f"data has {sum(documents)} examples to train on ({num_held_out} more are held out){minimum}: "
            "add examples, or lower data.eval_fraction"
        )
    num_held_out = sum(source.eval.num_tokens for source in prepared.sources)
    return DataError(
        f"data has {sum(tokens)} training tokens in {sum(documents)} documents ({num_held_out} more tokens "
        f"are held out); one sequence takes {config.sequence_length + 1}: add text, or lower "
        "data.sequence_length or data.eval_fraction"
    )
