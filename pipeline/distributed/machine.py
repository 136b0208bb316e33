"""Which machine this is, and what becomes of other processes on it, by /proc."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine_id() -> str:
    """The same for two processes that see each other's pids, whatever their host is called."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # not Linux: nobody can be looked at


def process_state(pid: int) -> str:
    """`gone` (dead, or waiting to be reaped), `stopped` (SIGSTOP, a debugger) or `there`."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, IndexError):
        return "there"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "there")
