"""Where wandb keeps its temporary files, so that what a killed run leaves is found and removed by the next.

A folder under the system's own for temporary files, locked for as long as its process lives. One whose lock
is free is of a run that is dead, whatever has become of its process id.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "pipeline-wandb-"
LOCK = "lock"
LONGEST_PATH = 60  # wandb puts sockets there, whose paths Linux limits to 107 bytes


@contextmanager
def temporary_files_in_scratch() -> Iterator[None]:
    """What this process, and those it starts, put into temporary folders goes to this process's own."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    folder = str(scratch())
    tempfile.tempdir = folder
    if len(folder) <= LONGEST_PATH:
        os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        if before[1] is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before[1]


@functools.cache
def scratch() -> Path:
    """This process's folder; it goes when the process ends, or else when the next run starts."""
    above = Path(tempfile.gettempdir())
    remove_dead(above)
    # Under its own name only once it is locked: nobody can take it for a dead run's.
    new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
    lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = new.rename(above / new.name.removeprefix("new-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_dead(above: Path) -> None:
    """Removes the folders of runs that are dead: ours by their name, by their owner, and by a free lock."""
    for folder in above.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, or being removed by another run
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
