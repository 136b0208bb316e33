"""What the training thread is doing: written by it in passing, read by the watchdog."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from pipeline.config.schema import DistributedConfig

RECENT_STEPS = 50
LEAST_LIMIT = 60.0  # seconds: a step that waits for a file system may take that long
LIMIT_IN_STEPS = 10
# What may take as long as a collective may: it is done seldom, and its length says nothing of a step's.
UNMEASURED = ("starting", "resuming", "saving", "ending")


class Activity(NamedTuple):
    """What, at which step, since when (monotonic seconds)."""

    doing: str
    step: int
    since: float


class Progress:
    """Says what is done now. `at` costs a few attribute writes; nothing waits for a device or a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._finished: set[str] = set()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self.activity = Activity("starting", 0, clock())

    def at(self, doing: str, step: int | None = None) -> None:
        """Marks progress: the thing before is done, this one begins.

        Args:
            doing: `step`, `evaluation` (each batch), or one of UNMEASURED.
            step: Optimizer steps done; None: as before.
        """
        before, now = self.activity, self._clock()
        if before.doing == "step":
            self._steps.append(now - before.since)
        self._finished.add(before.doing)
        self.activity = Activity(doing, before.step if step is None else step, now)

    def limit(self, limits: DistributedConfig) -> float:
        """Seconds that what is done now may take. The first of its kind may compile: it has the timeout."""
        doing = self.activity.doing
        if doing in UNMEASURED or doing not in self._finished:
            return limits.timeout_seconds
        if limits.hang_seconds is not None:
            return limits.hang_seconds
        steps = list(self._steps)
        return max(LEAST_LIMIT, LIMIT_IN_STEPS * median(steps)) if steps else limits.timeout_seconds
