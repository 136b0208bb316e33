"""Memory that grows and grows, on a device or of a process."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from pipeline.events import Event
from pipeline.watchers import Seen

# Rows of a window at first; windows double in length as the run goes on, so that slow leaks are seen too.
ROWS = 16
WINDOWS = 8  # in a row, each above the one before
MOST_WINDOWS = 20
LEAST_GROWTH = 0.1  # of what there was
LEAST_GIB = 0.25
STEADY = 0.75  # of the average growth of a window, that the least one has: what settles grows less and less
TOLD = {
    "device": (
        "the device's memory",
        "look for tensors that are kept with their graph (a loss added up without .detach() or .item(), "
        "hooks, lists), and for samples that grow longer",
    ),
    "host": (
        "the process's memory",
        "look for lists and caches that grow in the data set, in hooks and in an objective of your own; keep "
        "what must stay in files or arrays",
    ),
}


class MemoryGrowth:
    """Tells once of each kind of memory that the same rank takes more and more of. A run that goes on begins
    anew: its processes do.

    Args:
        least_gib: Growth that is worth a line.
    """

    def __init__(self, least_gib: float = LEAST_GIB) -> None:
        self._least = least_gib
        self._series: dict[tuple[str, int], _Windows] = {}
        self._told: set[str] = set()

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        found: Event | None = None
        for kind in TOLD.keys() & seen.own.keys() - self._told:
            for rank, gib in enumerate(seen.own[kind]):
                windows = self._series.setdefault((kind, rank), _Windows())
                if windows.add(gib, step) and found is None and (grown := windows.growth(self._least)):
                    self._told.add(kind)
                    found = self._event(kind, rank, *grown)
        return found

    def _event(self, kind: str, rank: int, before: float, now: float, since: int) -> Event:
        what, advice = TOLD[kind]
        return Event(
            "memory_growth",
            f"{what} of rank {rank} grows: {before:.2f} GiB at step {since}, {now:.2f} GiB now",
            advice,
            fields={"rank": rank, "kind": kind, "gib_before": before, "gib": now},
        )


class _Windows:
    """Medians of windows of equal length."""

    def __init__(self) -> None:
        self._rows = ROWS
        self._open: list[float] = []
        self._medians: list[float] = []
        self._ends: list[int] = []

    def add(self, value: float, step: int) -> bool:
        """Whether a window is full now."""
        self._open.append(value)
        if len(self._open) < self._rows:
            return False
        if len(self._medians) == MOST_WINDOWS:
            self._medians = [
                (a + b) / 2 for a, b in zip(self._medians[::2], self._medians[1::2], strict=True)
            ]
            self._ends = self._ends[1::2]
            self._rows *= 2
            return False
        self._medians.append(median(self._open))
        self._ends.append(step)
        self._open = []
        return True

    def growth(self, least: float) -> tuple[float, float, int] | None:
        """(before, now, step of before) where the last windows grew steadily; the first is none of them."""
        last, ends = self._medians[1:][-WINDOWS:], self._ends[1:][-WINDOWS:]
        if len(last) < WINDOWS:
            return None
        rises = [b - a for a, b in pairwise(last)]
        grown = last[-1] - last[0]
        is_much = grown > max(least, LEAST_GROWTH * last[0])
        is_steady = min(rises) > STEADY * grown / len(rises)
        return (last[0], last[-1], ends[0]) if is_much and is_steady else None
