"""A folder that is written whole or not at all, knows its checksums, and says when it is damaged.

Checksums are xxh3 of 128 bits (of the xxhash package): they find accidents, at the speed of the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from pipeline.errors import DataError
from pipeline.files import format_bytes, publish_folder, replace_file

CHECKED = "checked.json"  # times of last change for which the content is known to be right
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
log = logging.getLogger(__name__)


@contextmanager
def writing_to(cache_dir: Path, what: str) -> Iterator[None]:
    """Turns a failure to write into one line that says where, how much is free, and what to do.

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
def held_lock(cache_dir: Path, name: str, alive: Callable[[], None] | None) -> Iterator[bool]:
    """Holds the lock `name` of the cache; no other process then has it, however that one ended.

    Args:
        alive: None: do not wait. Otherwise called about every second while another process holds the lock.

    Yields:
        Whether it is held.
    """
    folder = cache_dir / "locks"
    with writing_to(cache_dir, "a lock file"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        while True:
            try:
                lock.acquire(timeout=0 if alive is None else 1)
                break
            except Timeout:
                if alive is None:
                    break
                alive()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def begin_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled. What a killed writer left there is removed.

    Only with a lock held that is this folder's own.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    abandon_folder(temporary)
    temporary.mkdir(parents=True)
    return temporary


def finish_folder(temporary: Path, folder: Path, names: Iterable[str]) -> None:
    """Gives a filled folder its name, in one rename, once all of it is on the disk.

    Notes that the files `names` have the right content as they are now.
    """
    write_json(temporary / CHECKED, {name: (temporary / name).stat().st_mtime_ns for name in names})
    if folder.exists():  # damaged
        shutil.rmtree(folder)
    publish_folder(temporary, folder, temporary.iterdir())


def abandon_folder(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    path.write_text(_json(content), "utf-8")


def replace_json(path: Path, content: Any) -> None:
    """Replace a file that others may be reading. If it cannot be written, do nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _json(content))
    except OSError as error:
        log.debug("%s is not written: %s", path, error)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def find_damage(folder: Path, files: dict[str, dict[str, Any]], verify: bool) -> str | None:
    """What is wrong with the files of a folder; None: nothing.

    Sizes are compared at once. Content is read where a file was touched since it was last known to be right.

    Args:
        files: By name: `bytes`, and the checksum under `xxh3_128`.
        verify: Read all content.
    """
    times: dict[str, int] = {}
    for name, expected in files.items():
        try:
            stat = (folder / name).stat()
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if stat.st_size != expected["bytes"]:
            return f"{name} has {stat.st_size} bytes, {expected['bytes']} were written"
        times[name] = stat.st_mtime_ns
    known = _checked_times(folder)
    if not verify and known == times:
        return None
    for name, expected in files.items():
        try:
            checksum = checksum_of(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if checksum != expected["xxh3_128"]:
            return f"the content of {name} is not what was written, by its checksum"
    if known != times:
        replace_json(folder / CHECKED, times)
    return None


def _checked_times(folder: Path) -> Any:
    try:
        return json.loads((folder / CHECKED).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def checksum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
