"""Of a run that ended without a word: whether the kernel killed a process of it for want of memory.

A run notes its processes when it starts; the kernel's log, or what they held last, says the rest.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.distributed.diagnosis import NEARLY_FULL, RankProcess
from pipeline.distributed.kernel_log import killed_for_memory
from pipeline.distributed.machine import machine_id, memory_now
from pipeline.durable import replace_text
from pipeline.foreign import CONFIGURATION, read_plain
from pipeline.units import GIB

PROCESSES = "logs/processes.json"


def note_processes(directory: Path, everyone: Sequence[RankProcess]) -> None:
    """The ranks of a run that starts, and what memory its machine has. Raises nothing.

    Args:
        everyone: Empty: this process is alone.
    """
    now, alone = memory_now(), RankProcess(0, platform.node(), os.getpid(), machine_id())
    noted = {
        "everyone": [asdict(each) for each in everyone or [alone]],
        "since": time.monotonic(),
        "limit": now.limit,
        "whose": "its cgroup allows" if now.by_cgroup else "the machine has",
    }
    with suppress(OSError):
        (directory / PROCESSES).parent.mkdir(exist_ok=True)
        replace_text(directory / PROCESSES, json.dumps(noted))


def why_killed(directory: Path, peak_gib: float) -> str:
    """Killed for memory, by whom that is known; empty: nothing says so.

    Args:
        peak_gib: That rank 0 had resident by the last row; 0: there is none.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        noted: dict[str, Any] = json.loads(read_plain(directory / PROCESSES, CONFIGURATION))
        everyone = [RankProcess(**each) for each in noted["everyone"]]
        limit, whose, here = noted["limit"] / GIB, noted["whose"], machine_id()
        by_kernel = killed_for_memory(noted["since"])
        for each in everyone:
            if each.machine == here and each.pid in by_kernel:
                held = f"{_ranks(everyone, each)} x {by_kernel[each.pid] / GIB:.1f} GiB"
                return f"the kernel killed {each} for memory: {held}, and {whose} {limit:.1f} GiB"
        first = everyone[0]
        if _number(everyone, first) * peak_gib > NEARLY_FULL * limit:
            held = f"{_ranks(everyone, first)} x {peak_gib:.1f} GiB"
            return f"most likely killed for memory: {held}, and {whose} {limit:.1f} GiB"
    return ""


def _number(everyone: Sequence[RankProcess], of: RankProcess) -> int:
    return sum(each.machine == of.machine for each in everyone)


def _ranks(everyone: Sequence[RankProcess], of: RankProcess) -> str:
    number = _number(everyone, of)
    return f"{number} rank{'s' * (number > 1)} there"
