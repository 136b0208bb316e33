"""What is written is on the disk, and stays there when the power goes."""

from __future__ import annotations

import os
from pathlib import Path


def synchronise(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk.

    Raises:
        OSError: it cannot be opened, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Gives the file this content, in one step: whenever it is read, it is the old or the new one, whole.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        synchronise(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file of these parts and waits until it is on the disk.

    Raises:
        OSError: it cannot be written.
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
