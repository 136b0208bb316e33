"""A folder for each result that took long to compute: written once, by one process, whole or not at all.

Knows nothing of what is in it but the sizes of the files.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.errors import DataError

INDEX = "index.json"
log = logging.getLogger(__name__)


def cached_entry(cache_dir: Path, key: str, write: Callable[[Path], dict[str, Any]]) -> Path:
    """The folder `cache_dir / key`, made by `write` unless it is there.

    Every process of a job may call this at once: one writes, the others wait for it. What a killed writer
    left has another name and is removed by the next one.

    Args:
        cache_dir: Made if missing.
        key: Stands for everything the content depends on.
        write: Puts the files into an empty folder; what it returns goes into their `index.json`.

    Raises:
        DataError: `cache_dir` cannot be written.
    """
    entry = cache_dir / key
    if is_complete(entry):
        return entry
    try:
        with _locked(cache_dir, key):
            if not is_complete(entry):
                _write_entry(entry, write)
    except OSError as error:
        raise DataError(
            f"data.cache_dir {cache_dir} cannot be written: {error.strerror or error}; "
            "set data.cache_dir to a folder that can, with enough space"
        ) from error
    return entry


def is_complete(entry: Path) -> bool:
    """Whether `entry` was written to the end: its index is there, and every file has the size it had then."""
    try:
        sizes = read_index(entry)["bytes"]
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_index(entry: Path) -> dict[str, Any]:
    """What `write` returned, and the size of each file under `bytes`."""
    index: dict[str, Any] = json.loads((entry / INDEX).read_text("utf-8"))
    return index


@contextmanager
def _locked(cache_dir: Path, key: str) -> Iterator[None]:
    cache_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache_dir / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("another process is preparing this data: waiting for it (%s)", lock.lock_file)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_entry(entry: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Only with the lock held."""
    for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):
        shutil.rmtree(leftover)
    if entry.exists():  # damaged: it was there, and is not complete
        shutil.rmtree(entry)
    temporary = entry.with_name(f"{entry.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        index = write(temporary)
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        (temporary / INDEX).write_text(json.dumps(index | {"bytes": sizes}, indent=2) + "\n", "utf-8")
        temporary.rename(entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
