"""Which rank the others wait for, from the time that each needs without waiting for any."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from pipeline.distributed.diagnosis import RankProcess

STEPS = 10  # at least, that a rank is judged by
LEAST_SHARE = 0.05  # of the step that is lost by waiting for it: below, it is not worth a line


class Stragglers:
    """Names a rank that is slower than the median rank, once.

    Args:
        everyone: All ranks, in order.
        share: By how much slower: 0.25 is a quarter.
    """

    def __init__(self, everyone: Sequence[RankProcess], share: float):
        self._everyone = everyone
        self._share = share
        self._is_started = False
        self._told: set[int] = set()
        self._restart()

    def _restart(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._own = [0.0] * len(self._everyone)

    def row(self, own: Sequence[float]) -> dict[str, float]:
        """Metrics, from the own seconds a step of every rank, in order."""
        slowest = max(range(len(own)), key=lambda rank: own[rank])
        return {
            "perf/own_time_seconds": median_low(own),
            "perf/slowest_rank": slowest,
            "perf/slowest_rank_own_time_seconds": own[slowest],
        }

    def look(self, steps: int, own: Sequence[float], step_seconds: float) -> str | None:
        """What to say after an interval of the log; intervals are put together to STEPS steps or more.

        Args:
            steps: Of the interval.
            own: Seconds a step, of every rank.
            step_seconds: Seconds a step, the same on all ranks.
        """
        if not self._is_started:  # the first interval is the compiler's, and the workers' start
            self._is_started = True
            return None
        self._steps += steps
        self._seconds += steps * step_seconds
        self._own = [total + steps * seconds for total, seconds in zip(self._own, own, strict=True)]
        if self._steps < STEPS:
            return None
        mine = [total / self._steps for total in self._own]
        step = self._seconds / self._steps
        self._restart()
        slowest, middle = max(range(len(mine)), key=lambda rank: mine[rank]), median_low(mine)
        lost = mine[slowest] - middle
        if lost <= self._share * middle or lost < LEAST_SHARE * step or slowest in self._told:
            return None
        self._told.add(slowest)
        return (
            f"{self._everyone[slowest]} is slow: reading data and the forward take it "
            f"{1000 * mine[slowest]:.0f} ms a step and the median rank {1000 * middle:.0f} ms; "
            f"the others wait for it in {1000 * lost:.0f} of every {1000 * step:.0f} ms"
        )
