"""Atomic and durable writes, safe reads of files from other programs, and formats of bytes and durations.

A file from another program is read only if it is a regular file of bounded size inside the named folder.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 2**20
GIB = 2**30
# Type bits of a file's mode -> description for messages.
FILE_TYPES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MAX_CONFIGURATION_BYTES = 1 << 20  # bytes of a file that a person wrote
MAX_IMAGE_BYTES = 1 << 29  # bytes of an encoded image
MAX_DESCRIPTION_BYTES = 1 << 28  # bytes of a file that a program wrote: a vocabulary, an index of weights


def format_bytes(num_bytes: float) -> str:
    """Return `1.25 GiB`, `12 MiB` or `3 KiB`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes / 1024:.0f} KiB"


def format_duration(seconds: float) -> str:
    """Return a time in two units: 12s, 4m05s, 1h02m, 3d04h."""
    total = round(seconds)
    minutes = total // 60
    hours = total // 3600
    days = total // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{total % 60:02}s" if minutes else f"{total}s"


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk.

    Raises:
        OSError: The path cannot be opened, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file of these parts and wait until it is on the disk.

    Raises:
        OSError: The file cannot be written, or exists already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` atomically when the body ends.

    The body must create that file. Every reader of `path` sees the complete old or the complete new content.
    If the body raises, the old content stays.

    Raises:
        OSError: The file cannot be written.
    """
    # Two processes may replace a file of a cache at the same time, so the name has the process id.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync_to_disk(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)  # so that the rename survives a power cut


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically; see `atomic_write`.

    Raises:
        OSError: The file cannot be written; the old one stays.
    """
    with atomic_write(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def publish_folder(partial: Path, final: Path, files: Iterable[Path] = ()) -> None:
    """Sync a filled folder to the disk, then rename it to its final name atomically.

    Args:
        partial: The filled folder, in the same parent folder as `final`.
        final: New path. Nothing, or an empty folder, may exist there.
        files: Files of the folder that are not on the disk yet. They are synced here.

    Raises:
        OSError: The disk fails, or `final` exists; the folder keeps its old name.
    """
    for file in files:
        sync_to_disk(file)
    sync_to_disk(partial)
    partial.rename(final)
    try:
        sync_to_disk(final.parent)
    except OSError:
        final.rename(partial)
        raise


def is_path(name: str) -> bool:
    """Return whether a name must be a path, since it does not look like a hub name (`owner/name`)."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def suggest_path(path: Path, names: Iterable[str] = ()) -> str:
    """Return `; did you mean ...?` for the first component of a path that does not exist.

    Args:
        path: Path that does not exist.
        names: Words that could be meant in its place.

    Returns:
        An empty text if no name is similar.
    """
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    siblings = os.listdir(missing.parent) if missing.parent.is_dir() else []
    similar = difflib.get_close_matches(missing.name, [*siblings, *names], n=1)
    if not similar:
        return ""
    return f"; did you mean {similar[0] if similar[0] in names else missing.parent / similar[0]}?"


def _describe_type(mode: int) -> str:
    """Return "a pipe, not a file", from the mode of `os.stat`."""
    return f"{FILE_TYPES.get(stat.S_IFMT(mode), 'something else')}, not a file"


def open_regular_file(path: Path | str, follow_links: bool = True) -> int:
    """Open a regular file for reading, and return its descriptor, which the caller closes.

    Pipes, sockets and devices are refused, since reading one may block or never end.

    Args:
        path: File to open.
        follow_links: Whether a symbolic link at `path` is followed. Otherwise it is an error.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe blocks until another process opens it for writing.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, f"it is {_describe_type(mode)}", str(path))
    return descriptor


def read_regular_file(path: Path | str, max_bytes: int, follow_links: bool = True) -> bytes:
    """Return the content of a regular file.

    Args:
        path: File to read.
        max_bytes: Largest size of the file.
        follow_links: Whether a symbolic link at `path` is followed. Otherwise it is an error.

    Raises:
        OSError: The file is larger, or `open_regular_file` raised the error.
    """
    with open(open_regular_file(path, follow_links), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(
            errno.EFBIG, f"it is larger than the {max_bytes >> 10:,} KiB that such a file may have", str(path)
        )
    return content


def find_path_inside(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a folder; `None` if the name leads out of the folder, by `..` or by links.

    In the Hugging Face cache, the files of `snapshots/COMMIT` are links to its folder `blobs`. These files
    count as inside.
    """
    name_path = Path(name)
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parents[1]
    try:
        is_inside = (folder / name).resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a loop of links or an impossible name: reading fails
        is_inside = True
    is_plain = ".." not in name_path.parts and not name_path.is_absolute()
    return folder / name if is_inside and is_plain else None


def find_unsafe_files(folder: Path) -> Iterator[str]:
    """Yield a problem for each file of a folder that a library must not open: not regular, or too large.

    Libraries such as transformers open every file of a known name, also a pipe or a device.
    """
    for directory in (folder, folder / "additional_chat_templates"):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if path.is_dir() or not path.exists():
                continue
            if not path.is_file():
                yield f"{path.name[:100]!r} is {_describe_type(path.stat().st_mode)}"
            elif (
                path.suffix in (".json", ".jinja", ".txt", ".model")
                and path.stat().st_size > MAX_DESCRIPTION_BYTES
            ):
                limit = f"{MAX_DESCRIPTION_BYTES >> 20} MiB"
                yield f"{path.name[:100]!r} is larger than the {limit} that it may have"


def read_weight_map(index: Path) -> dict[str, str]:
    """Return tensor name -> file name, from the `weight_map` of a sharded model's index.

    Raises:
        OSError: The index cannot be read.
        ValueError: The file is not such an index.
    """
    try:
        file_of: dict[str, str] = json.loads(read_regular_file(index, MAX_DESCRIPTION_BYTES))["weight_map"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(f, str) for f in file_of.values()):
        raise ValueError("no map of tensors to files")
    return file_of


LOCK_FILE = ".lock"
"""File of a run directory on which a training process has a lock."""


def is_run_locked(directory: Path) -> bool:
    """Return whether a process is training the run of this directory.

    The test takes a shared lock for a moment. A run that starts in that moment may report that another
    process trains it.
    """
    try:
        with open(open_regular_file(directory / LOCK_FILE), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
