"""Encodes batches of records as documents of token ids: the interface, and the encoder for plain text."""

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

Records = list[tuple[str, Record]]  # location for messages, and record
LONG = 1_000_000  # characters above which a text is divided, and that are encoded at once


@dataclass(frozen=True)
class TokenizedDocument:
    """One tokenised document.

    Attributes:
        ids: (n,) token ids (unsigned), including the end-of-document token.
        loss_mask: (n,) bool, whether each token is in the loss; `None` if all are.
        key: Bytes that identify the content. Their hash decides whether the document is held out.
        segments: (1 or 2, 3) int32, of judged answers: the kind of each (see preference_layouts.py), the
            tokens of its prompt, and all its tokens. `None` for other documents.
        margin: Difference between the scores of the first and the second answer; `None` if not known.
    """

    ids: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None
    key: bytes
    segments: NDArray[np.int32] | None = None
    margin: float | None = None


# Function that tokenises a batch of records, and counts in the tally what it leaves out or changes.
Encoder = Callable[[Records, Tally], list[TokenizedDocument]]


@dataclass(frozen=True)
class EncoderSettings:
    """Settings from which a worker process builds its encoder; picklable.

    Attributes:
        config: The recipe's data section.
        tokenizer: Folder with the tokenizer's files.
        end_of_document: Id of the end-of-document token.
        vocab_size: Upper bound of token ids (exclusive).
        threads: Number of threads that one call may use.
    """

    config: DocumentsConfig
    tokenizer: Path
    end_of_document: int
    vocab_size: int
    threads: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of token ids on disk: the smallest that fits, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


def plain_text_tokenizer(folder: Path) -> Any:
    """Return the `tokenizers.Tokenizer` in a folder, set up to encode special tokens as text, untruncated."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = True  # "<|endoftext|>" written in a document is text
    return core


class TextEncoder:
    """Encodes texts from `read_texts`, and appends the end-of-document token to each."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._dtype = settings.dtype
        self._end = np.array([settings.end_of_document], dtype=self._dtype)
        self._core = plain_text_tokenizer(settings.tokenizer)

    def __call__(self, records: Records, tally: Tally) -> list[TokenizedDocument]:
        """Return a document for each text, in order."""
        texts = [record for _, record in records if isinstance(record, str)]
        assert len(texts) == len(records), "read_texts yields texts"
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
