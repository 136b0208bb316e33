"""The files of a prepared part: little-endian arrays and an index, written batch by batch, mapped from disk.

Nothing is kept open here: a map takes a file descriptor, and a terabyte of text is 30,000 parts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pipeline.data.prepared.encoder import Document
from pipeline.data.prepared.folders import (
    abandon_folder,
    begin_folder,
    find_damage,
    finish_folder,
    write_json,
)
from pipeline.errors import DataError

FORMAT_VERSION = 1  # part of every key: raise it when the files would come out differently
INDEX = "part.json"
SPLITS = ("train", "eval")
MOST_SEGMENTS = 2  # of a document


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a prepared part: counts, and files with their checksums; None where there is none."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text("utf-8"))
        return index if index["identity"]["format"] == FORMAT_VERSION and index["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage_of(folder: Path, verify: bool) -> str | None:
    """What is wrong with a prepared part that is there; None: nothing."""
    index = read_index(folder)
    return f"{INDEX} cannot be read" if index is None else find_damage(folder, index["files"], verify)


def is_prepared(folder: Path) -> bool:
    return folder.is_dir() and damage_of(folder, verify=False) is None


def hash_keys(keys: Iterable[bytes]) -> NDArray[np.uint64]:
    """(documents,) of 64 bits: blake2b of each key, big-endian. Tells what is held out, and duplicates."""
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype=">u8").astype("<u8")


def is_held_out(hashes: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.bool_]:
    """(documents,) whether each belongs to eval: by its own hash, so it stays there whatever is added."""
    bound = math.ceil(eval_fraction * 2**64)
    if bound >= 2**64:
        return np.ones(len(hashes), dtype=bool)
    held_out: NDArray[np.bool_] = hashes < np.uint64(bound)
    return held_out


class _File:
    """A file that grows and knows its size and checksum."""

    def __init__(self, path: Path) -> None:
        self.bytes = 0
        self._checksum = xxhash.xxh3_128()
        self._file = path.open("wb")

    def append(self, values: NDArray[Any]) -> None:
        content = np.ascontiguousarray(values).view(np.uint8).data
        self._checksum.update(content)
        self._file.write(content)
        self.bytes += len(content)

    def close(self) -> dict[str, Any]:
        """Its size and checksum, as `find_damage` compares them."""
        self._file.close()
        return {"bytes": self.bytes, "xxh3_128": self._checksum.hexdigest()}


class PartWriter:
    """Fills the folder of a part: `append` batches, then `finish`, or `abandon` at any time.

    `tokens` are ids, `ends` int64 the offset behind each document, `hashes` uint64, `learned` uint8
    the loss mask, which has kept the name that it has on disks. Of judged answers `segments` int32, and
    `margins` float32 (NaN: not known), see Document.

    Args:
        folder: Where the part will be; its lock is held.
        dtype: Of the ids.
        has_loss_mask: There is a file `learned` too.
        has_segments: There are files `segments` and `margins` too.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], has_loss_mask: bool, has_segments: bool = False
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._has_loss_mask = has_loss_mask
        self._has_segments = has_segments
        self._temporary = begin_folder(folder)
        self._documents = dict.fromkeys(SPLITS, 0)
        self._tokens = dict.fromkeys(SPLITS, 0)
        arrays = ["tokens", "ends", "hashes"] + ["learned"] * has_loss_mask
        arrays += ["segments", "margins"] * has_segments
        self._files: dict[str, _File] = {}
        for name in (f"{split}.{array}" for split in SPLITS for array in arrays):
            self._files[name] = _File(self._temporary / name)

    def append(self, documents: Sequence[Document], eval_fraction: float) -> None:
        """Adds documents, each to the split that its hash says."""
        hashes = hash_keys(document.key for document in documents)
        held_out = is_held_out(hashes, eval_fraction)
        for split, chosen in (("train", ~held_out), ("eval", held_out)):
            if chosen.any():
                self._append(split, list(compress(documents, chosen.tolist())), hashes[chosen])

    def _append(self, split: str, documents: list[Document], hashes: NDArray[np.uint64]) -> None:
        lengths = np.fromiter((len(document.ids) for document in documents), np.int64, len(documents))
        ends = self._tokens[split] + np.cumsum(lengths)
        tokens = np.concatenate([document.ids for document in documents]).astype(self._dtype, copy=False)
        self._files[f"{split}.tokens"].append(tokens)
        self._files[f"{split}.ends"].append(ends.astype("<i8", copy=False))
        self._files[f"{split}.hashes"].append(hashes)
        if self._has_loss_mask:
            each = [
                np.ones(len(document.ids), np.uint8) if document.loss_mask is None else document.loss_mask
                for document in documents
            ]
            self._files[f"{split}.learned"].append(np.concatenate(each).astype(np.uint8, copy=False))
        if self._has_segments:
            self._append_segments(split, documents)
        self._documents[split] += len(documents)
        self._tokens[split] += len(tokens)

    def _append_segments(self, split: str, documents: list[Document]) -> None:
        table = np.zeros((len(documents), MOST_SEGMENTS, 3), dtype="<i4")
        for row, document in zip(table, documents, strict=True):
            assert document.segments is not None
            row[: len(document.segments)] = document.segments
        margins = [np.nan if document.margin is None else document.margin for document in documents]
        self._files[f"{split}.segments"].append(table.reshape(-1))
        self._files[f"{split}.margins"].append(np.array(margins, dtype="<f4"))

    def finish(self, facts: dict[str, Any]) -> None:
        """Puts the folder in its place, with counts, checksums and `facts` in its index."""
        files = {name: file.close() for name, file in self._files.items()}
        index = {
            **facts,
            "dtype": self._dtype.str,
            "documents": self._documents,
            "tokens": self._tokens,
            "has_learned": self._has_loss_mask,
            "files": files,
        }
        write_json(self._temporary / INDEX, index)
        finish_folder(self._temporary, self._folder, files)

    def abandon(self) -> None:
        """Leaves nothing behind."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk fails again when buffers are flushed
                file.close()
        abandon_folder(self._temporary)


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

    @property
    def segments(self) -> NDArray[np.int32]:
        """(documents, MOST_SEGMENTS, 3): kind, tokens of the prompt, and tokens; kind 0: there is none."""
        shape = (self.num_documents, MOST_SEGMENTS, 3)
        return self._map("segments", np.dtype("<i4"), math.prod(shape)).reshape(shape)

    @property
    def margins(self) -> NDArray[np.float32]:
        """(documents,) NaN: not known."""
        return self._map("margins", np.dtype("<f4"), self.num_documents)

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
