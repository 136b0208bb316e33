"""Alerts about time and memory: waiting for data, steps that became slower, slow ranks, growing memory.

All are judged over several windows in a row. Ranks that do the same are compared with each other; a pipeline
stage without a second rank is compared with what it took before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import Any

from pipeline.distributed.diagnosis import RankProcess
from pipeline.monitoring.alerts import CROWDED, Seen
from pipeline.monitoring.events import Event

# What the wait for data must be before a run is told of it: share of the step, seconds a step (a worker
# process would take as long to hand a batch over), in each of some windows in a row. In shipped recipes on
# two busy cores single windows came to 0.16, the least of three in a row never above 0.05.
STARVATION_SHARE = 0.1
STARVATION_SECONDS = 1e-3
STARVATION_STEPS = 10
STARVED_WINDOWS = 3

# Steps and seconds of a window, and how many windows in a row are slower than the fastest by the factor.
# Other processes on a machine take a minute of it now and then, and give it back.
WINDOW_STEPS, WINDOW_SECONDS = 20, 30.0
SLOW_WINDOWS = 4
DROP = 1.5
COMPARED_STEPS = 8  # at least, that ranks are compared over
SUSPECTED = 16  # steps in a row in which the same rank must have been slow: one that was disturbed is not
# Seconds of them: steps of a small model are some milliseconds, and a rank whose core another process takes
# for a moment is slow in dozens of them. In 10,000 steps of digits_cnn.yaml beside other work, 2.5 processes
# a core, one was for up to 0.8 s, and at ZeRO 3, with 5 or more a core, for up to 6 s: grows by the square.
SUSPECTED_SECONDS = 0.3
LEAST_SHARE = 0.05  # of the step that is lost by waiting for it: below, it is not worth a line
SHARE_IN_A_CROWD = 0.25  # at the least, where ranks share their cores with other processes
MOST_PAST, LEAST_PAST = (
    16,
    2,
)  # windows of COMPARED_STEPS that say what a stage took before: at the most, at the least
PHASES = {
    "data": "reading data takes",
    "forward": "the forward takes",
    "backward": "the backward takes",
}
_COMPUTING = (
    "look for other processes on its device and cores, for its clocks and temperature (nvidia-smi), and at "
    "the lengths of its samples"
)
PHASE_ADVICE = {
    "data": "look at the disk and the processes that this machine reads from, or raise loader.num_workers",
    "forward": _COMPUTING,
    "backward": _COMPUTING,
}
Own = Mapping[str, Sequence[float]]
"""Seconds a step by phase, of every rank."""
# Rows of a window at first; windows double in length as the run goes on, so that slow leaks are seen too.
MEMORY_ROWS = 16
MEMORY_WINDOWS = 8  # in a row, each above the one before
MOST_MEMORY_WINDOWS = 20
LEAST_GROWTH = 0.1  # of what there was
LEAST_GIB = 0.25
STEADY_GROWTH = (
    0.75  # of the average growth of a window, that the least one has: what settles grows less and less
)
MEMORY_KINDS = {
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


class DataStarvation:
    """Says once in a process that the step waits for data, and what to change. One that goes on begins anew:
    its disks, caches and workers are others.

    Args:
        num_workers: Processes that read data for one rank.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._is_started = False
        self._is_told = False
        self._steps = self._windows = 0
        self._data = self._seconds = 0.0

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher. Rows are put together to windows; of several ranks the median one counts."""
        if self._is_told or "data" not in seen.own:
            return None
        if not self._is_started:  # the first row is the start of the workers, and the compiler's
            self._is_started = True
            return None
        self._steps += seen.steps
        self._data += seen.steps * median_low(seen.own["data"])
        self._seconds += seen.steps * max(seen.own["step"])
        if self._steps < STARVATION_STEPS:
            return None
        share, wait = self._data / self._seconds, self._data / self._steps
        whole = self._seconds / self._steps
        self._steps, self._data, self._seconds = 0, 0.0, 0.0
        is_starved = share > STARVATION_SHARE and wait >= STARVATION_SECONDS and not seen.is_crowded
        self._windows = self._windows + 1 if is_starved else 0
        if self._windows < STARVED_WINDOWS:
            return None
        self._is_told = True
        return Event(
            "data_starvation",
            f"waiting for data is {share:.0%} of the step ({1000 * wait:.0f} of {1000 * whole:.0f} ms)",
            f"have more processes read it: loader.num_workers={max(2, 2 * self._num_workers)}",
            fields={"share": share, "seconds": wait},
        )


class ThroughputDrop:
    """Tells of steps that take much longer than they took before, for minutes; again after they recovered.

    A run that goes on in the same place is held to what its steps took before; anywhere else that says
    nothing, and it begins anew.

    Args:
        place: In words, what a step's time depends on besides the recipe: split, ranks, machines, devices.
    """

    name = "throughput_drop"

    def __init__(self, place: str = "") -> None:
        self._place = place
        self._is_started = False
        self._times: list[float] = []
        self._waits: list[float] = []
        self._steps, self._seconds = 0, 0.0
        self._fast: tuple[float, float] | None = None
        self._slow = 0
        self._is_told = False

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher. Rows are put together to windows, of which the median row counts."""
        if "step" not in seen.own:
            return None
        if not self._is_started:
            self._is_started = True
            return None
        self._times.append(max(seen.own["step"]))
        self._waits.append(max(seen.own["data"]))
        self._steps += seen.steps
        self._seconds += seen.steps * self._times[-1]
        if self._steps < WINDOW_STEPS or self._seconds < WINDOW_SECONDS:
            return None
        now, waits = median(self._times), median(self._waits)
        self._times, self._waits, self._steps, self._seconds = [], [], 0, 0.0
        if self._fast is None or now < self._fast[0]:
            self._fast = (now, waits)
        is_slow = now > DROP * self._fast[0] and not seen.is_crowded
        self._slow = self._slow + 1 if is_slow else 0
        self._is_told &= is_slow
        if self._is_told or self._slow < SLOW_WINDOWS:
            return None
        self._is_told = True
        return self._event(now, waits, *self._fast)

    def _event(self, now: float, waits: float, fast: float, waited: float) -> Event:
        is_data = waits - waited > (now - fast) / 2
        return Event(
            self.name,
            f"steps take {now / fast:.1f} times as long as they did ({1000 * now:.0f} ms, before "
            f"{1000 * fast:.0f} ms)" + (", most of it waiting for data" if is_data else ""),
            "look at the disk that data is read from, and raise loader.num_workers"
            if is_data
            else "look for other processes on these machines, for clocks and temperature (nvidia-smi), for a "
            "slow rank (perf/slowest_rank) and for memory that is short (memory/alloc_retries)",
            fields={"seconds": now, "seconds_before": fast},
        )

    def state_dict(self) -> dict[str, Any]:
        """See Remembers. The open window is left out: a process's first row is not like the others."""
        return {"place": self._place, "fast": self._fast, "slow": self._slow, "is_told": self._is_told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Remembers."""
        if state["place"] != self._place or state["fast"] is None:
            return
        seconds, waits = state["fast"]
        self._fast = (float(seconds), float(waits))
        self._slow, self._is_told = int(state["slow"]), bool(state["is_told"])


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
        """See Watcher. Rows are put together to COMPARED_STEPS steps or more."""
        own = {phase: each for phase, each in seen.own.items() if phase in PHASES}
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
        return self._judged() if self._steps >= COMPARED_STEPS else None

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
            f"{self._everyone[slow.rank]} is slow: {PHASES[slow.phase]} it {1000 * slow.seconds:.0f} ms a "
            f"step and {slow.compared} {1000 * slow.normal:.0f} ms; the others wait for it in "
            f"{1000 * late:.0f} of every {1000 * step_seconds:.0f} ms",
            PHASE_ADVICE[slow.phase],
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
        self._windows: deque[Own] = deque(maxlen=MOST_PAST)

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


class MemoryGrowth:
    """Tells once of each kind of memory that the same rank takes more and more of. A run that goes on begins
    anew: its processes do.

    Args:
        least_gib: Growth that is worth a line.
    """

    def __init__(self, least_gib: float = LEAST_GIB) -> None:
        self._least = least_gib
        self._series: dict[tuple[str, int], _MemoryWindows] = {}
        self._told: set[str] = set()

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        found: Event | None = None
        for kind in MEMORY_KINDS.keys() & seen.own.keys() - self._told:
            for rank, gib in enumerate(seen.own[kind]):
                windows = self._series.setdefault((kind, rank), _MemoryWindows())
                if windows.add(gib, step) and found is None and (grown := windows.growth(self._least)):
                    self._told.add(kind)
                    found = self._event(kind, rank, *grown)
        return found

    def _event(self, kind: str, rank: int, before: float, now: float, since: int) -> Event:
        what, advice = MEMORY_KINDS[kind]
        return Event(
            "memory_growth",
            f"{what} of rank {rank} grows: {before:.2f} GiB at step {since}, {now:.2f} GiB now",
            advice,
            fields={"rank": rank, "kind": kind, "gib_before": before, "gib": now},
        )


class _MemoryWindows:
    """Medians of windows of equal length."""

    def __init__(self) -> None:
        self._rows = MEMORY_ROWS
        self._open: list[float] = []
        self._medians: list[float] = []
        self._ends: list[int] = []

    def add(self, value: float, step: int) -> bool:
        """Whether a window is full now."""
        self._open.append(value)
        if len(self._open) < self._rows:
            return False
        if len(self._medians) == MOST_MEMORY_WINDOWS:
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
        last, ends = self._medians[1:][-MEMORY_WINDOWS:], self._ends[1:][-MEMORY_WINDOWS:]
        if len(last) < MEMORY_WINDOWS:
            return None
        rises = [b - a for a, b in pairwise(last)]
        grown = last[-1] - last[0]
        is_much = grown > max(least, LEAST_GROWTH * last[0])
        is_steady = min(rises) > STEADY_GROWTH * grown / len(rises)
        return (last[0], last[-1], ends[0]) if is_much and is_steady else None
