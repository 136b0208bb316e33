"""Records -> documents of token ids, batch by batch: the interface, and plain text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import DocumentsConfig
from pipeline.data.documents.records import Record, Tally
from pipeline.data.tokenizer import PIECE, cut_text
from pipeline.errors import one_line

log = logging.getLogger(__name__)

SAMPLE_DOCUMENTS = 300
SAMPLE_CHARACTERS = 3_000  # of each document
# Text that tokenisers most often disagree about.
NASTY = (
    "",
    " ",
    "   \n\t \r\n\r\n  x",
    "don't I'LL we've IT'S 'tis",
    "1234567890 12,345.67 １２３ ½ ²",
    "a\x00b\x7f\x1b[0m",
    "é e\u0301 \u1e9b\u0323 ﬁ İi ß",
    "🤷🏽\u200d♀️🇩🇪 \U0010ffff\ufffd",
    "\ufeffbyte order mark\u2028line\u2029paragraph\u00a0space\u200b\u3000",
    "日本語のテキスト 한국어 العربية עברית हिन्दी ไทย",
    "=" * 200 + "-" * 77 + " " * 130 + "x",
    "\t\tif (x != 0) { return ~x; } // ok\r\n",
    "snake_case CamelCase SHOUTED __dunder__ x1y2",
)


class FastTokeniser:
    """Ids of whole batches out of gigatoken.

    Args:
        folder: With the tokenizer's files.
        parallel: Use all cores from this process.

    Raises:
        ImportError: gigatoken is not installed.
        ValueError: gigatoken cannot read this tokenizer.
    """

    def __init__(self, folder: Path, parallel: bool) -> None:
        import gigatoken

        description = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        # It always takes special tokens for what they mean; not knowing them, it takes them for text.
        added = description.get("added_tokens") or []
        description["added_tokens"] = [token for token in added if not token.get("special")]
        for name in ("post_processor", "truncation", "padding"):
            description[name] = None
        self._tokenizer: Any = gigatoken.Tokenizer.from_json(json.dumps(description))
        self._parallel = parallel

    def encode(self, texts: list[bytes]) -> list[NDArray[np.uint32]] | None:
        """Return the ids of each text; `None` if it failed, and the standard tokeniser must do them."""
        try:
            layout = self._tokenizer.encode_batch(texts, parallel=self._parallel).layout
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            log.warning("gigatoken failed on %d documents (%s): tokenizers does them", len(texts), error)
            return None
        ids, bounds = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        return np.split(ids, bounds[1:-1])


def is_faithful(folder: Path, core: Any, documents: Iterable[str]) -> bool:
    """Return whether gigatoken is installed and gives the ids of `core` on `documents`; log which is used.

    Args:
        folder: With the tokenizer's files.
        core: The same tokenizer as `tokenizers.Tokenizer`, set up for plain text.
        documents: A sample of the corpus; it is read only where gigatoken can be used at all.
    """
    try:
        fast = FastTokeniser(folder, parallel=False)
    except ImportError:
        return False
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        log.info("gigatoken cannot read this tokenizer (%s): tokenizers is used", one_line(error))
        return False
    sample = [text[:SAMPLE_CHARACTERS] for text in islice(documents, SAMPLE_DOCUMENTS)]
    special = [token.content for token in list(core.get_added_tokens_decoder().values())[:100]]
    texts = [*sample, *NASTY, *(f"a{token}b {token}\n{token}{token}" for token in special)]
    expected = [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]
    found = fast.encode([text.encode() for text in texts])
    if found is None or [ids.tolist() for ids in found] != expected:
        log.info("gigatoken gives other ids than tokenizers for this tokenizer: tokenizers is used")
        return False
    log.info("gigatoken is used: the same ids as tokenizers on %d documents of this data", len(sample))
    return True


Records = list[tuple[str, Record]]  # where it stands, and what is there
LONG = 1_000_000  # characters: longer texts are cut, and no more of their pieces encoded together


@dataclass(frozen=True)
class Document:
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
        self._fast = FastTokeniser(settings.tokenizer, settings.threads > 1) if settings.fast else None

    def __call__(self, records: Records, tally: Tally) -> list[Document]:
        texts = [record for _, record in records if isinstance(record, str)]
        assert len(texts) == len(records), "read_texts gives texts"
        keys = [text.encode() for text in texts]
        rows = self._fast.encode(keys) if self._fast is not None else None
        if rows is None:
            rows = self._standard(texts)
        return [
            Document(np.concatenate([row.astype(self._dtype, copy=False), self._end]), None, key)
            for row, key in zip(rows, keys, strict=True)
        ]

    def _standard(self, texts: list[str]) -> list[NDArray[Any]]:
        short = iter(self._encode([text for text in texts if len(text) <= LONG]))
        return [next(short) if len(text) <= LONG else self._encode_long(text) for text in texts]

    def _encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encodings = self._core.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def _encode_long(self, text: str) -> NDArray[Any]:
        pieces = cut_text(self._core, text)
        found = []
        while some := list(islice(pieces, LONG // PIECE)):
            found += self._encode(some)
        return np.concatenate(found)
