"""Files that are replaced in one step, files that others made, and the formats of bytes and durations.

What others made is read where it is a plain file, of a bounded size, inside of the folder that was named.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MIB, GIB = 2**20, 2**30
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
CONFIGURATION_LIMIT = 1 << 20  # bytes of a file that somebody wrote by hand
IMAGE_LIMIT = 1 << 29  # bytes of an encoded one
DESCRIPTION_LIMIT = 1 << 28  # bytes of one that a program wrote: a vocabulary, an index of weights


def format_bytes(num_bytes: float) -> str:
    """Return `1.25 GiB`, `12 MiB` or `3 KiB`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes / 1024:.0f} KiB"


def format_duration(seconds: float) -> str:
    """Return a time in two units: 12s, 4m05s, 1h02m, 3d04h."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{total % 60:02}s" if minutes else f"{total}s"


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk.

    Raises:
        OSError: it cannot be opened, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file of these parts and wait until it is on the disk.

    Raises:
        OSError: it cannot be written, or is there already.
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
    """Yield the path of a new file, which takes the place of `path` in one step once the body has filled it.

    Whoever reads `path` finds the old content or the new one, whole. If the body raises, the old one stays.

    Raises:
        OSError: it cannot be written.
    """
    # Two processes may replace the file of a cache at the same time: each fills a file of its own.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync_to_disk(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)  # against a power cut: the new name


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content in one step: see `replacing`.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    with atomic_write(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def publish_folder(partial: Path, final: Path, files: Iterable[Path] = ()) -> None:
    """Give a filled folder its name, in one step, once all of it is on the disk.

    Args:
        partial: The folder, beside `final`.
        final: Its name from now on; not there yet, or an empty folder.
        files: Those of its files that nobody has synchronised.

    Raises:
        OSError: the disk fails, or `final` is there; the folder keeps its old name.
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
    """Return whether a name can only be a path: not `name` or `owner/name` of the hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _kind(mode: int) -> str:
    return f"{KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file"


def open_regular_file(path: Path | str, follow_links: bool = True) -> int:
    """Open a plain file to read it; the caller closes the descriptor.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket, a device or a folder: those may wait for ever,
            or never end.
    """
    # Without O_NONBLOCK a pipe in place of the file would wait for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise OSError(errno.EINVAL, "it is no plain file", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}", str(path))
    return descriptor


def read_regular_file(path: Path | str, most: int, follow_links: bool = True) -> bytes:
    """Return the content of a plain file of at most `most` bytes.

    Raises:
        OSError: as in `open_regular_file`; it is larger.
    """
    with open(open_regular_file(path, follow_links), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(
            errno.EFBIG, f"it is larger than the {most >> 10:,} KiB that such a file may have", str(path)
        )
    return content


def path_inside(folder: Path, name: str) -> Path | None:
    """Return the path of that name; None if it leads out of the folder, by its words or by links.

    The hub's cache keeps the files of `snapshots/COMMIT` beside it, in `blobs`: they count as inside.
    """
    given, root = Path(name), folder.resolve()
    root = root.parents[1] if root.parent.name == "snapshots" else root
    try:
        stays = (folder / name).resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that cannot be: nothing is there
        stays = True
    return folder / name if stays and ".." not in given.parts and not given.is_absolute() else None


def find_unsafe_files(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the files of a folder whose reader, a library, opens whatever is there."""
    for place in (folder, folder / "additional_chat_templates"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_dir() or not path.exists():
                continue
            if not path.is_file():
                yield f"{path.name[:100]!r} is {_kind(path.stat().st_mode)}"
            elif (
                path.suffix in (".json", ".jinja", ".txt", ".model")
                and path.stat().st_size > DESCRIPTION_LIMIT
            ):
                yield f"{path.name[:100]!r} is larger than the {DESCRIPTION_LIMIT >> 20} MiB that it may have"


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by the index of a model in several files.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such index.
    """
    try:
        places: dict[str, str] = json.loads(read_regular_file(index, DESCRIPTION_LIMIT))["weight_map"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(places, dict) or not places or not all(isinstance(p, str) for p in places.values()):
        raise ValueError("no map of tensors to files")
    return places


LOCK_FILE = ".lock"


def is_run_locked(directory: Path) -> bool:
    """Whether a process trains the run. A run that starts this very moment may see the look as one."""
    try:
        with open(open_regular_file(directory / LOCK_FILE), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
