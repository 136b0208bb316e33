"""Opens files as streams of bytes, decompressed on the way; every way that fails is one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from pipeline.errors import DataError
from pipeline.files import format_bytes

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER_SIZE = 1 << 20
LARGEST_RATIO = 200  # text rarely shrinks to a tenth
HARMLESS_SIZE = 1 << 30  # bytes that a file may decompress to whatever its ratio
LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` asks for; a frame takes only what it was written with


@dataclass(frozen=True)
class Span:
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
    """The decompressed content, to be read once from its beginning (and sought where nothing is compressed).

    Raises:
        DataError: the file cannot be read, or its compression is damaged or cut short.
    """
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    if compression == "zstd":
        import zstandard

        damages += (zstandard.ZstdError,)
    try:
        with open(path, "rb", buffering=BUFFER_SIZE) as file:
            if not compression:
                yield file
                return
            blocks = _gzip_blocks(file) if compression == "gzip" else _zstd_blocks(file)
            yield io.BufferedReader(_Decompressed(path, file, blocks), BUFFER_SIZE)
    except damages as error:
        raise DataError(
            f"{path}: the {compression} compression is damaged or cut short ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None


class _Decompressed(io.RawIOBase):
    """Blocks as a stream, unless a small file holds endless amounts: one line of it may fill the memory."""

    def __init__(self, path: str, file: BinaryIO, blocks: Iterator[bytes]) -> None:
        self._path, self._blocks = path, blocks
        self._left = max(HARMLESS_SIZE, LARGEST_RATIO * os.fstat(file.fileno()).st_size)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        self._left -= size
        if self._left < 0:
            raise DataError(
                f"{self._path}: decompresses to more than {LARGEST_RATIO} times its size, unlike text; "
                "decompress it yourself if it is to be trusted"
            )
        return size


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    content = gzip.GzipFile(fileobj=file)
    while block := content.read(BUFFER_SIZE):
        yield block


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """One frame after the other. zstandard's own stream takes a file cut short for a whole one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    frame: zstandard.ZstdDecompressionObj | None = None
    rest = b""
    while block := rest or file.read(1 << 14):  # up to 32,768 times as much comes out
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(block)
        rest = b""
        if frame.eof:
            rest, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the last frame is not complete")


@contextmanager
def open_file(path: str, compression: str) -> Iterator[BinaryIO]:
    """Like `open_stream`, for formats that are read from their end: decompressed to a temporary file first.

    Raises:
        DataError: as in `open_stream`.
    """
    with open_stream(path, compression) as stream:
        if not compression:
            yield stream
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy, BUFFER_SIZE)
            copy.seek(0)
            yield cast(BinaryIO, copy)


def unreadable(path: str | os.PathLike[str], error: OSError) -> DataError:
    """The error for a file the system does not give."""
    return DataError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}")


def decode(content: bytes, where: str, path: str, offset: int) -> str:
    """`content` as text.

    Args:
        content: Bytes at `offset` of the (decompressed) file.
        where: What the message begins with: the file, or file and line.
        path: The file, to know whether the offset is into what was decompressed.
        offset: In bytes.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        of_what = " of what it decompresses to" if path.lower().endswith(tuple(COMPRESSIONS)) else ""
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at byte offset "
            f"{offset + error.start}{of_what}; convert the file (iconv -t UTF-8) or leave it out"
        ) from None


FILE_NAME = "digests.sqlite"
WRITE_SECONDS = 5.0  # between writes: a job that is killed loses no more than that
WAIT_SECONDS = 60.0  # for other processes that write
SETTLED_NANOSECONDS = 2_000_000_000  # a file may change twice within one tick of its file system's clock
TABLE = (
    "CREATE TABLE IF NOT EXISTS found (path TEXT, what TEXT, size INTEGER, mtime_ns INTEGER, inode INTEGER,"
    " value TEXT, PRIMARY KEY (path, what)) WITHOUT ROWID"
)
log = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """Tells whether a file is still what it was: size in bytes, time of its last change, inode."""

    size: int
    mtime_ns: int
    inode: int


def stamp_of(path: str | Path) -> Stamp:
    """The stamp of a file as it is now.

    Raises:
        DataError: it is gone, or cannot be read.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def hash_of(content: Any) -> str:
    """32 hexadecimal digits that stand for what JSON can hold; the order of keys does not count."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


class DigestCache:
    """In `cache_dir`; any number of processes may use it at once.

    Args:
        folder: The `cache_dir` of the recipe; made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def recall(
        self, paths: Sequence[str], what: str, look: Callable[[str], Any]
    ) -> dict[str, tuple[Stamp, Any]]:
        """What `look` finds in each file; it is called for files that are new or changed, in threads.

        Args:
            paths: Files.
            what: Name of what `look` finds; another look has another name.
            look: From path to something JSON can hold.

        Raises:
            DataError: a file is gone, cannot be read, or changes meanwhile; and what `look` raises.
        """
        stamps = {path: stamp_of(path) for path in paths}
        found = self._known(stamps, what)
        missing = [path for path in stamps if path not in found]
        size = sum(stamps[path].size for path in missing)
        if size > 1e9:
            message = "reading %d files of %s to know them by their content"
            log.info(message, len(missing), format_bytes(size))
        news: list[tuple[Any, ...]] = []
        written = time.monotonic()
        try:
            for path, value in zip(missing, _in_threads(look, missing), strict=True):
                stamp = stamps[path]
                if stamp_of(path) != stamp:
                    raise DataError(f"{path}: changed while it was read; start again when it is finished")
                found[path] = value
                if time.time_ns() - stamp.mtime_ns > SETTLED_NANOSECONDS:
                    news.append((os.path.abspath(path), what, *stamp, json.dumps(value)))
                if time.monotonic() - written > WRITE_SECONDS:
                    self._write(news)
                    news, written = [], time.monotonic()
        finally:
            self._write(news)
        return {path: (stamps[path], found[path]) for path in paths}

    def _known(self, stamps: dict[str, Stamp], what: str) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        query = "SELECT value FROM found WHERE path=? AND what=? AND size=? AND mtime_ns=? AND inode=?"
        found = {}
        try:
            with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as database:
                for path, stamp in stamps.items():
                    row = database.execute(query, (os.path.abspath(path), what, *stamp)).fetchone()
                    if row is not None:
                        found[path] = json.loads(row[0])
        except sqlite3.Error as error:
            log.warning("%s cannot be used (%s): files are read again; delete it", self.path, error)
        return found

    def _write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        if not rows:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as database, database:
                database.execute(TABLE)
                database.executemany("INSERT OR REPLACE INTO found VALUES (?, ?, ?, ?, ?, ?)", rows)
        except (sqlite3.Error, OSError) as error:
            log.warning("%s cannot be written (%s): files are read again next time", self.path, error)


def _in_threads(look: Callable[[str], Any], paths: Sequence[str]) -> Iterator[Any]:
    """`look` of each path in order; hashing leaves Python's lock alone."""
    if len(paths) <= 1:
        yield from map(look, paths)
        return
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        yield from pool.map(look, paths)
    finally:
        pool.shutdown(cancel_futures=True)
