"""Text and conversations: prepared documents of every source become rows of equal length."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pipeline.config.data_schema import ChatDataConfig, TextDataConfig
from pipeline.data.bundle import DataBundle, JoinedDataset, collate_items
from pipeline.data.mixture import SourceShare
from pipeline.data.packing import PackedDataset, pack
from pipeline.data.prepared import prepare_documents
from pipeline.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.prepared.store import TokenStore

log = logging.getLogger(__name__)


def prepare_text(config: TextDataConfig | ChatDataConfig) -> DataBundle:
    prepared = prepare_documents(config)
    pad_id = prepared.tokenizer.pad_token_id
    pad_id = prepared.tokenizer.eos_token_id if pad_id is None else pad_id

    def rows(store: TokenStore) -> PackedDataset:
        return pack(store, config.packing, config.sequence_length, config.separate_documents, pad_id)

    given = {source.name: source for source in config.all_sources()}
    train = {source.name: rows(source.train) for source in prepared.sources}
    if not any(map(len, train.values())):
        raise DataError("too little text")
    shares = tuple(
        SourceShare(name, len(dataset), given[name].weight, given[name].epochs) for name, dataset in train.items()
    )
    held_out = {source.name: rows(source.eval) for source in prepared.sources}
    return DataBundle(
        train=JoinedDataset(list(train.values())),
        eval={name: dataset for name, dataset in held_out.items() if len(dataset)},
        eval_sets={source.name: rows(source.eval) for source in prepared.eval_sets},
        collate=collate_items,
        tokenizer=prepared.tokenizer,
        vocab_size=prepared.vocab_size,
        num_classes=None,
        fingerprint=prepared.fingerprint,
        mixture=shares,
    )
