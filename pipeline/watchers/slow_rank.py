"""Which rank the others wait for, from the time that each needs without waiting for any.

Ranks that do the same are compared with each other, and a pipeline stage that has no second rank with what it
took before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from pipeline.distributed.diagnosis import RankProcess
from pipeline.events import Event
from pipeline.watchers import CROWDED, Seen

STEPS = 8  # at least, that ranks are compared over
SUSPECTED = 16  # steps in a row in which the same rank must have been slow: one that was disturbed is not
# Seconds of them: steps of a small model are some milliseconds, and a rank whose core another process takes
# for a moment is slow in dozens of them. In 10,000 steps of digits_cnn.yaml beside other work, 2.5 processes
# a core, one was for up to 0.8 s, and at ZeRO 3, with 5 or more a core, for up to 6 s: grows by the square.
SUSPECTED_SECONDS = 0.3
LEAST_SHARE = 0.05  # of the step that is lost by waiting for it: below, it is not worth a line
SHARE_IN_A_CROWD = 0.25  # at the least, where ranks share their cores with other processes
PAST, LEAST_PAST = 16, 2  # windows of STEPS that say what a stage took before: at the most, at the least
TOLD = {
    "data": "reading data takes",
    "forward": "the forward takes",
    "backward": "the backward takes",
}
_COMPUTING = (
    "look for other processes on its device and cores, for its clocks and temperature (nvidia-smi), and at "
    "the lengths of its samples"
)
ADVICE = {
    "data": "look at the disk and the processes that this machine reads from, or raise loader.num_workers",
    "forward": _COMPUTING,
    "backward": _COMPUTING,
}

Own = Mapping[str, Sequence[float]]
"""Seconds a step by phase, of every rank."""


@dataclass(frozen=True)
class _Slow:
    """A rank, and the phase that it loses the most in. All are seconds a step."""

    rank: int
    phase: str
    seconds: float
    """Of that phase, and"""
    normal: float
    """what that would be if it were not slow."""
    lost: float
    """Of all its phases, and"""
    whole: float
    """what all of them would be."""
    compared: str
    """With what, in words that `normal` follows."""


class SlowRank:
    """Names a rank that takes longer in a phase than others that do the same, once for each phase.

    A run that goes on begins anew: its ranks may be on other machines.

    Phases are those that `Seen.own` has: reading data, and what a rank computes by itself.

    Args:
        everyone: All ranks, in order.
        share: By how much longer, of the phases together: 0.15 is 15 %.
        stages: Of the pipeline. Ranks of one stage follow each other, and do the same.
    """

    def __init__(self, everyone: Sequence[RankProcess], share: float, stages: int = 1):
        self._everyone = everyone
        self._share = share
        self._stages = stages
        self._past = _Past()
        self._is_started = False
        self._told: set[tuple[int, str]] = set()
        self._suspect: tuple[int, str] | None = None
        self._suspected, self._suspected_seconds = 0, 0.0
        self._restart()

    def _restart(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._load = 0.0
        self._own: dict[str, list[float]] = {}

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher. Rows are put together to STEPS steps or more."""
        own = {phase: each for phase, each in seen.own.items() if phase in TOLD}
        if not own or not seen.steps:
            return None
        self._load = max(self._load, seen.load)
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
        share, lasting = self._share, SUSPECTED_SECONDS * max(1.0, self._load) ** 2
        if self._load > CROWDED:
            share = max(share, SHARE_IN_A_CROWD)
        self._restart()
        slow = self._slow(own, step_seconds, share)
        suspect = (slow.rank, slow.phase) if slow is not None else None
        if suspect != self._suspect:
            self._suspected, self._suspected_seconds = 0, 0.0
        self._suspect = suspect
        self._suspected += steps
        self._suspected_seconds += steps * step_seconds
        lasts = self._suspected >= SUSPECTED and self._suspected_seconds >= lasting
        if slow is None or suspect is None or suspect in self._told or not lasts:
            return None
        self._told.add(suspect)
        return self._event(slow, step_seconds)

    def _event(self, slow: _Slow, step_seconds: float) -> Event:
        late = slow.seconds - slow.normal
        return Event(
            "slow_rank",
            f"{self._everyone[slow.rank]} is slow: {TOLD[slow.phase]} it {1000 * slow.seconds:.0f} ms a step "
            f"and {slow.compared} {1000 * slow.normal:.0f} ms; the others wait for it in {1000 * late:.0f} "
            f"of every {1000 * step_seconds:.0f} ms",
            ADVICE[slow.phase],
            fields={
                "rank": slow.rank,
                "phase": slow.phase,
                "seconds": slow.seconds,
                "median_seconds": slow.normal,
            },
        )

    def _slow(self, own: Own, step_seconds: float, share: float) -> _Slow | None:
        """The rank that the others wait for the longest."""
        found = [
            each
            for each in self._slowest(own)
            if each.lost > max(share * each.whole, LEAST_SHARE * step_seconds)
        ]
        if not found and self._stages == len(self._everyone):
            self._past.add(own)
        return max(found, key=lambda each: each.lost, default=None)

    def _slowest(self, own: Own) -> Iterator[_Slow]:
        """Of each comparison the slowest."""
        everyone = range(len(own["data"]))
        if self._stages == 1:
            yield _of_equals(own, everyone, "the median rank")
            return
        yield _of_equals({"data": own["data"]}, everyone, "the median rank")
        computed = {phase: each for phase, each in own.items() if phase != "data"}
        of_a_stage = len(everyone) // self._stages
        if not computed:
            return
        if of_a_stage > 1:
            for first in everyone[::of_a_stage]:
                peers = everyone[first : first + of_a_stage]
                yield _of_equals(computed, peers, "the median rank of its stage")
        elif (slow := self._past.slowest(computed)) is not None:
            yield slow


def _of_equals(own: Own, ranks: Sequence[int], compared: str) -> _Slow:
    """The slowest of ranks that do the same."""
    together = {rank: sum(each[rank] for each in own.values()) for rank in ranks}
    middle = median_low(together.values())
    rank = max(ranks, key=lambda rank: together[rank])
    normal = {phase: median_low(each[rank] for rank in ranks) for phase, each in own.items()}
    phase = max(own, key=lambda phase: own[phase][rank] - normal[phase])
    return _Slow(rank, phase, own[phase][rank], normal[phase], together[rank] - middle, middle, compared)


class _Past:
    """What each rank took before, in windows in which none was slow."""

    def __init__(self) -> None:
        self._windows: deque[Own] = deque(maxlen=PAST)

    def add(self, own: Own) -> None:
        """One more window."""
        self._windows.append(own)

    def slowest(self, own: Own) -> _Slow | None:
        """The rank that has become slower than the median rank has; None: not known yet."""
        if len(self._windows) < LEAST_PAST or not own:
            return None
        ranks = range(len(next(iter(own.values()))))
        was = {
            phase: [median(window[phase][rank] for window in self._windows) for rank in ranks]
            for phase in own
        }
        before = [sum(each[rank] for each in was.values()) for rank in ranks]
        now = [sum(each[rank] for each in own.values()) for rank in ranks]
        # Longer rows and a crowd make all ranks slower.
        of_all = max(1.0, median_low(a / b if b > 0 else 1.0 for a, b in zip(now, before, strict=True)))
        normal = {phase: [of_all * each for each in seconds] for phase, seconds in was.items()}
        rank = max(ranks, key=lambda rank: now[rank] - of_all * before[rank])
        phase = max(own, key=lambda phase: own[phase][rank] - normal[phase][rank])
        whole = of_all * before[rank]
        return _Slow(
            rank,
            phase,
            own[phase][rank],
            normal[phase][rank],
            now[rank] - whole,
            whole,
            "before that",
        )
