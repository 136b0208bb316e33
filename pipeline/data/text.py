"""Text, conversations and preferences: the prepared documents of every source become rows of equal length."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.config.data_schema import ChatDataConfig, DocumentsConfig, PreferenceDataConfig, TextDataConfig
from pipeline.data.bundle import DataBundle, collate_items
from pipeline.data.curriculum import build_weights
from pipeline.data.packing import PackedDataset, join, pack
from pipeline.data.prepared import prepare_documents
from pipeline.data.sampler import SourceShare
from pipeline.data.segments import SegmentRows, agree
from pipeline.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.prepared import Prepared, PreparedSource, TokenStore

log = logging.getLogger(__name__)


def prepare_text(config: TextDataConfig | ChatDataConfig | PreferenceDataConfig) -> DataBundle:
    """Rows of tokens of every source and eval set; what the cache does not hold is tokenised first.

    Raises:
        DataError: a source, the tokenizer or the cache cannot be used, or there is too little text.
    """
    prepared = prepare_documents(config)

    def rows(store: TokenStore) -> PackedDataset:
        end_id, size = prepared.tokenizer.eos_token_id, config.sequence_length
        if (preferences := config.preferences) is not None:
            return SegmentRows(
                store,
                size,
                end_id,
                share_rows=preferences.packing == "best_fit",
                mismatched=preferences.is_unpaired,
                answer_length=preferences.answer_length,
            )
        return pack(store, config.packing, size, config.separate_documents, end_id)

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
    longest = agree([each for each in everything if isinstance(each, SegmentRows)])
    return DataBundle(
        train=join(list(train.values())),
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
                if source.weight != 0 and isinstance(rows_of_source := train[source.name or ""], SegmentRows)
            ),
            Counter[int](),
        ),
    )


def _usable(
    rows: Mapping[str, PackedDataset], sources: list[PreparedSource], config: DocumentsConfig
) -> dict[str, PackedDataset]:
    """Without those that fill no row, which are named: whole documents are held out, by their hash."""
    usable = {name: dataset for name, dataset in rows.items() if len(dataset)}
    for source in sources:
        if source.name in usable:
            continue
        if config.preferences is not None:
            log.warning(
                "no evaluation on %s: %d of its examples are held out (data.eval_fraction %g); a larger "
                "data.eval_fraction or more examples give some to evaluate on",
                source.name,
                source.eval.num_documents,
                config.eval_fraction,
            )
        else:
            log.warning(
                "no evaluation on %s: %d tokens in %d documents are held out (data.eval_fraction %g), one "
                "sequence takes %d; a larger data.eval_fraction or more documents give some to evaluate on",
                source.name,
                source.eval.num_tokens,
                source.eval.num_documents,
                config.eval_fraction,
                config.sequence_length + 1,
            )
    return usable


def _too_little(prepared: Prepared, config: DocumentsConfig) -> DataError:
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
