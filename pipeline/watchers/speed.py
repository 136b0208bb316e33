"""Whether training waits for its data, and whether its steps have become slower than they were."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median, median_low
from typing import Any

from pipeline.events import Event
from pipeline.watchers import Seen

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
