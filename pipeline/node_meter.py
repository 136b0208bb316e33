"""What each machine of the job is busy with: processors, memory, network, and its GPUs."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence

import psutil

from pipeline.distributed.diagnosis import RankProcess

COLUMNS = ("cpu_utilization", "memory_utilization", "network_mib_per_second")


class NodeMeter:
    """Of this rank's machine; the row has each machine once, from the first of its ranks.

    Args:
        everyone: All ranks, in order; empty: this one is alone.
        clock: Monotonic seconds.
    """

    def __init__(self, everyone: Sequence[RankProcess], clock: Callable[[], float] = time.monotonic):
        ranks: dict[str, list[int]] = {}
        for each in everyone:
            ranks.setdefault(each.machine or each.host, []).append(each.rank)
        names = [everyone[on[0]].host for on in ranks.values()] or [platform.node()]
        if len(set(names)) < len(names):
            names = [f"{name}-{number}" for number, name in enumerate(names)]
        self._ranks = dict(zip(names, ranks.values() or [[0]], strict=True))
        self._clock = clock
        self._before = (-math.inf, 0.0)
        self.take()  # shares and rates count from here

    def take(self) -> list[float]:
        """Of COLUMNS, since the last call: shares of all cores and of the memory, MiB a second both ways,
        without what stays on the machine."""
        cards = [each for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        now = (self._clock(), sum(each.bytes_sent + each.bytes_recv for each in cards) / 2**20)
        seconds, moved = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        memory = psutil.virtual_memory().percent / 100
        return [psutil.cpu_percent() / 100, memory, moved / max(seconds, 1e-9)]

    def row(self, numbers: Sequence[Sequence[float]], gpus: Sequence[float] = ()) -> dict[str, float]:
        """Columns of a row.

        Args:
            numbers: For each of COLUMNS what every rank's `take` gave.
            gpus: Every rank's GPU's utilisation; NaN: not known.
        """
        row: dict[str, float] = {}
        for name, ranks in self._ranks.items():
            own = {key: of_ranks[ranks[0]] for key, of_ranks in zip(COLUMNS, numbers, strict=True)}
            if gpus:
                own["gpu_utilization"] = sum(gpus[rank] for rank in ranks) / len(ranks)
            row |= {f"node/{name}/{key}": each for key, each in own.items() if not math.isnan(each)}
        return row
