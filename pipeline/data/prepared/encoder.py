"""Encodes batches of records as token ids: the interface of encoders, and the encoder for plain text."""

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

Records = list[tuple[str, Record]]  # location (for messages) and content of each record
# A text of more characters is cut into pieces, and about as many characters are encoded in one call.
LONG_TEXT_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class TokenizedDocument:
    """One tokenised document.

    Attributes:
        ids: (n,) token ids (unsigned), including the end-of-document token.
        loss_mask: (n,) bool, whether each token is in the loss; `None` if all are.
        key: Bytes that identify the content. Their hash decides whether the document is held out.
        segments: (1 or 2, 3) int32, a row for each judged answer: its kind (see preference_layouts.py), the
            number of tokens of its prompt, and that of prompt and answer. `None` except in preference data.
        margin: Score of the first answer minus that of the second; `None` if not known.
    """

    ids: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None
    key: bytes
    segments: NDArray[np.int32] | None = None
    margin: float | None = None


Encoder = Callable[[Records, Tally], list[TokenizedDocument]]
"""Function that tokenises a batch of records, and counts in the tally the records it drops or changes."""


@dataclass(frozen=True)
class EncoderSettings:
    """Settings from which a worker process builds its encoder; picklable.

    Attributes:
        config: The recipe's data section.
        tokenizer: Folder with the tokenizer's files.
        end_of_document: Id of the end-of-document token.
        vocab_size: Upper bound of token ids (exclusive).
        threads: Number of threads that the encoder may use.
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


def load_plain_text_tokenizer(folder: Path) -> Any:
    """Load the `tokenizers.Tokenizer` in a folder so that it encodes special tokens as text.

    Truncation and padding are off.
    """
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
        self._core = load_plain_text_tokenizer(settings.tokenizer)

    def __call__(self, records: Records, tally: Tally) -> list[TokenizedDocument]:
        """Return a document for each text, in order."""
        texts = [record for _, record in records if isinstance(record, str)]
        assert len(texts) == len(records), "read_texts yields texts"
        keys = [text.encode() for text in texts]
        short_rows = iter(self._encode([text for text in texts if len(text) <= LONG_TEXT_CHARACTERS]))
        documents = []
        for text, key in zip(texts, keys, strict=True):
            is_long = len(text) > LONG_TEXT_CHARACTERS
            row = self._encode_long(text) if is_long else next(short_rows)
            documents.append(TokenizedDocument(np.concatenate([row, self._end]), None, key))
        return documents

    def _encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encodings = self._core.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def _encode_long(self, text: str) -> NDArray[Any]:
        pieces = cut_text(self._core, text)
        rows = []
        while batch := list(islice(pieces, LONG_TEXT_CHARACTERS // PIECE_CHARACTERS)):
            rows += self._encode(batch)
        return np.concatenate(rows)
