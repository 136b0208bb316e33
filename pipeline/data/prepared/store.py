"""Tokens of prepared parts, mapped from disk; counts come from the indexes, without touching a token.

Nothing is kept open here: a map takes a file descriptor, and a terabyte of text is 30,000 parts.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.prepared.parts import read_index
from pipeline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TokenPart:
    """One split of one prepared part. Arrays are mapped anew each time they are asked for, and read-only.

    Args:
        folder: Of the part.
        split: "train" or "eval".

    Raises:
        DataError: the folder holds no prepared part.
    """

    def __init__(self, folder: Path, split: str) -> None:
        index = read_index(folder)
        if index is None:
            raise DataError(f"prepared data {folder} cannot be read; start again")
        self.folder = folder
        self.split = split
        self.num_documents: int = index["documents"][split]
        self.num_tokens: int = index["tokens"][split]
        self._dtype = np.dtype(index["dtype"])
        self.has_loss_mask: bool = index["has_learned"]  # as the files call it

    @property
    def tokens(self) -> NDArray[Any]:
        """(n,) uint16 or uint32, each document with its end-of-document token."""
        return self._map("tokens", self._dtype, self.num_tokens)

    @property
    def ends(self) -> NDArray[np.int64]:
        """(documents,) offset behind the last token of each document."""
        return self._map("ends", np.dtype("<i8"), self.num_documents)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """(documents,) equal for equal documents."""
        return self._map("hashes", np.dtype("<u8"), self.num_documents)

    @property
    def loss_mask(self) -> NDArray[np.uint8] | None:
        """(n,) 1 where a token counts in the loss; None: all count."""
        return self._map("learned", np.dtype("u1"), self.num_tokens) if self.has_loss_mask else None

    def _map(self, name: str, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        path = self.folder / f"{self.split}.{name}"
        try:
            # memmap's own class is slow to slice
            return np.memmap(path, dtype=dtype, mode="r", shape=(length,)).view(np.ndarray)
        except (OSError, ValueError) as error:
            is_full = isinstance(error, OSError) and error.errno == errno.EMFILE
            todo = "raise the limit of open files (ulimit -n)" if is_full else "start again"
            raise DataError(f"prepared data {path} cannot be read ({error}); {todo}") from None


class TokenStore:
    """All documents of one split of a source, in order. Goes to other processes by pickle.

    Args:
        folders: Of the prepared parts, in order.
        split: "train" or "eval".

    Attributes:
        parts: Those that hold documents.

    Raises:
        DataError: a folder holds no prepared part.
    """

    def __init__(self, folders: Sequence[Path], split: str) -> None:
        parts = [TokenPart(folder, split) for folder in folders]
        self.parts = [part for part in parts if part.num_documents]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for part in self.parts)

    @property
    def has_loss_mask(self) -> bool:
        """Whether some tokens may count in no loss."""
        return any(part.has_loss_mask for part in self.parts)


@dataclass(frozen=True)
class PreparedSource:
    """A source, or an eval set: its documents, tokenised, and what was left out on the way.

    Attributes:
        name: Of the source.
        train: Documents to train on; none for an eval set.
        eval: Documents held out.
        tally: Counts of what is worth telling, such as `bad records` that were skipped.
    """

    name: str
    train: TokenStore
    eval: TokenStore
    tally: dict[str, int]


@dataclass(frozen=True)
class Prepared:
    """All documents of a recipe as tokens.

    Attributes:
        tokenizer: Trained on the data, or the pretrained one.
        vocab_size: Ids are below this.
        sources: In the recipe's order.
        eval_sets: All their documents are in `eval`.
        fingerprint: Of the tokens and their order, not of where or when they were prepared.
    """

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    sources: list[PreparedSource]
    eval_sets: list[PreparedSource]
    fingerprint: str
