"""Which rank the others wait for, from the time that each needs without waiting for any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from pipeline.distributed.diagnosis import RankProcess
from pipeline.events import Event
from pipeline.watchers import Seen

STEPS = 8  # at least, that ranks are compared over
SUSPECTED = 16  # steps in a row in which the same rank must have been slow: one that was disturbed is not
# Seconds of them: steps of a small model are some milliseconds, and a rank whose core another process takes
# for a moment is slow in dozens of them. In 10,000 steps of digits_cnn.yaml on two cores that five processes
# wanted each, it was for up to 0.6 s.
SUSPECTED_SECONDS, SUSPECTED_SECONDS_IN_A_CROWD = 0.3, 1.2
LEAST_SHARE = 0.05  # of the step that is lost by waiting for it: below, it is not worth a line
SHARE_IN_A_CROWD = 0.25  # at the least, where ranks share their cores with other processes
TOLD = {"data": "reading data takes", "forward": "the forward takes"}
ADVICE = {
    "data": "look at the disk and the processes that this machine reads from, or raise loader.num_workers",
    "forward": "look for other processes on its device and cores, for its clocks and temperature "
    "(nvidia-smi), and at the lengths of its samples",
}


class SlowRank:
    """Names a rank that takes longer in a phase than the median rank, once for each phase.

    A run that goes on begins anew: its ranks may be on other machines.

    Phases are those that `Seen.own` has: reading data, and the forward where no collective is in it.

    Args:
        everyone: All ranks, in order.
        share: By how much longer, of the median rank's phases together: 0.15 is 15 %.
    """

    def __init__(self, everyone: Sequence[RankProcess], share: float):
        self._everyone = everyone
        self._share = share
        self._is_started = False
        self._told: set[tuple[int, str]] = set()
        self._suspect: tuple[int, str] | None = None
        self._suspected, self._suspected_seconds = 0, 0.0
        self._restart()

    def _restart(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._is_crowded = False
        self._own: dict[str, list[float]] = {}

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher. Rows are put together to STEPS steps or more."""
        own = {phase: each for phase, each in seen.own.items() if phase in TOLD}
        if not own or not seen.steps:
            return None
        self._is_crowded |= seen.is_crowded
        if not self._is_started:  # the first steps are the compiler's, and the workers' start
            self._is_started = True
            return None
        self._steps += seen.steps
        self._seconds += seen.steps * max(seen.own["step"])
        for phase, each in own.items():
            before = self._own.get(phase, [0.0] * len(each))
            self._own[phase] = [a + seen.steps * b for a, b in zip(before, each, strict=True)]
        return self._judged() if self._steps >= STEPS else None

    def _judged(self) -> Event | None:
        steps, step_seconds = self._steps, self._seconds / self._steps
        own = {phase: [each / steps for each in seconds] for phase, seconds in self._own.items()}
        share, lasting = self._share, SUSPECTED_SECONDS
        if self._is_crowded:
            share, lasting = max(share, SHARE_IN_A_CROWD), SUSPECTED_SECONDS_IN_A_CROWD
        self._restart()
        suspect = self._slow(own, step_seconds, share)
        if suspect != self._suspect:
            self._suspected, self._suspected_seconds = 0, 0.0
        self._suspect = suspect
        self._suspected += steps
        self._suspected_seconds += steps * step_seconds
        lasts = self._suspected >= SUSPECTED and self._suspected_seconds >= lasting
        if suspect is None or suspect in self._told or not lasts:
            return None
        self._told.add(suspect)
        rank, phase = suspect
        mine, middle = own[phase][rank], median_low(own[phase])
        return Event(
            "slow_rank",
            f"{self._everyone[rank]} is slow: {TOLD[phase]} it {1000 * mine:.0f} ms a step and the median "
            f"rank {1000 * middle:.0f} ms; the others wait for it in {1000 * (mine - middle):.0f} of every "
            f"{1000 * step_seconds:.0f} ms",
            ADVICE[phase],
            fields={"rank": rank, "phase": phase, "seconds": mine, "median_seconds": middle},
        )

    def _slow(
        self, own: Mapping[str, Sequence[float]], step_seconds: float, share: float
    ) -> tuple[int, str] | None:
        """The rank, and the phase, that the others wait for the longest."""
        together = [sum(each) for each in zip(*own.values(), strict=True)]
        least = max(share * median_low(together), LEAST_SHARE * step_seconds)
        rank = max(range(len(together)), key=lambda rank: together[rank])
        lost = {phase: each[rank] - median_low(each) for phase, each in own.items()}
        phase = max(lost, key=lambda phase: lost[phase])
        return (rank, phase) if together[rank] - median_low(together) > least else None
