"""Text, conversations and preferences: the prepared documents of every source become rows of equal length."""

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
    """`best_fit` and `none`: whole examples. Every segment is a prompt and an answer, and sees itself alone.

    A batch has besides, where segments of a row are counted from 0:

    `segments` (B, T) int64: of the segment that the token belongs to, -1 in padding;
    `segment_kinds` (B, S) int64: see preference_layouts.py, 0 where there is none. A pair's chosen answer is
    segment 2k, its rejected one 2k + 1;
    `margins` (B, S) float32, where any example has one: by how much a chosen answer is better; else 0.

    What counts are the tokens of an answer, its end included.

    Args:
        end_id: The token of padded places.
        share_rows: Several examples to a row where they fit, else each has one of its own.
        mismatched: Behind each example its prompts once more, with the answers of the next example. Those are
            cut where the row ends. A lone example is left out.
        answer_length: Tokens after which mismatched answers are cut, their prompt included. `None`: no limit.

    Attributes:
        longest: Tokens of the longest segment. Positions restart after as many in padding, too.
        num_segments: S.
        has_margins: Whether a batch has them.
        mismatched_cut: Answers of other examples that are not whole.
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
        examples = _read(store, self._first)
        found, self.mismatched_cut = examples.own(), 0
        if mismatched:
            further, self.mismatched_cut = examples.mismatched(sequence_length, answer_length)
            found = _Found(*map(np.concatenate, zip(found, *further, strict=True)))
            if len(examples.kinds) == 1:  # there is no other's answer
                found = _Found(*(values[:0] for values in found))
        by_example = np.lexsort((found.places, found.examples))
        found = _Found(*(values[by_example] for values in found))
        ends = np.ones(len(found.starts), np.bool_)
        pieces = DocumentPieces(found.starts, found.lengths.astype(np.int32), ends, 0)
        order = self._arrange(pieces, share_rows, found.examples)
        self._kinds = found.kinds[order].astype(np.int8)
        # A chosen answer's, which is the first of its example.
        margins = np.where(found.places == 0, examples.margins[found.examples], np.nan)[order]
        self.has_margins = bool(np.isfinite(margins).any())
        self._margins = np.nan_to_num(margins)
        begun = compute_offsets(self._kinds > 0)[self._bounds]
        self.num_segments = int(np.diff(begun).max(initial=1))
        whole = np.bincount(np.cumsum(self._kinds > 0), self._lengths)
        self.longest = int(whole.max(initial=1))

    def answers(self) -> Counter[int]:
        """Return the number of segments by kind."""
        return Counter(self._kinds[self._kinds > 0].tolist())

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        placed = self._place(indices)
        pair = self._fill(placed)
        kinds = self._kinds[placed.pieces]
        begins = kinds > 0
        inputs, labels = pair.reshape(2, -1)
        joins = placed.places[~begins]  # a prompt that another example's answer follows predicts it
        labels[joins - 1] = inputs[joins]
        batch = self._batch(pair, np.concatenate([placed.places[begins], placed.row_ends]))
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
    """Give the batches of all the same entries and shapes. Log how many mismatched answers are not whole.

    Returns:
        Tokens of the longest segment; `None` if there are no data sets.
    """
    most = max((rows.num_segments for rows in datasets), default=1)
    has_margins = any(rows.has_margins for rows in datasets)
    for rows in datasets:
        rows.num_segments, rows.has_margins = most, has_margins
    if cut := sum(rows.mismatched_cut for rows in datasets):
        log.info(
            "%d answers that stand behind another example's prompt, for an estimate of the KL term, are cut: "
            "their rows are full; a larger data.sequence_length keeps them whole",
            cut,
        )
    return max((rows.longest for rows in datasets), default=None)


class _Found(NamedTuple):
    """Stretches of a store (N,): segments, or their prompts and then their answers.

    Attributes:
        kinds: Of the segment that begins there; 0: it goes on with what stands before.
        places: The order within the example.
    """

    starts: Ints
    lengths: Ints
    kinds: Ints
    examples: Ints
    places: Ints


class _Examples(NamedTuple):
    """All N examples of a store, and the segments (N, k) of each."""

    starts: Ints
    prompts: Ints
    """Tokens of each segment's prompt."""
    lengths: Ints
    kinds: Ints
    """0: there is none."""
    margins: NDArray[np.float32]
    """(N,) NaN: not known."""

    def own(self) -> _Found:
        examples, places = np.nonzero(self.kinds)
        there = examples, places
        return _Found(self.starts[there], self.lengths[there], self.kinds[there], examples, places)

    def mismatched(self, size: int, longest: int | None) -> tuple[tuple[_Found, _Found], int]:
        """Return prompts and answers of the next examples (of the last: the first); how many are cut.

        Each answer has a token at least: examples are prepared so that there is room.
        """
        examples, places = np.nonzero(self.kinds)
        others = (examples + 1) % len(self.kinds)
        # The next one's chosen answer stands for a rejected one it does not have.
        theirs = others, np.where(self.kinds[others, places] > 0, places, 0)
        prompts, counts = self.prompts[examples, places], (self.kinds > 0).sum(1)
        room = (size - self.lengths.sum(1) - np.where(self.kinds > 0, self.prompts, 0).sum(1)) // counts
        wanted = self.lengths[theirs] - self.prompts[theirs]
        answers = np.minimum(wanted, room[examples])
        if longest is not None:
            answers = np.minimum(answers, longest - prompts)
        behind = self.kinds.shape[1] + 2 * places
        ours = _Found(
            self.starts[examples, places], prompts, np.full_like(prompts, MISMATCHED), examples, behind
        )
        begin = self.starts[theirs] + self.prompts[theirs]
        answered = _Found(begin, answers, np.zeros_like(prompts), examples, behind + 1)
        return (ours, answered), int((answers < wanted).sum())


def _read(store: TokenStore, first: Ints) -> _Examples:
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
    """Return rows of tokens of every source and eval set; tokenise first what the cache does not have.

    Raises:
        DataError: a source, the tokenizer or the cache cannot be used, or there is too little text.
    """
    prepared = prepare_documents(config)

    def rows(store: TokenStore) -> PackedDataset:
        end_id, size = prepared.tokenizer.eos_token_id, config.sequence_length
        if (preferences := config.preferences) is not None:
            return PreferenceRows(
                store,
                size,
                end_id,
                share_rows=preferences.packing == "best_fit",
                mismatched=preferences.is_unpaired,
                answer_length=preferences.answer_length,
            )
        return pack_documents(store, config.packing, size, config.separate_documents, end_id)

    train = {source.name: rows(source.train) for source in prepared.sources}
    if not any(map(len, train.values())):
        raise _too_little(prepared, config)
    held_out = {source.name: rows(source.eval) for source in prepared.sources}
    further = {source.name: rows(source.eval) for source in prepared.eval_sets}
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
    return DataBundle(
        train=join_datasets(list(train.values())),
        eval=_usable(held_out, prepared.sources, config) if config.eval_fraction else {},
        eval_sets=_usable(further, prepared.eval_sets, config),
        collate=collate_items,
        tokenizer=prepared.tokenizer,
        vocab_size=prepared.vocab_size,
        num_classes=None,
        fingerprint=prepared.fingerprint,
        longest=longest,
        mixture=mixture,
        weights_at=build_weights(config, mixture),
        answers=sum(
            (
                rows_of_source.answers()
                for source in config.all_sources()
                if source.weight != 0
                and isinstance(rows_of_source := train[source.name or ""], PreferenceRows)
            ),
            Counter[int](),
        ),
    )


def _usable(
    rows: Mapping[str, PackedDataset], sources: list[PreparedSource], config: DocumentsConfig
) -> dict[str, PackedDataset]:
    """Return the data sets that have a row; name the others: whole documents are held out, by their hash."""
    for source in sources:
        if not len(rows[source.name]):
            log.warning(
                "no evaluation on %s: %d tokens in %d documents are held out (data.eval_fraction %g), one "
                "sequence takes %d; a larger data.eval_fraction or more documents give some to evaluate on",
                source.name,
                source.eval.num_tokens,
                source.eval.num_documents,
                config.eval_fraction,
                config.sequence_length + 1,
            )
    return {name: dataset for name, dataset in rows.items() if len(dataset)}


def _too_little(prepared: PreparedDocuments, config: DocumentsConfig) -> DataError:
    tokens = [source.train.num_tokens for source in prepared.sources]
    documents = [source.train.num_documents for source in prepared.sources]
    if (preferences := config.preferences) is not None:
        held_back = sum(source.eval.num_documents for source in prepared.sources)
        least = (
            "; unpaired answers need two, as each stands beside another's" if preferences.is_unpaired else ""
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
