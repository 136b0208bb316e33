"""What of this process is in memory: now, and at the most since a moment. Imports no torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_PEAK = "5"  # proc(5), clear_refs: resets the mark of the peak, and touches nothing else


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
