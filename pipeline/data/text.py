"""Prepares text, conversations and preferences: packs the documents of every source into rows."""

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
from pipeline.data.sampler import SourceShare
from pipeline.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.prepared import PreparedDocuments, PreparedSource, TokenStore


class PreferenceRows(PaddedRows):
    """Rows of whole preference examples. A segment is a prompt and an answer, and attends to itself alone.

    Both answers of a pair are in one row, so that no pair is divided over ranks, except by Ulysses. In
    addition to those of PackedDataset, a batch has these entries, with the segments of a row counted from 0:

    `segments` (B, T) int64: segment of each token, -1 in padding; `segment_kinds` (B, S) int64: kind of each
    segment (see preference_layouts.py), 0 if there is none. A pair's chosen answer is segment 2k, its
    rejected answer 2k + 1; `margins` (B, S) float32, if any example has a margin: that of each chosen answer;
    0 elsewhere.

    The tokens of an answer are in the loss, including its end.

    Args:
        store: Store of the examples.
        sequence_length: Tokens of a row, T.
        end_id: Token of the padding.
        share_rows: Whether several examples share a row if they fit (`best_fit`); otherwise each has a row of
            its own (`none`).
        mismatched: Whether each example's prompts are repeated with the answers of the next example. These
            answers are cut at the end of the row. A single example is left out then.
        answer_length: Maximum number of tokens of a mismatched answer with its prompt; `None` for no limit.

    Attributes:
        longest: Number of tokens of the longest segment. Positions in padding restart after as many, too.
        num_segments: Number of segments in a row, S.
        has_margins: Whether batches have `margins`.
        mismatched_cut: Number of mismatched answers that are cut.
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
        found = examples.find_own_segments()
        self.mismatched_cut = 0
        if mismatched:
            further, self.mismatched_cut = examples.make_mismatched_segments(sequence_length, answer_length)
            found = _SegmentPieces(*map(np.concatenate, zip(found, *further, strict=True)))
            if len(examples.kinds) == 1:  # there is no other example's answer
                found = _SegmentPieces(*(values[:0] for values in found))
        by_example = np.lexsort((found.places, found.examples))
        found = _SegmentPieces(*(values[by_example] for values in found))
        ends = np.ones(len(found.starts), np.bool_)
        pieces = DocumentPieces(found.starts, found.lengths.astype(np.int32), ends, 0)
        order = self._arrange(pieces, share_rows, found.examples)
        self._kinds = found.kinds[order].astype(np.int8)
        # The margin belongs to the chosen answer, the first of its example.
        margins = np.where(found.places == 0, examples.margins[found.examples], np.nan)[order]
        self.has_margins = bool(np.isfinite(margins).any())
        self._margins = np.nan_to_num(margins)
        begun = compute_offsets(self._kinds > 0)[self._bounds]
        self.num_segments = int(np.diff(begun).max(initial=1))
        whole = np.bincount(np.cumsum(self._kinds > 0), self._lengths)
        self.longest = int(whole.max(initial=1))

    def count_answers(self) -> Counter[int]:
        """Return the number of segments by kind."""
        return Counter(self._kinds[self._kinds > 0].tolist())

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        placed = self._place_pieces(indices)
        pair = self._read_pieces(placed)
        kinds = self._kinds[placed.pieces]
        begins = kinds > 0
        inputs, labels = pair.reshape(2, -1)
        # The last token of a prompt predicts the first token of another example's answer.
        joins = placed.places[~begins]
        labels[joins - 1] = inputs[joins]
        batch = self._make_batch(pair, np.concatenate([placed.places[begins], placed.row_ends]))
        before = compute_offsets(np.bincount(placed.of_row, begins, placed.rows))[:-1]
        number = np.cumsum(begins) - 1 - before[placed.of_row]
        batch["position_ids"] %= self.longest
        segments = np.full(inputs.shape, -1)
        shift = placed.places - np.cumsum(placed.lengths) + placed.lengths
        taken = np.repeat(shift, placed.lengths) + np.arange(placed.lengths.sum())
        segments[taken] = np.repeat(number, placed.lengths)
        batch["segments"] = torch.from_numpy(segments.reshape(pair.shape[1:]))
        where = placed.of_row[begins], number[begins]
        table = np.zeros((placed.rows, self.num_segments), dtype=np.int64)
        table[where] = kinds[begins]
        batch["segment_kinds"] = torch.from_numpy(table)
        if self.has_margins:
            margins = np.zeros(table.shape, dtype=np.float32)
            margins[where] = self._margins[placed.pieces][begins]
            batch["margins"] = torch.from_numpy(margins)
        return batch


def unify_shapes(datasets: Sequence[PreferenceRows]) -> int | None:
    """Make the batches of all data sets have the same entries and shapes; log how many answers are cut.

    Returns:
        Number of tokens of the longest segment; `None` if there are no data sets.
    """
    most = max((rows.num_segments for rows in datasets), default=1)
    has_margins = any(rows.has_margins for rows in datasets)
    for rows in datasets:
        rows.num_segments = most
        rows.has_margins = has_margins
    if cut := sum(rows.mismatched_cut for rows in datasets):
        log.info(
            "%d answers are cut that were combined with another example's prompt to estimate the KL term: "
            "their rows are full; a larger data.sequence_length keeps them whole",
            cut,
        )
    return max((rows.longest for rows in datasets), default=None)


class _SegmentPieces(NamedTuple):
    """N ranges of a store's tokens: whole segments, or prompts and answers that form a segment together.

    Attributes:
        starts: (N,) offset of the first token.
        lengths: (N,) number of tokens.
        kinds: (N,) kind of the segment that begins with the piece; 0 if the piece continues a segment.
        examples: (N,) number of the example.
        places: (N,) order of the piece within its example.
    """

    starts: Ints
    lengths: Ints
    kinds: Ints
    examples: Ints
    places: Ints


class _Examples(NamedTuple):
    """All N examples of a store, with k segments each."""

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
        """Return all segments of the examples."""
        examples, places = np.nonzero(self.kinds)
        there = examples, places
        return _SegmentPieces(self.starts[there], self.lengths[there], self.kinds[there], examples, places)

    def make_mismatched_segments(
        self, size: int, longest: int | None
    ) -> tuple[tuple[_SegmentPieces, _SegmentPieces], int]:
        """Combine each prompt with an answer of the next example; the last example takes the first's.

        Each answer keeps at least one token, since examples are prepared so that there is room.

        Returns:
            Pieces of the prompts and of the answers, and the number of answers that are cut.
        """
        examples, places = np.nonzero(self.kinds)
        others = (examples + 1) % len(self.kinds)
        # If the next example has no rejected answer, its chosen answer is used.
        theirs = others, np.where(self.kinds[others, places] > 0, places, 0)
        prompts = self.prompts[examples, places]
        counts = (self.kinds > 0).sum(1)
        room = (size - self.lengths.sum(1) - np.where(self.kinds > 0, self.prompts, 0).sum(1)) // counts
        wanted = self.lengths[theirs] - self.prompts[theirs]
        answers = np.minimum(wanted, room[examples])
        if longest is not None:
            answers = np.minimum(answers, longest - prompts)
        behind = self.kinds.shape[1] + 2 * places
        ours = _SegmentPieces(
            self.starts[examples, places], prompts, np.full_like(prompts, MISMATCHED), examples, behind
        )
        begin = self.starts[theirs] + self.prompts[theirs]
        answered = _SegmentPieces(begin, answers, np.zeros_like(prompts), examples, behind + 1)
        return (ours, answered), int((answers < wanted).sum())


def _read_examples(store: TokenStore, first: Ints) -> _Examples:
    tables = [np.asarray(part.segments, dtype=np.int64) for part in store.parts]
    table = np.concatenate([np.empty((0, 2, 3), np.int64), *tables])
    begins = [
        int(start) + np.concatenate([[0], np.asarray(part.ends)[:-1]])
        for start, part in zip(first, store.parts, strict=False)
    ]
    kinds, prompts, lengths = np.moveaxis(table, 2, 0)
    of_first = np.concatenate([np.empty(0, np.int64), *begins])
    starts = of_first[:, None] + np.cumsum(lengths, axis=1) - lengths
    margins = [np.array(part.margins) for part in store.parts]
    return _Examples(starts, prompts, lengths, kinds, np.concatenate([np.empty(0, np.float32), *margins]))


log = logging.getLogger(__name__)


def prepare_text(config: TextDataConfig | ChatDataConfig | PreferenceDataConfig) -> DataBundle:
    """Return rows of tokens of every source and evaluation set; tokenise parts that are not in the cache.

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
        raise _too_little_error(prepared, config)
    held_out = {source.name: pack_rows(source.eval) for source in prepared.sources}
    further = {source.name: pack_rows(source.eval) for source in prepared.eval_sets}
    everything = [*train.values(), *held_out.values(), *further.values()]
    mixture = tuple(
        SourceShare(
            source.name or "",
            len(train[source.name or ""]),
            source.weight if isinstance(source.weight, float | int) else None,
            source.epochs,
        )
        for source in config.all_sources()
    )
    longest = unify_shapes([each for each in everything if isinstance(each, PreferenceRows)])
    answers = Counter[int]()
    for source in config.all_sources():
        source_rows = train[source.name or ""]
        if source.weight != 0 and isinstance(source_rows, PreferenceRows):
            answers += source_rows.count_answers()
    return DataBundle(
        train=join_datasets(list(train.values())),
        eval=_drop_empty(held_out, prepared.sources, config) if config.eval_fraction else {},
        eval_sets=_drop_empty(further, prepared.eval_sets, config),
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


def _drop_empty(
    rows: Mapping[str, PackedDataset], sources: list[PreparedSource], config: DocumentsConfig
) -> dict[str, PackedDataset]:
    """Return the data sets that have a row, and log a warning for each of the others.

    A data set may be empty because whole documents are held out, by their hash.
    """
    for source in sources:
        if not len(rows[source.name]):
            size = f"{source.eval.num_tokens} tokens in {source.eval.num_documents} documents"
            log.warning(
                "no evaluation on %s: %s are held out (data.eval_fraction %g), and one sequence takes %d "
                "tokens; raise data.eval_fraction, or add documents",
                source.name,
                size,
                config.eval_fraction,
                config.sequence_length + 1,
            )
    return {name: dataset for name, dataset in rows.items() if len(dataset)}


def _too_little_error(prepared: PreparedDocuments, config: DocumentsConfig) -> DataError:
    tokens = [source.train.num_tokens for source in prepared.sources]
    documents = [source.train.num_documents for source in prepared.sources]
    if (preferences := config.preferences) is not None:
        held_back = sum(source.eval.num_documents for source in prepared.sources)
        least = (
            "; unpaired answers need two, as each is compared with another's"
            if preferences.is_unpaired
            else ""
        )
        return DataError(
            f"data holds {sum(documents)} examples to train on ({held_back} more are held out){least}: add "
            "examples, or lower data.eval_fraction"
        )
    held_out = sum(source.eval.num_tokens for source in prepared.sources)
    return DataError(
        f"data holds {sum(tokens)} training tokens in {sum(documents)} documents ({held_out} more tokens are "
        f"held out); one sequence takes {config.sequence_length + 1}: add text, or lower "
        "data.sequence_length or data.eval_fraction"
    )
