"""A loss that rises from the first steps on in place of falling, as where the rate is far too high."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from pipeline.band import scatter
from pipeline.events import Event
from pipeline.watchers import Seen

EVERY = 64  # steps: then it is looked at
WINDOW = 32  # of them, the last ones: what the loss is now, and how it scatters
EARLY = 40  # steps in which a jump is looked for
JUMP_STEPS, JUMP_COUNTS = 8, 6  # in a row, of which the lowest count: one bad batch is no jump
RISE = 1.2  # times what it began with: it is worse
JUMP, SAME = 1.05, 0.9  # times that: how high it jumped, where it has learned no more since than that
# And so many standard deviations of the logarithm above what it began with. Where there was an evaluation
# before the first step, that is known well; a first batch alone may be 3 too low. Of 40,000 made-up curves
# that scatter and do not fall 1 in 10,000 was told of, and of those with longer tails 1 in 1,000.
DEVIATIONS, DEVIATIONS_OF_A_BATCH = 1.5, 5.0


class LossRise:
    """Tells once that the loss is well above what it began with, or that it rose in the first steps, and is
    above that or has learned hardly anything since. One that hardly falls is not told of.

    It goes by each step's number, not by rows. A run that goes on has what it began with; one that is first
    watched later is told nothing.
    """

    name = "loss_rise"

    def __init__(self) -> None:
        self._first = self._evaluated = 0.0  # not known
        self._early: list[float] = []
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._is_told = False

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        if step == 0:
            self._evaluated = seen.row.get("eval/loss", 0.0)
        found = None
        for at, loss in enumerate(seen.losses, step - seen.steps + 1):
            if at == 1:
                self._first = loss
            if self._is_told or not self._first > 0 or not loss > 0 or math.isinf(loss):
                continue  # what is not positive is not compared by ratios
            self._recent.append(loss)
            if 1 < at <= EARLY:
                self._early.append(loss)
            if at % EVERY == 0 and len(self._recent) == WINDOW:
                found = self._judged(at) or found
        return found

    def _judged(self, step: int) -> Event | None:
        level, deviation = median(self._recent), scatter(np.log(self._recent))
        is_known = self._evaluated * math.exp(deviation) >= self._first
        began = max(self._first, self._evaluated)
        beyond = math.exp(deviation * (DEVIATIONS if is_known else DEVIATIONS_OF_A_BATCH))
        jump = _jump(self._early) if step == EVERY else 0.0
        least = JUMP if level > SAME * began else RISE
        has_jumped = jump > max(least, beyond) * began
        if not has_jumped and level <= max(RISE, beyond) * began:
            return None
        self._is_told = True
        jumped = f", after {jump:.4g} for {JUMP_STEPS} steps" if has_jumped else ""
        return Event(
            self.name,
            f"the loss rose: it began with {began:.4g}, and is {level:.4g} at step {step}{jumped}",
            "lower optimizer.learning_rate, raise schedule.warmup, or lower optimizer.max_grad_norm",
            fields={"at_step": step, "value": level, "began": began},
        )

    def state_dict(self) -> dict[str, Any]:
        """See Remembers."""
        return {
            "first": self._first,
            "evaluated": self._evaluated,
            "early": self._early,
            "recent": list(self._recent),
            "is_told": self._is_told,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Remembers."""
        self._first, self._evaluated = float(state["first"]), float(state["evaluated"])
        self._early, self._is_told = list(state["early"]), bool(state["is_told"])
        self._recent = deque(state["recent"], maxlen=WINDOW)


def _jump(losses: Sequence[float]) -> float:
    """The highest that some steps in a row were; 0: there are too few."""
    logs = [math.log(each) for each in losses]
    stretches = (sorted(logs[at : at + JUMP_STEPS]) for at in range(len(logs) - JUMP_STEPS + 1))
    return max((math.exp(fmean(each[:JUMP_COUNTS])) for each in stretches), default=0.0)
