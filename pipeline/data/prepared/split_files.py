"""The files of one prepared part, written batch by batch: raw little-endian arrays with their checksums."""

from __future__ import annotations

import hashlib
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
from pipeline.data.prepared.folders import abandon_folder, begin_folder, finish_folder, write_json

INDEX = "part.json"
SPLITS = ("train", "eval")


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

    def close(self) -> None:
        self._file.close()

    def describe(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "xxh3_128": self._checksum.hexdigest()}


class PartWriter:
    """Fills the folder of a part: `append` batches, then `finish`, or `abandon` at any time.

    `tokens` are ids, `ends` int64 the offset behind each document, `hashes` uint64, `learned` uint8
    the loss mask, which has kept the name that it has on disks.

    Args:
        folder: Where the part will be; its lock is held.
        dtype: Of the ids.
        has_loss_mask: There is a file `learned` too.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], has_loss_mask: bool) -> None:
        self._folder = folder
        self._dtype = dtype
        self._has_loss_mask = has_loss_mask
        self._temporary = begin_folder(folder)
        self._documents = dict.fromkeys(SPLITS, 0)
        self._tokens = dict.fromkeys(SPLITS, 0)
        arrays = ["tokens", "ends", "hashes"] + ["learned"] * has_loss_mask
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
        self._documents[split] += len(documents)
        self._tokens[split] += len(tokens)

    def finish(self, facts: dict[str, Any]) -> None:
        """Puts the folder in its place, with counts, checksums and `facts` in its index."""
        for file in self._files.values():
            file.close()
        files = {name: file.describe() for name, file in self._files.items()}
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
