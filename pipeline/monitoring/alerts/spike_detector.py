"""Detects spikes in a noisy series that drifts, such as a loss or a gradient norm."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 128  # values that say what is normal
RECENT = 32  # values whose differences say how the series scatters now
LOCAL = 5  # last values, whose median is the local level
LEAST = 19  # values before anything is a spike: step 20 is the first one checked
NEARLY = 0.05  # by so much less of the logarithm a value is as high as the first one
NEW_LEVEL = 16  # spikes in a row that are no spikes any more
FLOOR = 0.25  # of the first LEAST values' median: below, nothing is worth the word
RISES = 0.98  # quantile of harmless rises above the local level: hard sources have few batches
CORE = 0.8  # share of the differences that counts; outliers make the rest
# Of a normal value with standard deviation 1: the mean of that share of the differences of neighbours, and
# its quantile RISES.
GAUSSIAN_CORE, GAUSSIAN_RISE = 0.79, 2.054
GAUSSIAN_MIDDLE, GAUSSIAN_TAIL, TAIL = 0.6745, 1.6449, 0.95  # of `scatter`, standard deviations there
TINY = sys.float_info.min
LOG_TINY = math.log(TINY)


@dataclass(frozen=True)
class Reach:
    """How far above the local level a spike begins: by both of these."""

    ratio: float
    """Factor above the level."""
    deviations: float
    """Standard deviations of the logarithm above the level."""
    of_first: float
    """The same for a value that is as high as the first one of the run."""


# From runs without a fault on a CPU: shipped recipes, cyclic rates, tiny batches, noisy labels, preferences.
# tests/monitoring/alerts/test_spike_detector.py has their curves.
LOSS = Reach(1.5, 8.0, 5.5)
GRADIENT_NORM = Reach(6.0, 12.0, 12.0)


class SpikeDetector:
    """Detects spikes against the local level of a noisy series and the scatter of its logarithms about it.

    Losses and gradient norms are positive, scatter in proportion to their size, and have a long tail
    upwards. A loss that fell to a hundredth scatters by factors of thousands, harmlessly: hence FLOOR.
    A series with a negative value has no ratios, and no spikes.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._logs: deque[float] = deque(maxlen=WINDOW)
        self._refused = 0
        self._floor = 0.0
        self._first = 0.0
        self.limit = math.inf
        """Value above which there is a spike; inf until LEAST values were added."""

    @property
    def middle(self) -> float:
        """Median of the last normal values; NaN before the first value."""
        return _median(np.sort(list(self._values)[-LOCAL:])) if self._values else math.nan

    def add(self, value: float) -> bool:
        """Add the next value, unless it is a spike or not finite.

        Returns:
            Whether it is a spike. After NEW_LEVEL spikes in a row the detector starts anew from that level.
        """
        if not math.isfinite(value):
            return False
        if value <= self.limit:
            self._refused = 0
            if not self._values and not self._floor:
                self._first = value
            self._settle(value)
            return False
        self._refused += 1
        if self._refused == NEW_LEVEL:
            self._values.clear()
            self._logs.clear()
            self._refused, self.limit = 0, math.inf
        return True

    def _settle(self, *taken: float) -> None:
        """Take values, and set the limit of the next one."""
        self._values += taken
        self._logs += [math.log(value) if value > TINY else LOG_TINY for value in taken]
        self.limit = math.inf
        if len(self._values) < LEAST or min(self._values) < 0:
            return
        if not self._floor:
            self._floor = FLOOR * _median(np.sort(self._values))
        if not self._floor:
            return
        logs = np.array(self._logs)
        level = _median(np.sort(logs[-LOCAL:]))
        deviation = local_scatter(logs)
        least = math.log(self._reach.ratio)
        above = level + max(least, self._reach.deviations * deviation)
        if self._first > 0:
            high = level + max(least, self._reach.of_first * deviation)
            above = min(above, max(high, math.log(self._first) - NEARLY))
        self.limit = max(math.exp(min(above, 700.0)), self._floor)

    def state_dict(self) -> dict[str, list[float]]:
        """Return plain numbers for a checkpoint."""
        return {
            "values": list(self._values),
            "refused": [float(self._refused)],
            "floor": [self._floor],
            "first": [self._first],
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state of a checkpoint."""
        self._values.clear()
        self._logs.clear()
        self._refused, self._floor = int(state["refused"][0]), float(state["floor"][0])
        self._first = float(state.get("first", [0.0])[0])  # not in checkpoints of earlier versions
        self._settle(*state["values"])


def local_scatter(logs: NDArray[np.float64]) -> float:
    """Return the standard deviation about a level that falls or bends, or that of rises where it is more.

    Args:
        logs: (values,), at least LEAST, of positive values in order.
    """
    recent = logs[-RECENT:]
    steps = recent[1:] - recent[:-1]
    off = np.sort(np.abs(steps - _median(np.sort(steps))))
    core = off[: math.ceil(CORE * len(off))]
    levels = np.sort([logs[at : len(logs) - LOCAL + at] for at in range(LOCAL)], axis=0)[LOCAL // 2]
    rises = np.sort(logs[LOCAL:] - levels)
    rise = float(rises[min(int(RISES * len(rises)), len(rises) - 2)])  # one outlier says nothing
    return max(float(core.sum()) / (len(core) * GAUSSIAN_CORE), rise / GAUSSIAN_RISE)


def scatter(logs: NDArray[np.float64]) -> float:
    """Return the standard deviation about a straight line, or of the upper half where that is more.

    Args:
        logs: (values,), of positive values in order.
    """
    half = len(logs) // 2
    # A fall is no scatter.
    slope = (_median(np.sort(logs[-half:])) - _median(np.sort(logs[:half]))) / half
    level = np.sort(logs - slope * np.arange(len(logs)))
    middle = _median(level)
    deviation = _median(np.sort(np.abs(level - middle))) / GAUSSIAN_MIDDLE
    return max(deviation, (float(level[int(TAIL * len(level))]) - middle) / GAUSSIAN_TAIL)


def _median(ordered: NDArray[np.float64]) -> float:
    """Return the median of sorted values; numpy's own takes several times as long at every step."""
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)
