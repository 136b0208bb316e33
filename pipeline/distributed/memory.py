"""How much host memory this process holds, and the limit that counts: its cgroup's, or the machine's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    resident: int
    """Of this process."""
    used: int
    """Of the limit, by all who share it."""
    limit: int
    by_cgroup: bool
    num_kills: int
    """Processes that the kernel killed in this cgroup for want of memory."""

    def __str__(self) -> str:
        whose = "its cgroup allows" if self.by_cgroup else "the machine has"
        used, limit = self.used / GIB, self.limit / GIB
        held = f"it held {self.resident / GIB:.1f} GiB"
        return f"{held}, and {used:.1f} of the {limit:.1f} GiB {whose} were in use"


def memory_now() -> Memory:
    """As it is now. A few small files are read."""
    resident = psutil.Process().memory_info().rss
    machine = psutil.virtual_memory()
    used, limit, by_cgroup = machine.total - machine.available, machine.total, False
    for folder in _cgroups():
        allowed, taken = _number(folder / "memory.max"), _number(folder / "memory.current")
        if allowed is not None and taken is not None and allowed < limit:
            used, limit, by_cgroup = taken, allowed, True
    return Memory(resident, used, limit, by_cgroup, kills())


def kills() -> int:
    """Processes that were killed for memory in this process's cgroup so far."""
    for folder in _cgroups():
        try:
            lines = (folder / "memory.events").read_text().splitlines()
            return int(dict(line.split() for line in lines)["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def _cgroups() -> list[Path]:
    """This process's cgroup and those around it, innermost first; version 2 alone says what is asked here."""
    try:
        line = next(
            line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return []
    inner = Path(os.path.normpath(f"{CGROUPS}/{line[3:]}"))
    around = [inner, *inner.parents]
    return [folder for folder in around if folder == CGROUPS or CGROUPS in folder.parents]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
