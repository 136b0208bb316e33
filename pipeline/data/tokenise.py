"""Writes a cache entry of tokenised text: `train.npy`, `eval.npy` and the files of the tokenizer.

Text is read file by file and tokens are written batch by batch, so memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.data_schema import TextDataConfig
from pipeline.data.sources import Source, digest_sources, read_documents
from pipeline.data.tokenizer import token_ids_end, train_tokenizer
from pipeline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 1  # part of the cache key: raise it when the files would come out differently
BATCH_CHARACTERS = 1_000_000  # text encoded at once; enough to keep every thread busy
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextPreparation:
    """All it takes to write one cache entry.

    Attributes:
        config: Of the data; `text_field`, `eval_fraction` and the size of a new tokenizer are read.
        sources: The files, in order.
        digest: Hash of their content, as it stands in the cache key.
        size: Bytes of all files.
        tokenizer: None: train one on the training split.
        settings: What the key was made of; kept in the index for people to read.
    """

    config: TextDataConfig
    sources: list[Source]
    digest: str
    size: int
    tokenizer: PreTrainedTokenizerFast | None
    settings: dict[str, Any]

    def write(self, folder: Path) -> dict[str, Any]:
        """Fills `folder`; returns its index.

        Raises:
            DataError: a file is malformed, all are empty, or one changed meanwhile.
        """
        if not any(True for _ in self._documents()):
            raise DataError(
                f"data.paths: no text in {len(self.sources)} files, all empty (first: {self.sources[0].path})"
            )
        tokenizer = self._train_tokenizer() if self.tokenizer is None else self.tokenizer
        tokenizer.save_pretrained(str(folder))
        index = self._tokenise(tokenizer, folder)
        if digest_sources(self.sources)[0] != self.digest:
            raise DataError("data.paths: a file changed while it was being tokenised; start again")
        return index

    def _documents(self) -> Iterator[str]:
        return read_documents(self.sources, self.config.text_field)

    def _train_tokenizer(self) -> PreTrainedTokenizerFast:
        log.info("training the tokenizer on %.1f MB", self.size / 1e6)
        start = time.perf_counter()
        fraction = self.config.eval_fraction
        documents = (text for text in self._documents() if not is_held_out(text, fraction))
        tokenizer = train_tokenizer(documents, self.config.tokenizer.vocab_size)
        log.info("trained a tokenizer of %d entries in %.1f s", len(tokenizer), time.perf_counter() - start)
        return tokenizer

    def _tokenise(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, Any]:
        from tokenizers import Tokenizer

        log.info("tokenising %.1f MB", self.size / 1e6)
        start = time.perf_counter()
        core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, to set up for plain text
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = True  # "<|endoftext|>" written in a document is text
        vocab_size, end = token_ids_end(tokenizer), tokenizer.eos_token_id
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        documents = {"train": 0, "eval": 0}
        with (
            TokenFile(folder / "train.npy", dtype) as train,
            TokenFile(folder / "eval.npy", dtype) as held_out,
            progress_bar("tokenising", self.size) as advance,
        ):
            for batch in batches(self._documents(), BATCH_CHARACTERS):
                encodings = core.encode_batch_fast(batch, add_special_tokens=False)
                for text, encoding in zip(batch, encodings, strict=True):
                    is_eval = is_held_out(text, self.config.eval_fraction)
                    documents["eval" if is_eval else "train"] += 1
                    (held_out if is_eval else train).append([*encoding.ids, end])
                advance(sum(map(len, batch)))
        tokens = {"train": train.num_tokens, "eval": held_out.num_tokens}
        log.info("tokenising: %d tokens in %.1f s", sum(tokens.values()), time.perf_counter() - start)
        return {
            "documents": documents,
            "tokens": tokens,
            "vocab_size": vocab_size,
            "end_of_document": end,
            "source_files": len(self.sources),
            "source_bytes": self.size,
            "settings": self.settings,
        }


def is_held_out(text: str, eval_fraction: float) -> bool:
    """Whether a document belongs to eval: by its text alone, so it stays there whatever is added."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < eval_fraction * 2**64


def batches(documents: Iterator[str], characters: int) -> Iterator[list[str]]:
    """Documents in lists of about `characters` together (more only where one document is longer)."""
    batch: list[str] = []
    length = 0
    for text in documents:
        batch.append(text)
        length += len(text)
        if length >= characters:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


class TokenFile:
    """A 1-D `.npy` file that grows; numpy leaves room in the header for the final length."""

    def __init__(self, path: Path, dtype: type[np.unsignedinteger[Any]]) -> None:
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._file = path.open("wb")

    def __enter__(self) -> TokenFile:
        self._write_header()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def append(self, ids: list[int]) -> None:
        self._file.write(np.array(ids, dtype=self.dtype).tobytes())
        self.num_tokens += len(ids)

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.num_tokens,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], object]]:
    """A function that advances a bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda amount: progress.advance(task, amount)
