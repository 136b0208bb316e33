"""Which processes the kernel says it killed for want of memory, where its log may be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

LOG = Path("/dev/kmsg")
_KILLED = re.compile(
    r"Killed process (\d+) \(.*\).* anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
_WRITTEN = re.compile(r"\d+,\d+,(\d+),")  # priority, number, microseconds since the machine started
INEXACT = 1.0  # seconds by which the two clocks may differ
_RECORD = 8192  # bytes; the kernel's records are smaller


def killed_for_memory(since: float, path: Path = LOG) -> dict[int, int]:
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
        while text := _next(log):
            written = _WRITTEN.match(text)
            if written is None or int(written[1]) / 1e6 < since - INEXACT:
                continue
            for pid, *parts in _KILLED.findall(text):
                found[int(pid)] = sum(int(part or 0) for part in parts) * 1024
    finally:
        os.close(log)
    return found


def _next(log: int) -> str:
    """The next record; empty: there is none yet."""
    while True:
        try:
            return os.read(log, _RECORD).decode(errors="replace")
        except BrokenPipeError:  # what stood here was overwritten meanwhile: the next is read
            continue
        except OSError:
            return ""
