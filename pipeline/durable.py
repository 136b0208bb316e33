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
