"""Files and folders that others made: plain files only, not without end, nothing outside the folder named."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
CONFIGURATION = 1 << 20  # bytes of a file that somebody wrote by hand
DESCRIPTION = 1 << 28  # bytes of one that a program wrote: a vocabulary, an index of weights


def _kind(mode: int) -> str:
    return f"{KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file"


def open_plain(path: Path | str, follow_links: bool = True) -> int:
    """A descriptor of a plain file, to read it; to be closed by the caller.

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


def read_plain(path: Path | str, most: int) -> bytes:
    """The content of a plain file of at most so many bytes.

    Raises:
        OSError: as in `open_plain`; it is larger.
    """
    with open(open_plain(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(
            errno.EFBIG, f"it is larger than the {most >> 10:,} KiB that such a file may have", str(path)
        )
    return content


def inside(folder: Path, name: str) -> Path | None:
    """The path of that name; None where it would lead out of the folder, by its words or by links.

    The hub's cache keeps the files of `snapshots/COMMIT` beside it, in `blobs`: they count as inside.
    """
    given, root = Path(name), folder.resolve()
    root = root.parents[1] if root.parent.name == "snapshots" else root
    try:
        if ".." in given.parts or given.is_absolute() or not (folder / name).resolve().is_relative_to(root):
            return None
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that cannot be
        return None
    return folder / name


def unsafe_files(folder: Path) -> Iterator[str]:
    """What is wrong with the files right in a folder whose reader, a library, opens whatever is there."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            continue
        if inside(folder, entry.name) is None:
            yield f"{entry.name[:100]!r} is a link that leads out of the folder"
        elif path.exists() and not path.is_file():
            yield f"{entry.name[:100]!r} is {_kind(path.stat().st_mode)}"
        elif path.suffix in (".json", ".jinja", ".txt", ".model") and entry.stat().st_size > DESCRIPTION:
            yield f"{entry.name[:100]!r} is larger than the {DESCRIPTION >> 20} MiB that such a file may have"
