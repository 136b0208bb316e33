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

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER_SIZE = 1 << 20
LARGEST_RATIO = 200  # of decompressed to compressed size; text rarely reaches 10
HARMLESS_SIZE = 1 << 30  # decompressed bytes below which the ratio is not checked


@dataclass(frozen=True)
class FileSpan:
    """A range of a file.

    Attributes:
        path: Path of the file.
        kind: Reader of the file, a key of READERS.
        compression: A value of COMPRESSIONS, or "" for a plain file.
        start: Begin of the range: a byte offset in JSONL files, a row group in parquet files, else 0.
        end: End of the range (exclusive), in the same unit; `None` for the end of the file.
        first: Number (from 1) of the first line or row in the file.
    """

    path: str
    kind: str
    compression: str = ""
    start: int = 0
    end: int | None = None
    first: int = 1


@contextmanager
def open_stream(path: str, compression: str) -> Iterator[BinaryIO]:
    """Open the decompressed content for reading from its beginning; only plain files can seek.

    Raises:
        DataError: The file cannot be read, or its compressed content is damaged or incomplete.
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
    """Decompressed content, which raises an error if a small file decompresses to enormous amounts.

    One line of such a file could fill the memory.
    """

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
    """Return the error for a file that the system cannot read."""
    return DataError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}")


def decode_utf8(content: bytes, where: str, offset: int) -> str:
    """Decode UTF-8.

    Args:
        content: Bytes of the (decompressed) file.
        where: Location for messages: the file, or file and line.
        offset: Offset of `content` in the file, in bytes.

    Raises:
        DataError: The content is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at byte offset {offset + error.start}; "
            "convert the file (iconv -t UTF-8) or leave it out"
        ) from None


FILE_NAME = "digests.sqlite"
WAIT_SECONDS = 60.0  # longest wait for other processes that write to the database
# Files that changed within this time are not cached: a second change within one tick of the file system's
# clock would not show in the time stamp.
SETTLED_NANOSECONDS = 2_000_000_000
TABLE = (
    "CREATE TABLE IF NOT EXISTS found (path TEXT, what TEXT, size INTEGER, mtime_ns INTEGER, inode INTEGER,"
    " value TEXT, PRIMARY KEY (path, what)) WITHOUT ROWID"
)
KNOWN = "SELECT value FROM found WHERE path=? AND what=? AND size=? AND mtime_ns=? AND inode=?"
log = logging.getLogger(__name__)


class FileStamp(NamedTuple):
    """Size in bytes, time of last change and inode of a file; a different stamp means a changed file."""

    size: int
    mtime_ns: int
    inode: int


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
    """Cache of values computed from files, by path and stamp, in `cache_dir`; safe for concurrent processes.

    Args:
        folder: The `cache_dir` of the recipe; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def get_or_compute(
        self, paths: Sequence[str], what: str, compute: Callable[[str], Any]
    ) -> dict[str, tuple[FileStamp, Any]]:
        """Return the stamp and value of each file; compute the values of new and changed files, in threads.

        Args:
            paths: Paths of the files.
            what: Name that identifies the function `compute` in the cache.
            compute: Function from path to a JSON value.

        Raises:
            DataError: A file does not exist, cannot be read, or changes while it is read. Errors of `compute`
                are raised as they are.
        """
        stamps = {path: read_file_stamp(path) for path in paths}
        keys = {path: (os.path.abspath(path), what, *stamp) for path, stamp in stamps.items()}
        found = {path: json.loads(rows[0][0]) for path, rows in self._run(KNOWN, keys) if rows}
        missing = [path for path in stamps if path not in found]
        size = sum(stamps[path].size for path in missing)
        if size > 1e9:
            message = "hashing the content of %d files of %s"
            log.info(message, len(missing), format_bytes(size))
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # threads, since hashing releases the GIL
        news: dict[str, tuple[Any, ...]] = {}
        try:
            for path, value in zip(missing, pool.map(compute, missing), strict=True):
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
        """Run a command for each path and return the rows; return nothing if the database cannot be used."""
        if not values:
            return []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as database, database:
                database.execute(TABLE)
                return [(path, database.execute(command, each).fetchall()) for path, each in values.items()]
        except (sqlite3.Error, OSError) as error:
            log.warning("%s cannot be used (%s): files are hashed again; delete it", self.path, error)
            return []
