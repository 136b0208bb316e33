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
    partial.write_text(text)
    synchronise(partial)
    partial.replace(path)
