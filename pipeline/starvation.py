"""Whether training waits for its data."""

from __future__ import annotations

# What the wait for data must be before a run is told of it: share of the step, seconds a step (a worker
# process would take as long to hand a batch over), and the steps it is measured over.
STARVATION_SHARE = 0.1
STARVATION_SECONDS = 1e-3
STARVATION_STEPS = 10


class Starvation:
    """Says once in a run that the step waits for data, and what to change."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._is_started = False
        self._is_told = False
        self._steps = 0
        self._data = self._seconds = 0.0

    def look(self, steps: int, data_seconds: float, seconds: float) -> str | None:
        """The warning, after an interval of the log; intervals are put together to ten steps or more."""
        if not self._is_started:  # the first one is the start of the workers, and the compiler's
            self._is_started = True
            return None
        self._steps += steps
        self._data += data_seconds
        self._seconds += seconds
        if self._steps < STARVATION_STEPS or self._is_told:
            return None
        share, wait = self._data / self._seconds, self._data / self._steps
        step = self._seconds / self._steps
        self._steps, self._data, self._seconds = 0, 0.0, 0.0
        if share <= STARVATION_SHARE or wait < STARVATION_SECONDS:
            return None
        self._is_told = True
        return (
            f"waiting for data is {share:.0%} of the step ({1000 * wait:.0f} of {1000 * step:.0f} ms); have "
            f"more processes read it: loader.num_workers={max(2, 2 * self._num_workers)}"
        )
