"""What is normal of a noisy series that drifts, such as a loss, and from where on a value is a spike."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 128  # values that say what is normal
LEAST = 32  # of them, before anything is a spike
NEW_LEVEL = 16  # spikes in a row that are no spikes any more
FLOOR = 0.25  # of the first LEAST values' median: below, nothing is worth the word
TAIL = 0.95  # quantile that stands for the upper half: a hard source has a few batches in a hundred
GAUSSIAN_MIDDLE, GAUSSIAN_TAIL = 0.6745, 1.6449  # standard deviations there
TINY = sys.float_info.min
LOG_TINY = math.log(TINY)


@dataclass(frozen=True)
class Reach:
    """How far above the median a spike begins."""

    ratio: float
    """Times the median, and beyond that"""
    deviations: float
    """standard deviations of the logarithm."""


# From 10,000 steps of each shipped recipe, narrowed and with batches as small as run on a CPU. Beyond those
# deviations the farthest was 0.9 times the median of the loss, and 3.3 times that of the gradient norm
# (6.8 times the median, where a deviation was 9 %).
LOSS = Reach(1.3, 5.0)
GRADIENT_NORM = Reach(6.0, 8.0)


class Band:
    """Where the last values lie that were no spikes: their median, and how their logarithms scatter.

    Losses and gradient norms are positive, scatter in proportion to what they are, and have a long tail
    upwards. Scatter is taken about a straight line: a loss falls. Of what is mostly 0 or less nothing is a
    spike. A loss that fell to a hundredth scatters by factors of thousands, harmlessly: hence FLOOR.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._logs: deque[float] = deque(maxlen=WINDOW)
        self._refused = 0
        self._floor = 0.0
        self._limit = math.inf

    @property
    def limit(self) -> float:
        """Above it a value is a spike; inf until LEAST values were seen."""
        return self._limit

    @property
    def middle(self) -> float:
        """The median of what is normal; NaN before the first value."""
        return _median(np.sort(self._values)) if self._values else math.nan

    def is_spike(self, value: float) -> bool:
        """Whether the next value would be one."""
        return math.isfinite(value) and value > self._limit

    def add(self, value: float) -> bool:
        """Takes the next value, unless it is a spike or not finite.

        Returns:
            It is a spike. After NEW_LEVEL of them in a row the band starts anew: that is how things are now.
        """
        if not math.isfinite(value):
            return False
        if not self.is_spike(value):
            self._refused = 0
            self._take(value)
            self._settle()
            return False
        self._refused += 1
        if self._refused == NEW_LEVEL:
            self._values.clear()
            self._logs.clear()
            self._refused, self._limit = 0, math.inf
        return True

    def _take(self, value: float) -> None:
        self._values.append(value)
        self._logs.append(math.log(value) if value > TINY else LOG_TINY)

    def _settle(self) -> None:
        if len(self._values) < LEAST or (normal := self.middle) <= 0:
            self._limit = math.inf
            return
        if not self._floor:
            self._floor = FLOOR * normal
        above = math.log(self._reach.ratio) + self._reach.deviations * scatter(np.array(self._logs))
        self._limit = max(math.exp(min(math.log(max(normal, TINY)) + above, 700.0)), self._floor)

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps of it: plain numbers."""
        return {"values": list(self._values), "refused": [float(self._refused)], "floor": [self._floor]}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Goes on from there."""
        self._values.clear()
        self._logs.clear()
        for value in state["values"]:
            self._take(value)
        self._refused, self._floor = int(state["refused"][0]), float(state["floor"][0])
        self._settle()


def scatter(logs: NDArray[np.float64]) -> float:
    """Standard deviation about a straight line, or of the upper half where that is more.

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
    """Of each step of a run, where numpy's own takes several times as long."""
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)
