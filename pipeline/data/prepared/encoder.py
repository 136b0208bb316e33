"""Records -> documents of token ids, batch by batch: the interface, and plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import DocumentsConfig
from pipeline.data.documents.records import Record, Tally
from pipeline.data.tokenizer import PIECE_CHARACTERS, cut_text

Records = list[tuple[str, Record]]  # where it stands, and what is there
LONG = 1_000_000  # characters: longer texts are cut, and no more of their pieces encoded together


@dataclass(frozen=True)
class TokenizedDocument:
    """One tokenised document.

    Attributes:
        ids: (n,) unsigned integers, the end-of-document token included.
        loss_mask: (n,) bool, which tokens count in the loss; None: all.
        key: Content of its hash, by which it is held out and duplicates are found.
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
Encoder = Callable[[Records, Tally], list[TokenizedDocument]]


@dataclass(frozen=True)
class EncoderSettings:
    """All that a worker process needs to make its encoder; picklable.

    Attributes:
        config: The recipe's data section.
        tokenizer: Folder with the tokenizer's files.
        end_of_document: Id of the token that ends a document.
        vocab_size: Ids are below this.
        threads: Threads that one call may use.
    """

    config: DocumentsConfig
    tokenizer: Path
    end_of_document: int
    vocab_size: int
    threads: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of ids on disk: the smallest that holds them all, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


def plain_text_tokenizer(folder: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a folder, set up for plain text: all of it, no special tokens."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = True  # "<|endoftext|>" written in a document is text
    return core


class TextEncoder:
    """A text, and the end-of-document token behind it. Records are texts, as `read_texts` gives them."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._dtype = settings.dtype
        self._end = np.array([settings.end_of_document], dtype=self._dtype)
        self._core = plain_text_tokenizer(settings.tokenizer)

    def __call__(self, records: Records, tally: Tally) -> list[TokenizedDocument]:
        texts = [record for _, record in records if isinstance(record, str)]
        assert len(texts) == len(records), "read_texts gives texts"
        keys = [text.encode() for text in texts]
        short = iter(self._encode([text for text in texts if len(text) <= LONG]))
        rows = [next(short) if len(text) <= LONG else self._encode_long(text) for text in texts]
        return [
            TokenizedDocument(np.concatenate([row, self._end]), None, key)
            for row, key in zip(rows, keys, strict=True)
        ]

    def _encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encodings = self._core.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def _encode_long(self, text: str) -> NDArray[Any]:
        pieces = cut_text(self._core, text)
        found = []
        while some := list(islice(pieces, LONG // PIECE_CHARACTERS)):
            found += self._encode(some)
        return np.concatenate(found)
