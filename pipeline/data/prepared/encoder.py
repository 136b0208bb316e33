"""Records -> documents of token ids, batch by batch: the interface, and plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import DocumentsConfig
from pipeline.data.documents.records import Record, Tally
from pipeline.data.prepared.fast import FastTokeniser
from pipeline.data.tokenizer import PIECE, cut_text, find_places

Records = list[tuple[str, Record]]  # where it stands, and what is there
LONG = 1_000_000  # characters: longer texts are cut, and no more of their pieces encoded at once


@dataclass(frozen=True)
class Document:
    """One tokenised document.

    Attributes:
        ids: (n,) unsigned integers, the end-of-document token included.
        loss_mask: (n,) bool, which tokens count in the loss; None: all.
        key: What its hash is made of, by which it is held out and duplicates are found.
        segments: (1 or 2, 3) int32, where answers were judged: of each its kind (preference_layouts.py), the
            tokens of its prompt, and all its tokens. None: one text.
        margin: By how much the first is better, where that is known.
    """

    ids: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None
    key: bytes
    segments: NDArray[np.int32] | None = None
    margin: float | None = None


# Tokenises a batch of records; what it leaves out, or changes, is counted in the tally.
Encoder = Callable[[Records, Tally], list[Document]]


@dataclass(frozen=True)
class EncoderSettings:
    """All that a worker process needs to make its encoder; picklable.

    Attributes:
        config: The recipe's data section.
        tokenizer: Folder with the tokenizer's files.
        end_of_document: Id of the token that ends a document.
        vocab_size: Ids are below this.
        fast: Use gigatoken, which was shown to give the same ids.
        threads: Threads that one call may use.
    """

    config: DocumentsConfig
    tokenizer: Path
    end_of_document: int
    vocab_size: int
    fast: bool
    threads: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ids on disk: the smallest that holds them all, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


def plain_text_tokenizer(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` of a folder, set up for plain text: all of it, and no special tokens."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = True  # "<|endoftext|>" written in a document is text
    return core


class TextEncoder:
    """A text, and the end-of-document token behind it. Records are texts, as `read_texts` gives them."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._end = settings.end_of_document
        self._dtype = settings.dtype
        self._core = plain_text_tokenizer(settings.tokenizer)
        self._fast = FastTokeniser(settings.tokenizer, settings.threads > 1) if settings.fast else None

    def __call__(self, records: Records, tally: Tally) -> list[Document]:
        texts = [record for _, record in records if isinstance(record, str)]
        assert len(texts) == len(records), "read_texts gives texts"
        keys = [text.encode() for text in texts]
        found = self._fast.encode(keys) if self._fast is not None else None
        rows = self._standard(texts) if found is None else self._cut(*found)
        return [Document(ids, None, key) for ids, key in zip(rows, keys, strict=True)]

    def _standard(self, texts: list[str]) -> list[NDArray[Any]]:
        short = iter(self._encode([text for text in texts if len(text) <= LONG]))
        end = np.array([self._end], dtype=self._dtype)
        return [
            np.concatenate([*([next(short)] if len(text) <= LONG else self._encode_long(text)), end])
            for text in texts
        ]

    def _encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encodings = self._core.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def _encode_long(self, text: str) -> Iterator[NDArray[Any]]:
        pieces = cut_text(text, self._places)
        while some := list(islice(pieces, LONG // PIECE)):
            yield from self._encode(some)

    @cached_property
    def _places(self) -> re.Pattern[str] | None:
        return find_places(json.loads(self._core.to_str()))

    def _cut(self, ids: NDArray[np.uint32], offsets: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Rows out of ids (n,) in one array, with the end token put behind each; one pass over the ids."""
        count = len(offsets) - 1
        target = np.empty(len(ids) + count, dtype=self._dtype)
        bounds = offsets.tolist()
        rows = []
        for index in range(count):
            start, end = bounds[index], bounds[index + 1]
            row = target[start + index : end + index + 1]
            row[:-1] = ids[start:end]
            row[-1] = self._end
            rows.append(row)
        return rows
