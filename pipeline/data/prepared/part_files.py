"""Files of a prepared part: little-endian arrays and an index, written batch by batch and memory-mapped.

A part is a folder, named by the hash of everything that decides its bytes: some tens of MB of input, the
tokenizer and the settings. A changed file changes only its part, and unchanged data is found without reading
a token. Parts that several machines prepared need no merging, and a killed process leaves the finished parts.
Arrow or a single file would have to be rewritten.

Parts keep no file open: a map takes a file descriptor, and a terabyte of text is 30,000 parts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from pipeline.data.prepared.encoder import TokenizedDocument
from pipeline.errors import DataError
from pipeline.files import format_bytes, publish_folder, replace_file

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORMAT_VERSION = 2  # part of every key: increase it when a change alters the files
INDEX = "part.json"
CHECKED = "checked.json"  # times of last change at which the files' checksums were right
SPLITS = ("train", "eval")
MAX_SEGMENTS = 2  # segments per document
NOTICE_SECONDS = 20.0  # between two log lines of a process that waits for another one
log = logging.getLogger(__name__)


@contextmanager
def explain_write_errors(cache_dir: Path, what: str) -> Iterator[None]:
    """Turn an OSError of the body into an error that names the folder, the free space and what to do.

    Raises:
        DataError: The disk is full, or `cache_dir` cannot be written.
    """
    try:
        yield
    except OSError as error:
        try:
            free = f"{format_bytes(shutil.disk_usage(cache_dir).free)} free there"
        except OSError:
            free = "the folder does not exist"
        todo = "make room, or set" if error.errno in NO_ROOM else "set"
        raise DataError(
            f"data.cache_dir {cache_dir}: {what} cannot be written: {error.strerror or error} ({free}); "
            f"{todo} data.cache_dir to another folder; what is finished is kept: run the same command "
            "again to continue"
        ) from error


@contextmanager
def hold_lock(cache_dir: Path, name: str, notice: Callable[[], str] | None) -> Iterator[bool]:
    """Hold a lock of the cache. The system releases it if the process ends in any way.

    Args:
        cache_dir: Folder of the cache.
        name: Name of the lock.
        notice: Function that returns the line to log while another process holds the lock; `None` to not
            wait.

    Yields:
        Whether the lock is held.
    """
    folder = cache_dir / "locks"
    with explain_write_errors(cache_dir, "a lock file"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        seconds = 0.0
        while not lock.is_locked:
            try:
                lock.acquire(timeout=seconds)
            except Timeout:
                if notice is None:
                    break
                log.info("%s", notice())
                seconds = NOTICE_SECONDS
    try:
        yield lock.is_locked
    finally:
        lock.release()


_unfinished: set[Path] = set()


def discard_unfinished() -> None:
    """Remove the folders that `fill_folder` has not published; called when the process is about to end."""
    for folder in _unfinished:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fill_folder(folder: Path, cache_dir: Path, what: str) -> Iterator[Path]:
    """Yield an empty folder, which is renamed to `folder` after all of its files are on the disk.

    The caller must hold a lock for this folder. If the body raises an exception, the files are removed.

    Args:
        folder: Path of the finished folder.
        cache_dir: Folder of the cache, for messages.
        what: Name of the content in messages.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    _unfinished.add(temporary)
    try:
        with explain_write_errors(cache_dir, what):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            temporary.mkdir(parents=True)
        yield temporary
        with explain_write_errors(cache_dir, what):
            write_json(temporary / CHECKED, {path.name: _read_mtime(path) for path in temporary.iterdir()})
            if folder.exists():  # a damaged one, which the caller replaces
                shutil.rmtree(folder)
            publish_folder(temporary, folder, temporary.iterdir())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        _unfinished.discard(temporary)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON value to a file."""
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _read_mtime(path: Path) -> int:
    return path.stat().st_mtime_ns


def find_damage(folder: Path, index: str, verify: bool) -> str | None:
    """Return a description of damage to the files that a folder's index lists; `None` if there is none.

    The checksum of a file is compared if the file was changed or copied since the last comparison.

    Args:
        folder: Folder with the files.
        index: Name of the index, whose `files` has `bytes` and `xxh3_128` of each file.
        verify: Whether to compare the checksums of all files.
    """
    files = (read_json_object(folder / index) or {}).get("files")
    if not files:
        return f"{index} cannot be read"
    known = read_json_object(folder / CHECKED) or {}
    times = {}
    for name, expected in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, {expected['bytes']} were written"
            times[name] = _read_mtime(folder / name)
            is_read = verify or known.get(name) != times[name]
            if is_read and compute_checksum(folder / name) != expected["xxh3_128"]:
                return f"the content of {name} is not what was written, by its checksum"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    if not times.items() <= known.items():
        with suppress(OSError):  # if this cannot be written, the next start compares the checksums again
            replace_file(folder / CHECKED, json.dumps(times))
    return None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; `None` if the file cannot be read or holds no object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def compute_checksum(path: Path) -> str:
    """Return the xxh3_128 checksum of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def find_part_damage(folder: Path, verify: bool) -> str | None:
    """Return a description of damage to an existing prepared part; `None` if there is none."""
    return find_damage(folder, INDEX, verify)


def is_prepared(folder: Path) -> bool:
    """Return whether a part exists and is undamaged."""
    return folder.is_dir() and find_part_damage(folder, verify=False) is None


def hash_keys(keys: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return 64-bit hashes (documents,) of keys, which decide what is held out and identify duplicates."""
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype=">u8").astype("<u8")


def select_held_out(hashes: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.bool_]:
    """Return (documents,) whether each document is held out.

    Only the document's own hash decides, so that its split does not change when other documents are added.
    """
    bound = math.ceil(eval_fraction * 2**64)
    if bound >= 2**64:
        return np.ones(len(hashes), dtype=bool)
    held_out: NDArray[np.bool_] = hashes < np.uint64(bound)
    return held_out


class _ChecksummedFile:
    """A file that is appended to, with its size and checksum."""

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
        """Close the file; return its size and checksum, as `find_damage` compares them."""
        self._file.close()
        return {"bytes": self.bytes, "xxh3_128": self._checksum.hexdigest()}


class PartWriter:
    """Writes the files of a part: call `append` for each batch, then `finish`.

    The files of each split are `tokens` (ids), `ends` (int64, the offset after each document), `hashes`
    (uint64) and `learned` (uint8, the loss mask). Judged answers have `segments` (int32) and `margins`
    (float32, NaN if not known) as well; see TokenizedDocument.

    Args:
        folder: Folder to write to.
        dtype: Type of the ids.
        has_loss_mask: Whether to write the files `learned`.
        has_segments: Whether to write the files `segments` and `margins`.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], has_loss_mask: bool, has_segments: bool = False
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._has_loss_mask = has_loss_mask
        self._has_segments = has_segments
        self._documents = dict.fromkeys(SPLITS, 0)
        self._tokens = dict.fromkeys(SPLITS, 0)
        arrays = ["tokens", "ends", "hashes"] + ["learned"] * has_loss_mask
        arrays += ["segments", "margins"] * has_segments
        names = [f"{split}.{array}" for split in SPLITS for array in arrays]
        self._files = {name: _ChecksummedFile(folder / name) for name in names}

    def append(self, documents: Sequence[TokenizedDocument], eval_fraction: float) -> None:
        """Add documents, each to the split that its hash decides."""
        hashes = hash_keys(document.key for document in documents)
        held_out = select_held_out(hashes, eval_fraction)
        for split, chosen in (("train", ~held_out), ("eval", held_out)):
            if chosen.any():
                self._append(split, list(compress(documents, chosen.tolist())), hashes[chosen])

    def _append(self, split: str, documents: list[TokenizedDocument], hashes: NDArray[np.uint64]) -> None:
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

    def _append_segments(self, split: str, documents: list[TokenizedDocument]) -> None:
        table = np.zeros((len(documents), MAX_SEGMENTS, 3), dtype="<i4")
        for row, document in zip(table, documents, strict=True):
            assert document.segments is not None
            row[: len(document.segments)] = document.segments
        margins = [np.nan if document.margin is None else document.margin for document in documents]
        self._files[f"{split}.segments"].append(table.reshape(-1))
        self._files[f"{split}.margins"].append(np.array(margins, dtype="<f4"))

    def finish(self, facts: dict[str, Any]) -> None:
        """Close the files, and write an index with counts, checksums and `facts`."""
        index = {
            **facts,
            "dtype": self._dtype.str,
            "documents": self._documents,
            "tokens": self._tokens,
            "has_learned": self._has_loss_mask,
            "files": {name: file.close() for name, file in self._files.items()},
        }
        write_json(self._folder / INDEX, index)


class TokenPart:
    """One split of one prepared part. Each access to an array maps its file again, read-only.

    Args:
        folder: Folder of the part.
        split: "train" or "eval".

    Raises:
        DataError: The folder contains no prepared part.
    """

    def __init__(self, folder: Path, split: str) -> None:
        index = read_json_object(folder / INDEX)
        if index is None:
            raise DataError(f"prepared data {folder} cannot be read; start again")
        self.folder = folder
        self.split = split
        self.num_documents: int = index["documents"][split]
        self.num_tokens: int = index["tokens"][split]
        self._dtype = np.dtype(index["dtype"])
        self.has_loss_mask: bool = index["has_learned"]  # the name in files of format version 2

    @property
    def tokens(self) -> NDArray[Any]:
        """Token ids (n,), uint16 or uint32; each document has its end-of-document token."""
        return self._map("tokens", self._dtype, self.num_tokens)

    @property
    def ends(self) -> NDArray[np.int64]:
        """Offsets (documents,) after the last token of each document."""
        return self._map("ends", np.dtype("<i8"), self.num_documents)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Hashes (documents,) of the documents' keys; equal for equal documents."""
        return self._map("hashes", np.dtype("<u8"), self.num_documents)

    @property
    def loss_mask(self) -> NDArray[np.uint8] | None:
        """Loss mask (n,), 1 if a token is in the loss; `None` if all are."""
        return self._map("learned", np.dtype("u1"), self.num_tokens) if self.has_loss_mask else None

    @property
    def segments(self) -> NDArray[np.int32]:
        """Table (documents, MAX_SEGMENTS, 3): kind (0 if none), tokens of the prompt, all tokens."""
        shape = (self.num_documents, MAX_SEGMENTS, 3)
        return self._map("segments", np.dtype("<i4"), math.prod(shape)).reshape(shape)

    @property
    def margins(self) -> NDArray[np.float32]:
        """Margins (documents,) between two answers; NaN if not known."""
        return self._map("margins", np.dtype("<f4"), self.num_documents)

    def _map(self, name: str, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        path = self.folder / f"{self.split}.{name}"
        try:
            # Convert to a plain array, because slicing numpy's memmap class is slow.
            return np.memmap(path, dtype=dtype, mode="r", shape=(length,)).view(np.ndarray)
        except (OSError, ValueError) as error:
            is_full = isinstance(error, OSError) and error.errno == errno.EMFILE
            todo = "raise the limit of open files (ulimit -n)" if is_full else "start again"
            raise DataError(f"prepared data {path} cannot be read ({error}); {todo}") from None


class TokenStore:
    """All documents of one split of a source, in order; picklable.

    Args:
        folders: Folders of the prepared parts, in order.
        split: "train" or "eval".

    Attributes:
        parts: Parts that have documents in this split.

    Raises:
        DataError: A folder contains no prepared part.
    """

    def __init__(self, folders: Sequence[Path], split: str) -> None:
        parts = [TokenPart(folder, split) for folder in folders]
        self.parts = [part for part in parts if part.num_documents]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Number of documents in all parts."""
        return sum(part.num_documents for part in self.parts)

    @property
    def has_loss_mask(self) -> bool:
        """Return whether some tokens may be excluded from the loss."""
        return any(part.has_loss_mask for part in self.parts)
