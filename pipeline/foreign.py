"""Files and folders that others made: plain files only, not without end, nothing outside the folder named."""

from __future__ import annotations

import errno
import json
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
IMAGE = 1 << 29  # bytes of an encoded one
DESCRIPTION = 1 << 28  # bytes of one that a program wrote: a vocabulary, an index of weights


def is_path(name: str) -> bool:
    """Whether what may be a path or a name on the hub, `name` or `owner/name`, can only be a path."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


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


def read_plain(path: Path | str, most: int, follow_links: bool = True) -> bytes:
    """The content of a plain file of at most so many bytes.

    Raises:
        OSError: as in `open_plain`; it is larger.
    """
    with open(open_plain(path, follow_links), "rb") as file:
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
        stays = (folder / name).resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that cannot be: nothing is there
        stays = True
    return folder / name if stays and ".." not in given.parts and not given.is_absolute() else None


def unsafe_files(folder: Path) -> Iterator[str]:
    """What is wrong with the files of a folder whose reader, a library, opens whatever is there."""
    for place in (folder, folder / "additional_chat_templates"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_dir() or not path.exists():
                continue
            if not path.is_file():
                yield f"{path.name[:100]!r} is {_kind(path.stat().st_mode)}"
            elif path.suffix in (".json", ".jinja", ".txt", ".model") and path.stat().st_size > DESCRIPTION:
                yield f"{path.name[:100]!r} is larger than the {DESCRIPTION >> 20} MiB that it may have"


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a model in several files has it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such index.
    """
    try:
        places: dict[str, str] = json.loads(read_plain(index, DESCRIPTION))["weight_map"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(places, dict) or not places or not all(isinstance(p, str) for p in places.values()):
        raise ValueError("no map of tensors to files")
    return places
