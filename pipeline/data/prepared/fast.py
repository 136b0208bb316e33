"""gigatoken: a faster tokeniser, used for a tokenizer only where it gave the same ids on this very corpus."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
