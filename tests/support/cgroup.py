"""A cgroup with a limit of memory, for real kills, where this machine lets one be made."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def memory_limited(mib: int) -> Iterator[Path]:
    """The file to which a process writes its id to be in it. Skips the test where there can be none."""
    first = Path("/sys/fs/cgroup/memory")
    top, name = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    group = top / f"test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / name).write_text(str(mib * 2**20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
