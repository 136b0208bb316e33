"""Notes what the training thread is doing, for the watchdog and for the report of a failure."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from statistics import median
from typing import NamedTuple, ParamSpec, TypeVar

from pipeline.config.schema import DistributedConfig

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
RECENT_STEPS = 50
LEAST_LIMIT = 60.0  # seconds: a step that waits for a file system may take that long
LIMIT_IN_STEPS = 10
# What may take as long as a collective may: it is done seldom, and its length says nothing of a step's.
UNMEASURED = ("starting", "resuming", "saving", "ending")


class Phase(StrEnum):
    """Part of a run, in the words of a message."""

    EVALUATION = "in an evaluation"
    GENERATION = "while text is generated"
    SAVING = "in a save"
    RESUMING = "while a checkpoint is read"
    BACKWARD = "in the backward"
    STEP = "in the optimizer's step"
    FORWARD = "in the forward"
    WEIGHTS = "while weights are read"
    OPTIMIZER = "while the optimizer is made"
    MODEL = "while the model is built"
    DATA = "while data are read"


LOADING = {Phase.RESUMING, Phase.WEIGHTS, Phase.OPTIMIZER, Phase.MODEL, Phase.DATA}
"""Phases before there is anything of a batch on the device."""
_PHASE = "pipeline_phase"


class tag_errors:
    """Enters a phase of the run, in a `with` or as a decorator.

    An exception that leaves it carries the phase; of nested phases it carries the innermost one. If nothing
    fails, nothing is written.
    """

    def __init__(self, entered: Phase):
        self._phase = entered

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            note_phase(error, self._phase)

    def __call__(self, function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        """Return the function wrapped, so that each call enters the phase."""

        @functools.wraps(function)
        def inside(*arguments: Given.args, **named: Given.kwargs) -> Returned:
            try:
                return function(*arguments, **named)
            except BaseException as error:
                note_phase(error, self._phase)
                raise

        return inside


def note_phase(error: BaseException, left: Phase) -> None:
    """Note on an exception which phase it leaves. It keeps the first one."""
    error.__dict__.setdefault(_PHASE, left)


def find_phase(raised: Sequence[BaseException]) -> Phase | None:
    """Return the phase that an exception left; None if that has no name.

    Args:
        raised: The exception, then those that were raised because of it.
    """
    return next((each.__dict__[_PHASE] for each in raised if _PHASE in each.__dict__), None)


class Activity(NamedTuple):
    """An activity, its step, and since when (monotonic seconds)."""

    doing: str
    step: int
    since: float


class Progress:
    """Records the current activity of the training thread.

    `start_activity` writes a few attributes and never waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._finished: set[str] = set()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self.activity = Activity("starting", 0, clock())

    def start_activity(self, doing: str, step: int | None = None) -> None:
        """Note progress: the activity before is done, this one begins.

        Args:
            doing: `step`, `evaluation` (each batch), or one of UNMEASURED.
            step: Optimizer steps done; None for as before.
        """
        before, now = self.activity, self._clock()
        if before.doing == "step":
            self._steps.append(now - before.since)
        self._finished.add(before.doing)
        self.activity = Activity(doing, before.step if step is None else step, now)

    def limit(self, limits: DistributedConfig) -> float:
        """Return the seconds that this activity may take. The first of its kind may compile: the timeout."""
        doing = self.activity.doing
        if doing in UNMEASURED or doing not in self._finished:
            return limits.timeout_seconds
        if limits.hang_seconds is not None:
            return limits.hang_seconds
        steps = list(self._steps)
        return max(LEAST_LIMIT, LIMIT_IN_STEPS * median(steps)) if steps else limits.timeout_seconds
