"""Opens files as decompressed byte streams, and caches digests of their content."""

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

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # suffix -> name of the compression in pyarrow
BUFFER_SIZE = 1 << 20  # bytes
MAX_COMPRESSION_RATIO = 200  # of decompressed to compressed size; text rarely reaches 10
UNCHECKED_BYTES = 1 << 30  # decompressed bytes up to which the ratio is not checked


@dataclass(frozen=True)
class FileSpan:
    """A range of a file.

    Attributes:
        path: Path of the file.
        kind: Reader of the file, a key of READERS.
        compression: A value of COMPRESSIONS, or "" for a plain file.
        start: Start of the range: a byte offset in JSONL files, a row group in parquet files, else 0.
        end: End of the range (exclusive), in the same unit; `None` for the end of the file.
        first: Number of the range's first line or row, counted from 1 at the start of the file.
    """

    path: str
    kind: str
    compression: str = ""
    start: int = 0
    end: int | None = None
    first: int = 1


@contextmanager
def open_stream(path: str, compression: str) -> Iterator[BinaryIO]:
    """Open the decompressed content of a file; only the stream of a plain file can seek.

    Args:
        path: Path of the file.
        compression: A value of COMPRESSIONS, or "" for a plain file.

    Raises:
        DataError: The file cannot be read, its compressed content is damaged or incomplete, or it
            decompresses to more than MAX_COMPRESSION_RATIO times its size. Reads of the stream raise it, too.
    """
    try:
        with open(path, "rb", buffering=BUFFER_SIZE) as file:
            if not compression:
                yield file
                return
            import pyarrow as pa

            stream: Any = pa.CompressedInputStream(pa.PythonFile(file), compression)
            yield io.BufferedReader(_BoundedStream(path, stream), BUFFER_SIZE)
    except OSError as error:
        if compression and error.errno is None:  # raised by pyarrow, not by the system
            raise DataError(
                f"{path}: the {compression} compression is damaged or cut short ({error}); fetch it again"
            ) from None
        raise unreadable_error(path, error) from None


class _BoundedStream(io.RawIOBase):
    """Stream of decompressed content that raises DataError if the content is far larger than the file.

    One line of such a file could fill the memory.
    """

    def __init__(self, path: str, stream: Any) -> None:
        self._path = path
        self._stream = stream
        self._bytes_left = max(UNCHECKED_BYTES, MAX_COMPRESSION_RATIO * os.path.getsize(path))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._stream.readinto(buffer)
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise DataError(
                f"{self._path}: decompresses to more than {MAX_COMPRESSION_RATIO} times its size, unlike "
                "text; if you trust the file, decompress it yourself"
            )
        return size


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> DataError:
    """Return the error for a file that the system cannot read."""
    return DataError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}")


def decode_utf8(content: bytes, where: str, offset: int) -> str:
    """Decode UTF-8.

    Args:
        content: Bytes of the (decompressed) file.
        where: Location for messages: the file, or file and line.
        offset: Offset of `content` in the (decompressed) file in bytes, for the message.

    Raises:
        DataError: The content is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at byte offset {offset + error.start}; "
            "convert the file (iconv -t UTF-8) or remove it"
        ) from None


DATABASE_NAME = "digests.sqlite"
WAIT_SECONDS = 60.0  # longest wait for other processes that write to the database
# Values of files that changed within this time are not cached: a second change within one tick of the file
# system's clock would not change the time stamp.
SETTLED_NANOSECONDS = 2_000_000_000
# The names of table and columns must stay: other names would lose the digests in existing databases.
CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS found (path TEXT, what TEXT, size INTEGER, mtime_ns INTEGER, inode INTEGER,"
    " value TEXT, PRIMARY KEY (path, what)) WITHOUT ROWID"
)
SELECT_VALUE = "SELECT value FROM found WHERE path=? AND what=? AND size=? AND mtime_ns=? AND inode=?"
log = logging.getLogger(__name__)


class FileStamp(NamedTuple):
    """Size, time and inode of a file; if one of them differs, the file has changed."""

    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of the last change in nanoseconds since 1970."""
    inode: int
    """Number of the file in its file system; it changes when the file is replaced."""


def read_file_stamp(path: str | Path) -> FileStamp:
    """Return the current stamp of a file.

    Raises:
        DataError: The file does not exist or cannot be read.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable_error(path, error) from None
    return FileStamp(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def hash_json(content: Any) -> str:
    """Return a hash of a JSON value, 32 hexadecimal digits, independent of the order of keys."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


class DigestCache:
    """Cache of values that were computed from files, by path and stamp; safe for concurrent processes.

    If the database cannot be used, all values are computed each time.

    Args:
        folder: Folder of the database, the `cache_dir` of the recipe; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / DATABASE_NAME

    def get_or_compute(
        self, paths: Sequence[str], value_name: str, compute: Callable[[str], Any]
    ) -> dict[str, tuple[FileStamp, Any]]:
        """Return the stamp and value of each file; compute the values of new and changed files, in threads.

        Args:
            paths: Paths of the files.
            value_name: Name of the value in the cache; a change of `compute` needs another name.
            compute: Function from path to a JSON value, safe to call in threads.

        Raises:
            DataError: A file does not exist, cannot be read, or changes while it is read. Errors of `compute`
                are raised as they are.
        """
        stamps = {path: read_file_stamp(path) for path in paths}
        keys = {path: (os.path.abspath(path), value_name, *stamp) for path, stamp in stamps.items()}
        cached_rows = self._run_for_each(SELECT_VALUE, keys)
        computed = {path: json.loads(rows[0][0]) for path, rows in cached_rows if rows}
        missing = [path for path in stamps if path not in computed]
        size = sum(stamps[path].size for path in missing)
        if size > 1e9:  # takes more than about a second
            log.info("hashing %d files, %s in total", len(missing), format_bytes(size))
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # threads, since hashing releases the GIL
        new_rows: dict[str, tuple[Any, ...]] = {}
        try:
            for path, value in zip(missing, pool.map(compute, missing), strict=True):
                if read_file_stamp(path) != stamps[path]:
                    raise DataError(
                        f"{path}: changed while it was read; start again when no program writes to it"
                    )
                computed[path] = value
                if time.time_ns() - stamps[path].mtime_ns > SETTLED_NANOSECONDS:
                    new_rows[path] = (*keys[path], json.dumps(value))
        finally:
            pool.shutdown(cancel_futures=True)
            self._run_for_each("INSERT OR REPLACE INTO found VALUES (?, ?, ?, ?, ?, ?)", new_rows)
        return {path: (stamps[path], computed[path]) for path in paths}

    def _run_for_each(self, command: str, values: dict[str, tuple[Any, ...]]) -> list[tuple[str, list[Any]]]:
        """Run an SQL command for each path, and create the database if it does not exist.

        Args:
            command: Command with a `?` for each value.
            values: Values of the command by path.

        Returns:
            Each path with the rows of its result; an empty list if the database cannot be used, which is
            logged.
        """
        if not values:
            return []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as database, database:
                database.execute(CREATE_TABLE)
                return [(path, database.execute(command, each).fetchall()) for path, each in values.items()]
        except (sqlite3.Error, OSError) as error:
            log.warning("%s cannot be used (%s): all files are hashed; delete this file", self.path, error)
            return []
