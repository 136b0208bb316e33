"""Text: documents become token files in the cache, a mapped token file becomes sequences of equal length."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.config.data_schema import TextDataConfig
from pipeline.data.bundle import Batch, DataBundle, collate_items
from pipeline.data.cache import cached_entry, read_index
from pipeline.data.sources import digest_sources, find_sources
from pipeline.data.tokenise import FORMAT_VERSION, TextPreparation
from pipeline.data.tokenizer import digest_tokenizer, load_pretrained, read_tokenizer, token_ids_end
from pipeline.errors import DataError

log = logging.getLogger(__name__)


class TextDataset(Dataset[Batch]):
    """Sequences of T tokens and the tokens that follow them.

    Sample i is the window tokens[i * T : i * T + T + 1]; `input_ids` (T,) int64 are its first T tokens,
    `shift_labels` (T,) int64 its last T (transformers' word for labels that are already shifted by one).
    Tokens at the end that fill no window are left out.
    """

    is_deterministic = True

    def __init__(self, path: Path, sequence_length: int) -> None:
        self.path = path
        self.sequence_length = sequence_length
        tokens = np.load(path, mmap_mode="r").view(
            np.ndarray
        )  # (num_tokens,); memmap's own class is slow to slice
        self.num_tokens = len(tokens)
        size = tokens.itemsize
        count = max(0, len(tokens) - 1) // sequence_length
        self._windows = as_strided(  # (N, T + 1), overlapping by one; no copy
            tokens, (count, sequence_length + 1), (sequence_length * size, size), writeable=False
        )

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Batch:
        pair = self._pairs([index])[:, 0]  # (2, T)
        return {"input_ids": pair[0], "shift_labels": pair[1]}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch at once: `input_ids` and `shift_labels`, each (B, T) and contiguous."""
        pairs = self._pairs(indices)
        return {"input_ids": pairs[0], "shift_labels": pairs[1]}

    def _pairs(self, indices: Sequence[int]) -> Tensor:
        windows = self._windows[indices]  # (B, T + 1), the one read of the file
        pairs = np.empty((2, len(windows), self.sequence_length), dtype=np.int64)
        pairs[0] = windows[:, :-1]
        pairs[1] = windows[:, 1:]
        return torch.from_numpy(pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextDataset, (self.path, self.sequence_length)  # a worker maps the file itself


def prepare_text(config: TextDataConfig) -> DataBundle:
    """Tokenised text from the cache; read, tokenised and stored first if it is not there.

    Raises:
        DataError: a path, a file, the tokenizer or the cache cannot be used, or there is too little text.
    """
    sources = find_sources(config.paths or [])
    digest, size = digest_sources(sources)
    pretrained = config.tokenizer.pretrained
    tokenizer = load_pretrained(pretrained) if pretrained is not None else None
    settings = {
        "format_version": FORMAT_VERSION,
        "sources": digest,
        "text_field": config.text_field,
        "eval_fraction": config.eval_fraction,
        "tokenizer": config.tokenizer.vocab_size if tokenizer is None else digest_tokenizer(tokenizer),
    }
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    preparation = TextPreparation(config, sources, digest, size, tokenizer, settings)
    entry = cached_entry(Path(config.cache_dir).expanduser(), key, preparation.write)
    log.info("tokenised text: %s", entry)
    if tokenizer is None:
        tokenizer = read_tokenizer(entry / "tokenizer.json")
    index = read_index(entry)
    held_out = _eval_split(entry, index, config)
    return DataBundle(
        train=_train_split(entry, index, config),
        eval={} if held_out is None else {"text": held_out},
        collate=collate_items,
        tokenizer=tokenizer,
        vocab_size=token_ids_end(tokenizer),
        num_classes=None,
        fingerprint=key,
    )


def _train_split(entry: Path, index: dict[str, Any], config: TextDataConfig) -> TextDataset:
    dataset = TextDataset(entry / "train.npy", config.sequence_length)
    if len(dataset) == 0:
        documents, tokens = index["documents"], index["tokens"]
        raise DataError(
            f"data.paths hold {tokens['train']} training tokens in {documents['train']} documents "
            f"({tokens['eval']} more in {documents['eval']} documents are held out); one sequence takes "
            f"{config.sequence_length + 1}: add text, or lower data.sequence_length or data.eval_fraction"
        )
    return dataset


def _eval_split(entry: Path, index: dict[str, Any], config: TextDataConfig) -> TextDataset | None:
    """None, with a warning, where too little text fell to this split: whole documents do, by their hash."""
    if config.eval_fraction == 0:
        return None
    dataset = TextDataset(entry / "eval.npy", config.sequence_length)
    if len(dataset) > 0:
        return dataset
    log.warning(
        "no evaluation: %d tokens in %d documents are held out (data.eval_fraction %g), one sequence "
        "takes %d; a larger data.eval_fraction or more documents give a split to evaluate on",
        index["tokens"]["eval"],
        index["documents"]["eval"],
        config.eval_fraction,
        config.sequence_length + 1,
    )
    return None
