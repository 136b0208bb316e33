"""The files of a prepared part: little-endian arrays and an index, written batch by batch, mapped from disk.

No file stays open here: a map takes a file descriptor, and a terabyte of text is 30,000 parts.
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
FORMAT_VERSION = 2  # part of every key: raise it when the files would come out differently
INDEX = "part.json"
CHECKED = "checked.json"  # times of last change at which the content is known to be right
SPLITS = ("train", "eval")
MOST_SEGMENTS = 2  # of a document
NOTICE_SECONDS = 20.0  # between two lines of a process that waits for another one
log = logging.getLogger(__name__)


@contextmanager
def explain_write_errors(cache_dir: Path, what: str) -> Iterator[None]:
    """Turn a failure to write into one line that says where, how much is free, and what to do.

    Raises:
        DataError: the disk is full, or `cache_dir` cannot be written.
    """
    try:
        yield
    except OSError as error:
        try:
            free = f"{format_bytes(shutil.disk_usage(cache_dir).free)} free there"
        except OSError:
            free = "the folder is not there"
        todo = "make room, or set" if error.errno in NO_ROOM else "set"
        raise DataError(
            f"data.cache_dir {cache_dir}: {what} cannot be written: {error.strerror or error} ({free}); "
            f"{todo} data.cache_dir to another folder; what is finished is kept, and the same command goes on"
        ) from error


@contextmanager
def hold_lock(cache_dir: Path, name: str, notice: Callable[[], str] | None) -> Iterator[bool]:
    """Hold the lock `name` of the cache; no other process then has it, however that one ended.

    Args:
        notice: Returns the line to log now and then while another process holds it. None: do not wait.

    Yields:
        Whether it is held.
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
    """Remove what `filling` has not published yet: this process is about to end."""
    for folder in _unfinished:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fill_folder(folder: Path, cache_dir: Path, what: str) -> Iterator[Path]:
    """Yield an empty folder, which gets the name `folder` in one rename once all of it is on the disk.

    Only with a lock held that is this folder's own. If the body raises, nothing is left behind.

    Args:
        what: Name of the folder in the error of `writing_to`.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    _unfinished.add(temporary)
    try:
        with explain_write_errors(cache_dir, what):
            shutil.rmtree(temporary, ignore_errors=True)  # of a killed writer
            temporary.mkdir(parents=True)
        yield temporary
        with explain_write_errors(cache_dir, what):
            write_json(temporary / CHECKED, {path.name: _changed(path) for path in temporary.iterdir()})
            if folder.exists():  # damaged
                shutil.rmtree(folder)
            publish_folder(temporary, folder, temporary.iterdir())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        _unfinished.discard(temporary)


def write_json(path: Path, content: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


def find_damage(folder: Path, index: str, verify: bool) -> str | None:
    """Return what is wrong with the files that the index of a folder lists; `None`: nothing.

    The content of a file is read if it was changed or copied since it was last known to be right.

    Args:
        index: Name of the index, whose `files` has `bytes` and `xxh3_128` of each file.
        verify: Whether to read the content of all.
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
            times[name] = _changed(folder / name)
            is_read = verify or known.get(name) != times[name]
            if is_read and compute_checksum(folder / name) != expected["xxh3_128"]:
                return f"the content of {name} is not what was written, by its checksum"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    if not times.items() <= known.items():
        with suppress(OSError):  # where nothing can be written, the next start reads the content again
            replace_file(folder / CHECKED, json.dumps(times))
    return None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the object of a JSON file; `None` where there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def compute_checksum(path: Path) -> str:
    """Return the checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def find_part_damage(folder: Path, verify: bool) -> str | None:
    """Return what is wrong with a prepared part that is there; `None`: nothing."""
    return find_damage(folder, INDEX, verify)


def is_prepared(folder: Path) -> bool:
    """Return whether a part is there, and whole."""
    return folder.is_dir() and find_part_damage(folder, verify=False) is None


def hash_keys(keys: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return 64 bits of each key (documents,): they tell what is held out, and duplicates."""
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype=">u8").astype("<u8")


def select_held_out(hashes: NDArray[np.uint64], eval_fraction: float) -> NDArray[np.bool_]:
    """Return (documents,) whether each belongs to eval: by its own hash, so it stays whatever is added."""
    bound = math.ceil(eval_fraction * 2**64)
    if bound >= 2**64:
        return np.ones(len(hashes), dtype=bool)
    held_out: NDArray[np.bool_] = hashes < np.uint64(bound)
    return held_out


class _ChecksummedFile:
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
        """Close the file; return its size and checksum, as `find_damage` compares them."""
        self._file.close()
        return {"bytes": self.bytes, "xxh3_128": self._checksum.hexdigest()}


class PartWriter:
    """Writes the files of a part: `append` batches, then `finish`.

    `tokens` are ids, `ends` int64 the offset behind each document, `hashes` uint64, `learned` uint8
    the loss mask. Of judged answers `segments` int32, and `margins` float32 (NaN: not known), see Document.

    Args:
        folder: To be filled.
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
        self._documents = dict.fromkeys(SPLITS, 0)
        self._tokens = dict.fromkeys(SPLITS, 0)
        arrays = ["tokens", "ends", "hashes"] + ["learned"] * has_loss_mask
        arrays += ["segments", "margins"] * has_segments
        names = [f"{split}.{array}" for split in SPLITS for array in arrays]
        self._files = {name: _ChecksummedFile(folder / name) for name in names}

    def append(self, documents: Sequence[TokenizedDocument], eval_fraction: float) -> None:
        """Add documents, each to the split that its hash says."""
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
        table = np.zeros((len(documents), MOST_SEGMENTS, 3), dtype="<i4")
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
    """One split of one prepared part. Arrays are mapped anew each time they are asked for, and read-only.

    Args:
        folder: Of the part.
        split: "train" or "eval".

    Raises:
        DataError: the folder holds no prepared part.
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
