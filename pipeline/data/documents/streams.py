"""Opens files as streams of bytes, decompressed on the way, and remembers what was found in them."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipeline.errors import DataError
from pipeline.files import format_bytes

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER_SIZE = 1 << 20
LARGEST_RATIO = 200  # text rarely shrinks to a tenth
HARMLESS_SIZE = 1 << 30  # bytes that a file may decompress to whatever its ratio


@dataclass(frozen=True)
class FileSpan:
    """A stretch of a file.

    Attributes:
        path: The file.
        kind: How it is read: a key of READERS.
        compression: A value of COMPRESSIONS, or "".
        start: Where it begins: bytes of lines, row groups of a parquet file. 0 with any other kind.
        end: Where it ends; None: with the file.
        first: Number of its first line or row in the file, from 1.
    """

    path: str
    kind: str
    compression: str = ""
    start: int = 0
    end: int | None = None
    first: int = 1


@contextmanager
def open_stream(path: str, compression: str) -> Iterator[BinaryIO]:
    """Open the decompressed content, to be read once from its beginning; a plain file can be sought.

    Raises:
        DataError: the file cannot be read, or its compression is damaged or cut short.
    """
    try:
        with open(path, "rb", buffering=BUFFER_SIZE) as file:
            if not compression:
                yield file
                return
            import pyarrow as pa

            stream: Any = pa.CompressedInputStream(pa.PythonFile(file), compression)
            yield io.BufferedReader(_Bounded(path, stream), BUFFER_SIZE)
    except OSError as error:
        if compression and error.errno is None:  # pyarrow's own
            raise DataError(
                f"{path}: the {compression} compression is damaged or cut short ({error}); fetch it again"
            ) from None
        raise unreadable_error(path, error) from None


class _Bounded(io.RawIOBase):
    """Decompressed content, unless a small file holds endless amounts: one line of it may fill the memory."""

    def __init__(self, path: str, stream: Any) -> None:
        self._path = path
        self._stream = stream
        self._left = max(HARMLESS_SIZE, LARGEST_RATIO * os.path.getsize(path))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._stream.readinto(buffer)
        self._left -= size
        if self._left < 0:
            raise DataError(
                f"{self._path}: decompresses to more than {LARGEST_RATIO} times its size, unlike text; "
                "decompress it yourself if it is to be trusted"
            )
        return size


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> DataError:
    """Return the error for a file the system does not give."""
    return DataError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}")


def decode_utf8(content: bytes, where: str, offset: int) -> str:
    """Return bytes as text.

    Args:
        content: Bytes at `offset` of the (decompressed) file.
        where: Beginning of the message: the file, or file and line.
        offset: In bytes.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at byte offset {offset + error.start}; "
            "convert the file (iconv -t UTF-8) or leave it out"
        ) from None


FILE_NAME = "digests.sqlite"
WAIT_SECONDS = 60.0  # for other processes that write
SETTLED_NANOSECONDS = 2_000_000_000  # a file may change twice within one tick of its file system's clock
TABLE = (
    "CREATE TABLE IF NOT EXISTS found (path TEXT, what TEXT, size INTEGER, mtime_ns INTEGER, inode INTEGER,"
    " value TEXT, PRIMARY KEY (path, what)) WITHOUT ROWID"
)
KNOWN = "SELECT value FROM found WHERE path=? AND what=? AND size=? AND mtime_ns=? AND inode=?"
log = logging.getLogger(__name__)


class FileStamp(NamedTuple):
    """Tells whether a file is still what it was: size in bytes, time of its last change, inode."""

    size: int
    mtime_ns: int
    inode: int


def read_file_stamp(path: str | Path) -> FileStamp:
    """Return the stamp of a file as it is now.

    Raises:
        DataError: it is gone, or cannot be read.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable_error(path, error) from None
    return FileStamp(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def hash_json(content: Any) -> str:
    """Return 32 hexadecimal digits that stand for a JSON value; the order of keys does not count."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


class DigestCache:
    """Values found in files, by path and stamp, in `cache_dir`; any number of processes may use it.

    Args:
        folder: The `cache_dir` of the recipe; made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def get_or_compute(
        self, paths: Sequence[str], what: str, look: Callable[[str], Any]
    ) -> dict[str, tuple[FileStamp, Any]]:
        """Return the value that `look` finds in each file; only new and changed files are read, in threads.

        Args:
            paths: Files.
            what: Name of what `look` finds; another look has another name.
            look: From path to something JSON can hold.

        Raises:
            DataError: a file is gone, cannot be read, or changes meanwhile; and what `look` raises.
        """
        stamps = {path: read_file_stamp(path) for path in paths}
        keys = {path: (os.path.abspath(path), what, *stamp) for path, stamp in stamps.items()}
        found = {path: json.loads(rows[0][0]) for path, rows in self._run(KNOWN, keys) if rows}
        missing = [path for path in stamps if path not in found]
        size = sum(stamps[path].size for path in missing)
        if size > 1e9:
            message = "reading %d files of %s to know them by their content"
            log.info(message, len(missing), format_bytes(size))
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # hashing leaves Python's lock alone
        news: dict[str, tuple[Any, ...]] = {}
        try:
            for path, value in zip(missing, pool.map(look, missing), strict=True):
                if read_file_stamp(path) != stamps[path]:
                    raise DataError(f"{path}: changed while it was read; start again when it is finished")
                found[path] = value
                if time.time_ns() - stamps[path].mtime_ns > SETTLED_NANOSECONDS:
                    news[path] = (*keys[path], json.dumps(value))
        finally:
            pool.shutdown(cancel_futures=True)
            self._run("INSERT OR REPLACE INTO found VALUES (?, ?, ?, ?, ?, ?)", news)
        return {path: (stamps[path], found[path]) for path in paths}

    def _run(self, command: str, values: dict[str, tuple[Any, ...]]) -> list[tuple[str, list[Any]]]:
        """Return what the database answers to a command for each path; nothing where it cannot be used."""
        if not values:
            return []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as database, database:
                database.execute(TABLE)
                return [(path, database.execute(command, each).fetchall()) for path, each in values.items()]
        except (sqlite3.Error, OSError) as error:
            log.warning("%s cannot be used (%s): files are read again; delete it", self.path, error)
            return []
