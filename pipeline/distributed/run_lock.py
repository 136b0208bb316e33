"""The file by which one process holds a run's directory, and whether one does."""

from __future__ import annotations

import fcntl
from pathlib import Path

from pipeline.files import open_plain

LOCK_FILE = ".lock"


def is_held(directory: Path) -> bool:
    """Whether a process trains the run. A run that starts this very moment may see the look as one."""
    try:
        with open(open_plain(directory / LOCK_FILE), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
