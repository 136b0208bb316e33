"""Remembers what a look through a file found, as its hash, so that a file that did not change is read once.

Only ever saves time: where the database cannot be used, files are read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.data.documents.streams import unreadable
from pipeline.errors import DataError

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
            log.info("reading %d files of %.1f GB to know them by their content", len(missing), size / 1e9)
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
