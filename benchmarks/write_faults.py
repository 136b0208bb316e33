"""Ranks that are forked from one warm process, and a fault at the n-th call by which one changes a folder.

The calls are caught below Python, by write_faults.c: what writes by way of C++ is caught as well.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
WORLD_SIZE = 2
ALL_CALLS = "owfrmu"  # open to write, write, fsync, rename, mkdir, unlink: letters of Report.all


@dataclass(frozen=True)
class Kind:
    """What happens."""

    code: int
    """Of the enum in write_faults.c."""
    calls: str
    """The calls it can happen at."""


KINDS = {
    "every rank killed": Kind(1, ALL_CALLS),
    "a rank lost": Kind(2, ALL_CALLS),
    "no space": Kind(3, "owfrm"),
    "I/O error": Kind(4, ALL_CALLS),
    "short write, then no space": Kind(5, "w"),
    "short write, then a rank lost": Kind(6, "w"),
}


@dataclass(frozen=True)
class Fault:
    """At the `at`-th call (from 1) of a rank. 0: never."""

    kind: str
    rank: int
    at: int


NO_FAULT = Fault("every rank killed", 0, 0)


class Report(ctypes.Structure):
    """What the calls were, told by the process that may not live to tell."""

    _fields_ = (
        ("calls", ctypes.c_long),
        ("hits", ctypes.c_long),
        ("call", ctypes.c_char * 16),
        ("path", ctypes.c_char * 200),
        ("all", ctypes.c_char * 4096),
    )


@dataclass(frozen=True)
class Ended:
    """How the ranks ended."""

    codes: tuple[int, ...]
    """As of subprocess: negative for a signal."""
    hung: bool
    seconds: float
    calls: tuple[str, ...]
    """A letter for each call, by rank."""
    hit: tuple[str, str]
    """The call at which the fault happened, and its path; empty: it did not come to that."""


def build(folder: Path) -> Path:
    """The library to preload.

    Raises:
        OSError: there is no C compiler, or it refuses.
    """
    library = folder / "write_faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"cc: {done.stderr.strip()}")
    return library


def run_ranks(
    work: Callable[[int, Callable[[], None]], object],
    folder: Path,
    scratch: Path,
    fault: Fault = NO_FAULT,
    limit: float = 40.0,
) -> Ended:
    """Forks the ranks, lets them work and waits.

    Args:
        work: Called with the rank, in a gloo group, and what has to be called once calls are to count. An
            exception ends its rank with code 1.
        folder: Calls below it count.
        scratch: An empty folder for what the ranks print and where they meet.
        limit: Seconds after which they are ended: a hang.
    """
    shared = mmap.mmap(-1, WORLD_SIZE * ctypes.sizeof(Report))
    reports = (Report * WORLD_SIZE).from_buffer(shared)
    began = time.monotonic()
    pids: list[int] = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            _be_rank(work, rank, pids, folder, scratch, fault, reports[rank])
        pids.append(pid)
        _join_group(pid, pids[0])
    codes, hung = _wait(pids, began + limit)
    seconds = time.monotonic() - began
    calls = tuple(bytes(report.all).decode() for report in reports)
    at = reports[fault.rank]
    hit = (at.call.decode(), at.path.decode()) if at.hits else ("", "")
    return Ended(codes, hung, seconds, calls, hit)


def _be_rank(
    work: Callable[[int, Callable[[], None]], object],
    rank: int,
    before: list[int],
    folder: Path,
    scratch: Path,
    fault: Fault,
    report: Report,
) -> None:
    """The life of a rank, from the fork to its end."""
    code = 1
    try:
        _join_group(0, before[0] if before else 0)
        output = os.open(scratch / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_SIZE": WORLD_SIZE}
        os.environ.update({name: str(value) for name, value in place.items()})
        import torch.distributed as dist

        store = dist.FileStore(str(scratch / "meeting"), WORLD_SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
        at = fault.at if fault.rank == rank else 0
        arm = ctypes.CDLL(None).faults_arm
        below = os.fsencode(folder)
        work(rank, lambda: arm(below, ctypes.c_long(at), KINDS[fault.kind].code, ctypes.byref(report)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _join_group(pid: int, leader: int) -> None:
    """Parent and child both: whoever comes first. `every rank killed` kills the group."""
    with suppress(OSError):
        os.setpgid(pid, leader)


def _wait(pids: list[int], deadline: float) -> tuple[tuple[int, ...], bool]:
    codes: dict[int, int] = {}
    hung = False
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if len(codes) < len(pids) and not hung and time.monotonic() > deadline:
            hung = True
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return tuple(codes[pid] for pid in pids), hung
