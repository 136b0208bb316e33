"""Records -> documents of token ids, batch by batch: the interface, and plain text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import DocumentsConfig
from pipeline.data.documents.records import Record, Tally
from pipeline.data.tokenizer import PIECE, cut_text, find_places
from pipeline.errors import one_line

log = logging.getLogger(__name__)

SAMPLE_DOCUMENTS = 300
# Of one document, and of every tenth: the standard tokeniser needs a second for the whole sample.
SAMPLE_CHARACTERS, LONG_CHARACTERS = 2_000, 30_000
# What tokenisers most often disagree about; the special tokens of the tokenizer at hand come on top.
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
    "https://example.org/?q=a%20b&c=[1,2]#x",
    "=" * 200 + "-" * 77 + " " * 130 + "x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
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

    def encode(self, texts: list[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
        """Ids (n,) of all texts one behind the other and offsets (texts + 1,) between them.

        None: it failed at these texts; the standard tokeniser must do them.
        """
        try:
            layout = self._tokenizer.encode_batch(texts, parallel=self._parallel).layout
            return np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            log.warning("gigatoken failed on %d documents (%s): tokenizers does them", len(texts), error)
            return None


def is_faithful(folder: Path, core: Any, documents: Iterable[str]) -> bool:
    """Whether gigatoken is installed and gives the ids of `core` on `documents`; says so in one line.

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
    sample = [
        text[: SAMPLE_CHARACTERS if number % 10 else LONG_CHARACTERS]
        for number, text in enumerate(islice(documents, SAMPLE_DOCUMENTS))
    ]
    texts = [*sample, *NASTY, *_special_texts(core)]
    expected = [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]
    found = fast.encode([text.encode() for text in texts])
    if found is None or not _equal(expected, *found):
        log.info("gigatoken gives other ids than tokenizers for this tokenizer: tokenizers is used")
        return False
    log.info("gigatoken is used: the same ids as tokenizers on %d documents of this data", len(sample))
    return True


def _special_texts(core: Any) -> Iterator[str]:
    for token in list(core.get_added_tokens_decoder().values())[:100]:
        yield token.content
        yield f"a{token.content}b {token.content}\n{token.content}{token.content}"


def _equal(expected: Sequence[list[int]], ids: NDArray[np.uint32], offsets: NDArray[np.int64]) -> bool:
    lengths = np.array([len(row) for row in expected], dtype=np.int64)
    if not np.array_equal(lengths, np.diff(offsets)):
        return False
    return np.array_equal(np.array([id for row in expected for id in row], dtype=np.int64), ids)


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
