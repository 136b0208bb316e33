"""What the ranks of a run hold on a machine, looked at beside them, and whether the kernel killed some."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from pipeline.distributed.diagnosis import ADVICE, NEARLY_FULL
from pipeline.distributed.machine import killed_for_memory, kills, memory_now
from pipeline.files import GIB

SEARCH = 10  # looks between two searches for new ranks, which read all of /proc


class RanksMemory:
    """From the start of a run to its end.

    Args:
        find: Looks for the ranks that are there.
    """

    def __init__(self, find: Callable[[], Sequence[psutil.Process]]):
        self._find = find
        self._kills, self._since = kills(), time.monotonic()
        self._ranks: list[psutil.Process] = []
        self._resident: dict[int, int] = {}
        self._looks = 0

    def look(self) -> None:
        """About once a second. Until ranks are found, each look is a search."""
        if not self._ranks or self._looks % SEARCH == 0:
            self._ranks = list(self._find()) or self._ranks
        self._looks += 1
        for process in self._ranks:
            with suppress(psutil.Error):
                resident = process.memory_info().rss
                self._resident[process.pid] = max(resident, self._resident.get(process.pid, 0))

    def told(self) -> dict[str, Any]:
        """For the launch script: see `describe`."""
        by_kernel = {
            pid: held for pid, held in killed_for_memory(self._since).items() if pid in self._resident
        }
        now = memory_now()
        return {
            "kills": max(len(by_kernel), kills() - self._kills),
            "ranks": len(self._resident),
            "resident": max([*self._resident.values(), *by_kernel.values()], default=0),
            "limit": now.limit,
            "by_cgroup": now.by_cgroup,
        }


def describe(told: Mapping[str, Any], is_silent: bool) -> str | None:
    """Why ranks ended without a word: killed for memory; None: nothing says so.

    Args:
        told: Of a machine, by its guard; empty where that is gone too.
        is_silent: One of its own ranks may have.
    """
    if not told:
        return None
    ranks, resident, limit = told["ranks"], told["resident"], told["limit"]
    if not told["kills"] and not (is_silent and ranks * resident > NEARLY_FULL * limit):
        return None
    how = "killed for memory" if told["kills"] else "most likely killed for memory"
    whose = "its cgroup allows" if told["by_cgroup"] else "the machine has"
    against = f"{ranks} rank{'s' * (ranks > 1)} x {resident / GIB:.1f} GiB, and {whose} {limit / GIB:.1f} GiB"
    return f"{how}: {against}; {ADVICE}, or start fewer ranks there"
