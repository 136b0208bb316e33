"""Reads and writes the files of prepared parts: little-endian arrays and an index for each part.

A part is a folder, named by the hash of everything that decides its bytes: some tens of MB of input, the
tokenizer and the settings. A changed input file changes only its own parts, and the name alone shows that a
part can be used again. Parts of several machines need no merging. If a process is killed, its finished parts
remain. A single file for all data, such as an Arrow file, would be rewritten after each change.

Arrays are written batch by batch and memory-mapped for reading. No map stays open: it would take a file
descriptor, and a terabyte of text has 30,000 parts.
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

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORMAT_VERSION = 2  # part of every key: increase it when a change alters the files
INDEX_FILE = "part.json"
MTIMES_FILE = "checked.json"  # each file's modification time (ns) at which its checksum was right
SPLITS = ("train", "eval")
MAX_SEGMENTS = 2  # per document
NOTICE_SECONDS = 20.0  # between two log lines of a process that waits for another one
CONTINUE_ADVICE = "finished parts remain; run the same command to continue"
RESTART_ADVICE = "start again: damaged parts are prepared again"
log = logging.getLogger(__name__)


@contextmanager
def explain_write_errors(cache_dir: Path, what: str) -> Iterator[None]:
    """Convert an OSError of the body to a DataError with the folder, the free space and advice.

    Args:
        cache_dir: Folder of the cache.
        what: Name of the content that is written, such as "a lock file".

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
        advice = "set data.cache_dir to another folder"
        if error.errno in DISK_FULL_ERRORS:
            advice = f"make room, or {advice}"
        raise DataError(
            f"data.cache_dir {cache_dir}: {what} cannot be written: {error.strerror or error} ({free}); "
            f"{advice}; {CONTINUE_ADVICE}"
        ) from error


@contextmanager
def hold_lock(cache_dir: Path, name: str, notice: Callable[[], str] | None) -> Iterator[bool]:
    """Hold a lock of the cache during the body. The system releases the lock if the process is killed.

    Args:
        cache_dir: Folder of the cache.
        name: Name of the lock.
        notice: Function that returns the line to log while this process waits for another one's lock; `None`
            to not wait.

    Yields:
        Whether this process has the lock; always true if `notice` is given.

    Raises:
        DataError: The lock file cannot be written.
    """
    folder = cache_dir / "locks"
    with explain_write_errors(cache_dir, "a lock file"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        timeout = 0.0
        while not lock.is_locked:
            try:
                lock.acquire(timeout=timeout)
            except Timeout:
                if notice is None:
                    break
                log.info("%s", notice())
                timeout = NOTICE_SECONDS
    try:
        yield lock.is_locked
    finally:
        lock.release()


_unfinished_folders: set[Path] = set()


def remove_unfinished_folders() -> None:
    """Remove the temporary folders of `fill_folder`; a worker calls this when it is terminated."""
    for folder in _unfinished_folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fill_folder(folder: Path, cache_dir: Path, what: str) -> Iterator[Path]:
    """Yield an empty folder; after the body, flush its files to the disk and rename it to `folder`.

    The caller must hold a lock for this folder. If the body raises an exception, the files are removed.

    Args:
        folder: Path of the finished folder, which replaces an existing one.
        cache_dir: Folder of the cache, for messages.
        what: Name of the content in messages.

    Raises:
        DataError: The disk is full, or `cache_dir` cannot be written.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    _unfinished_folders.add(temporary)
    try:
        with explain_write_errors(cache_dir, what):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            temporary.mkdir(parents=True)
        yield temporary
        with explain_write_errors(cache_dir, what):
            mtimes = {path.name: _read_mtime(path) for path in temporary.iterdir()}
            write_json(temporary / MTIMES_FILE, mtimes)
            if folder.exists():  # a damaged one
                shutil.rmtree(folder)
            publish_folder(temporary, folder, temporary.iterdir())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        _unfinished_folders.discard(temporary)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON value to a file."""
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _read_mtime(path: Path) -> int:
    return path.stat().st_mtime_ns


def find_damage(folder: Path, index: str, verify: bool) -> str | None:
    """Return a description of damage to the files that a folder's index lists; `None` if there is none.

    A checksum is compared only if the file was changed or copied since the last comparison. The modification
    times of compared files are written to MTIMES_FILE.

    Args:
        folder: Folder with the files.
        index: File name of the index, whose `files` has `bytes` and `xxh3_128` of each file.
        verify: Whether to compare the checksums of all files.
    """
    files = (read_json_object(folder / index) or {}).get("files")
    if not files:
        return f"{index} cannot be read"
    compared_mtimes = read_json_object(folder / MTIMES_FILE) or {}
    mtimes = {}
    for name, expected in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, {expected['bytes']} were written"
            mtimes[name] = _read_mtime(folder / name)
            must_compare = verify or compared_mtimes.get(name) != mtimes[name]
            if must_compare and compute_checksum(folder / name) != expected["xxh3_128"]:
                return f"the content of {name} does not match its checksum"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    has_new_mtimes = not mtimes.items() <= compared_mtimes.items()
    if has_new_mtimes:
        with suppress(OSError):  # if this cannot be written, the next start compares the checksums again
            replace_file(folder / MTIMES_FILE, json.dumps(mtimes))
    return None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; `None` if the file cannot be read or contains no object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def compute_checksum(path: Path) -> str:
    """Return the xxh3_128 checksum of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def find_part_damage(folder: Path, verify: bool) -> str | None:
    """Return a description of damage to an existing prepared part; `None` if there is none."""
    return find_damage(folder, INDEX_FILE, verify)


def is_prepared(folder: Path) -> bool:
    """Return whether a part exists and is undamaged."""
    return folder.is_dir() and find_part_damage(folder, verify=False) is None


def hash_keys(keys: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return a 64-bit hash (documents,) of each document's key.

    Hashes decide which documents are held out, and find duplicates.
    """
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype=">u8").astype("<u8")


def select_held_out(hashes: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.bool_]:
    """Return (documents,) whether each document is held out: a share of `eval_fraction`, from 0 to 1.

    Only a document's own hash decides, so adding other documents does not change its split.
    """
    bound = math.ceil(eval_fraction * 2**64)
    if bound >= 2**64:
        return np.ones(len(hashes), dtype=bool)
    held_out: NDArray[np.bool_] = hashes < np.uint64(bound)
    return held_out


class _ChecksummedFile:
    """A new file to append to, with its size and checksum."""

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
    (uint64) and `learned` (uint8, the loss mask). Preference data also has `segments` (int32) and `margins`
    (float32, NaN if not known); see TokenizedDocument.

    Args:
        folder: Folder to write to.
        dtype: Type of the ids.
        has_loss_mask: Whether to write the files `learned`.
        has_segments: Whether to write the files `segments` and `margins`.

    Raises:
        OSError: A file cannot be written; `append` and `finish` raise it, too.
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
        """Write documents, each to the split that its hash decides; see `select_held_out`."""
        hashes = hash_keys(document.key for document in documents)
        held_out = select_held_out(hashes, eval_fraction)
        for split, is_in_split in (("train", ~held_out), ("eval", held_out)):
            if is_in_split.any():
                chosen = list(compress(documents, is_in_split.tolist()))
                self._append_to_split(split, chosen, hashes[is_in_split])

    def _append_to_split(
        self, split: str, documents: list[TokenizedDocument], hashes: NDArray[np.uint64]
    ) -> None:
        lengths = np.fromiter((len(document.ids) for document in documents), np.int64, len(documents))
        ends = self._tokens[split] + np.cumsum(lengths)
        tokens = np.concatenate([document.ids for document in documents]).astype(self._dtype, copy=False)
        self._files[f"{split}.tokens"].append(tokens)
        self._files[f"{split}.ends"].append(ends.astype("<i8", copy=False))
        self._files[f"{split}.hashes"].append(hashes)
        if self._has_loss_mask:
            masks = [
                np.ones(len(document.ids), np.uint8) if document.loss_mask is None else document.loss_mask
                for document in documents
            ]
            self._files[f"{split}.learned"].append(np.concatenate(masks).astype(np.uint8, copy=False))
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

    def finish(self, further_entries: dict[str, Any]) -> None:
        """Close the files, and write an index with counts, checksums and further entries."""
        index = {
            **further_entries,
            "dtype": self._dtype.str,
            "documents": self._documents,
            "tokens": self._tokens,
            "has_learned": self._has_loss_mask,
            "files": {name: file.close() for name, file in self._files.items()},
        }
        write_json(self._folder / INDEX_FILE, index)


class TokenPart:
    """One split of one prepared part. Each access to an array maps its file again, read-only.

    Args:
        folder: Folder of the part.
        split: "train" or "eval".

    Attributes:
        folder: Folder of the part.
        split: "train" or "eval".
        num_documents: Number of documents in the split.
        num_tokens: Number of tokens in the split.
        has_loss_mask: Whether the part has a loss mask; otherwise all tokens are in the loss.

    Raises:
        DataError: The folder contains no prepared part. Each array raises it if its file cannot be read.
    """

    def __init__(self, folder: Path, split: str) -> None:
        index = read_json_object(folder / INDEX_FILE)
        if index is None:
            raise DataError(f"prepared data {folder} cannot be read; {RESTART_ADVICE}")
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
        """Table (documents, MAX_SEGMENTS, 3): kind, tokens of the prompt, and all tokens of each segment.

        The kind is 0 if there is no segment; see TokenizedDocument.
        """
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
            has_too_many_files = isinstance(error, OSError) and error.errno == errno.EMFILE
            advice = "raise the limit of open files (ulimit -n)" if has_too_many_files else RESTART_ADVICE
            raise DataError(f"prepared data {path} cannot be read ({error}); {advice}") from None


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
