"""This machine: which one it is, what became of its processes, whom the kernel killed for memory; what this
process holds, and how much memory and how many files it may take.

The only reader of cgroups. Limits of version 1 and 2 count, this process's own and those of the groups around
it: Slurm and Kubernetes set them on a job, not on the machine's root. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.files import GIB

ROOT = Path("/")
MOST_FILES = 1 << 20  # beyond, programs that walk through all numbers of files take seconds
FILES_ALONE = 400  # libraries, the data's maps, batches from workers, the files of a checkpoint
FILES_PER_RANK = 5  # connections of gloo's and NCCL's groups to each other rank
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
FORGET_PEAK = "5"  # proc(5), clear_refs: resets the mark of the peak, and touches nothing else
KERNEL_LOG = Path("/dev/kmsg")
_KILLED = re.compile(
    r"Killed process (\d+) \(.*\).* anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
_WRITTEN = re.compile(r"\d+,\d+,(\d+),")  # priority, number, microseconds since the machine started
CLOCKS_DIFFER = 1.0  # seconds by which the two clocks may differ
_RECORD = 8192  # bytes; the kernel's records are smaller
log = logging.getLogger(__name__)


def machine_id() -> str:
    """The same for two processes that see each other's pids, whatever their host is called."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # not Linux: nobody can be looked at


def process_age() -> float:
    """Seconds since this process began."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError):  # not Linux; there psutil is right to a second
        return time.time() - psutil.Process().create_time()


def process_state(pid: int) -> str:
    """`gone` (dead, or waiting to be reaped), `stopped` (SIGSTOP, a debugger) or `there`."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):
        return "there"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "there"


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    resident: int
    """Of this process."""
    used: int
    """Of the limit, by all who share it; without cached files, which the kernel takes back as needed."""
    limit: int
    by_cgroup: bool
    num_kills: int
    """Processes that the kernel killed in this cgroup for want of memory."""

    def __str__(self) -> str:
        whose = "its cgroup allows" if self.by_cgroup else "the machine has"
        used, limit = self.used / GIB, self.limit / GIB
        held = f"it held {self.resident / GIB:.1f} GiB"
        return f"{held}, and {used:.1f} of the {limit:.1f} GiB {whose} were in use"


class _Limit(NamedTuple):
    limit: int
    used: int


class _Names(NamedTuple):
    """Files of a cgroup."""

    limit: str
    usage: str
    cached: str
    """A line of memory.stat."""
    kills: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")


def memory_now(root: Path = ROOT) -> Memory:
    """As it is now. A few small files are read, below `root`."""
    machine = psutil.virtual_memory()
    tightest = _Limit(machine.total, machine.total - machine.available)
    by_cgroup = False
    for group in _limits(root):
        if group.limit < tightest.limit:
            tightest, by_cgroup = group, True
    resident = psutil.Process().memory_info().rss
    return Memory(resident, tightest.used, tightest.limit, by_cgroup, kills(root))


def own_limit() -> str | None:
    """What this process alone may take, where its shell or its launcher set that (`ulimit`)."""
    flags = {"ulimit -d": resource.RLIMIT_DATA, "ulimit -v": resource.RLIMIT_AS}
    limits = {flag: resource.getrlimit(each)[0] for flag, each in flags.items()}
    found = {flag: limit for flag, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not found:
        return None
    flag = min(found, key=found.__getitem__)
    return f"this process may take {found[flag] / GIB:.1f} GiB ({flag})"


def available_memory(root: Path = ROOT) -> int:
    """Bytes that processes here may still take: the machine's, or what the fullest cgroup leaves.

    What cannot be read sets no limit: a save does not fail for it.
    """
    free = [sys.maxsize, *(max(0, group.limit - group.used) for group in _limits(root))]
    with suppress(OSError):
        free.append(psutil.virtual_memory().available)
    return min(free)


def kills(root: Path = ROOT) -> int:
    """Processes that were killed for memory in this process's cgroup so far."""
    for folder, names in _cgroups(root):
        with suppress(OSError, ValueError, KeyError):
            return _table(folder / names.kills)["oom_kill"]
    return 0


def _limits(root: Path) -> Iterator[_Limit]:
    for folder, names in _cgroups(root):
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            limit, used = (int((folder / name).read_text()) for name in (names.limit, names.usage))
            yield _Limit(limit, max(0, used - _table(folder / "memory.stat").get(names.cached, 0)))


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """This process's cgroups and those around them, innermost first.

    In a container the path may be the host's, of which only the root, the container's own, is there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = root / "sys/fs/cgroup", _V2
        if controllers:
            top, names = top / "memory", _V1
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), names


def _table(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def raise_open_files_limit(world_size: int = 1, is_told: bool = True) -> None:
    """Raises the soft limit to the hard one; children inherit it. Warns beforehand where that is too few.

    Args:
        is_told: Whether this is the rank that warns.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # some systems say a hard limit that they do not give
            hard = soft
    needed = FILES_ALONE + FILES_PER_RANK * world_size
    if is_told and hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            "a process may open %d files here, and one of %d ranks opens about %d: raise the hard limit "
            "(ulimit -Hn; nofile in limits.conf, LimitNOFILE in systemd, --ulimit nofile in Docker)",
            hard,
            world_size,
            needed,
        )


def resident_now() -> int:
    """Bytes."""
    return int(psutil.Process().memory_info().rss)


def resident_peak() -> int:
    """Bytes, the most since `forget_peak`.

    Raises:
        OSError: not Linux.
    """
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no VmHWM")


def process_peak() -> int:
    """Bytes, the most since the process began or `forget_peak`, as far as the system knows.

    `ru_maxrss` has also what the process held that started this one: asked where there is nothing better.
    """
    try:
        return resident_peak()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """The mark of the peak starts again at what there is now.

    Raises:
        OSError: not Linux, or /proc cannot be written.
    """
    CLEAR.write_text(FORGET_PEAK)


def killed_for_memory(since: float, path: Path = KERNEL_LOG) -> dict[int, int]:
    """Process id -> bytes that it had resident, as the kernel numbers processes: a container may not.

    Empty where nothing was killed, or the log is not to be read (another user's, most containers).

    Args:
        since: Seconds of `time.monotonic()`: older numbers may have been another process's.
    """
    found: dict[int, int] = {}
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        while text := _next_record(log):
            written = _WRITTEN.match(text)
            if written is None or int(written[1]) / 1e6 < since - CLOCKS_DIFFER:
                continue
            for pid, *parts in _KILLED.findall(text):
                found[int(pid)] = sum(int(part or 0) for part in parts) * 1024
    finally:
        os.close(log)
    return found


def _next_record(log: int) -> str:
    """The next record; empty: there is none yet."""
    while True:
        try:
            return os.read(log, _RECORD).decode(errors="replace")
        except BrokenPipeError:  # what stood here was overwritten meanwhile: the next is read
            continue
        except OSError:
            return ""
