"""Limits the memory of processes with a control group, so that the kernel's out-of-memory killer acts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def limit_memory(mib: int) -> Iterator[Path]:
    """Yield the `cgroup.procs` file of a new control group; a process joins by writing its id to the file.

    Skip the test if this machine does not allow control groups to be made.
    """
    version_1 = Path("/sys/fs/cgroup/memory")
    if version_1.is_dir():
        parent = version_1
        limit_file = "memory.limit_in_bytes"
    else:
        parent = version_1.parent
        limit_file = "memory.max"
    group = parent / f"test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / limit_file).write_text(str(mib * 2**20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"cannot make a control group under {parent}: {error}; run the test as root")
    try:
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):  # the kernel refuses to remove a group until its killed processes are reaped
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
