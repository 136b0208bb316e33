"""Records the current activity of the training thread, for the watchdog and for reports of failures."""

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
MIN_LIMIT_SECONDS = 60.0  # one step that waits for a file system may take this long
LIMIT_IN_STEPS = 10
# These activities may take as long as a collective may. They are rare, and step times do not predict them.
UNMEASURED = ("starting", "resuming", "saving", "ending")


class Phase(StrEnum):
    """Part of a run, in the words of an error message."""

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
"""Phases before the first batch is on the device."""
_PHASE = "pipeline_phase"


class tag_errors:
    """Tags each exception that leaves the block with a phase of the run.

    Use it in a `with` statement or as a decorator. If phases are nested, the exception carries the innermost
    one. Without an exception nothing is recorded.

    Args:
        phase: Phase that the block belongs to.
    """

    def __init__(self, phase: Phase):
        self._phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            note_phase(error, self._phase)

    def __call__(self, function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        """Return the function wrapped, so that each call tags its exception."""

        @functools.wraps(function)
        def wrapper(*arguments: Given.args, **named: Given.kwargs) -> Returned:
            try:
                return function(*arguments, **named)
            except BaseException as error:
                note_phase(error, self._phase)
                raise

        return wrapper


def note_phase(error: BaseException, left: Phase) -> None:
    """Record on an exception the phase that it leaves, unless one is recorded already."""
    error.__dict__.setdefault(_PHASE, left)


def find_phase(raised: Sequence[BaseException]) -> Phase | None:
    """Return the phase that an exception left; `None` if none was recorded.

    Args:
        raised: The exception, then the exceptions that were raised because of it.
    """
    return next((each.__dict__[_PHASE] for each in raised if _PHASE in each.__dict__), None)


class Activity(NamedTuple):
    """Activity of the training thread."""

    doing: str
    """Kind of activity; see Progress.start_activity."""
    step: int
    """Number of optimizer steps completed."""
    since: float
    """Start of the activity, in seconds of the clock."""


class Progress:
    """Records the current activity of the training thread.

    `start_activity` writes a few attributes and never waits, so other threads may read `activity`.

    Args:
        clock: Clock that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._finished: set[str] = set()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.activity = Activity("starting", 0, clock())

    def start_activity(self, doing: str, step: int | None = None) -> None:
        """End the previous activity and start the next one.

        Args:
            doing: `step`, `evaluation` (each batch), or one of UNMEASURED.
            step: Number of optimizer steps completed; `None` if it has not changed.
        """
        previous = self.activity
        now = self._clock()
        if previous.doing == "step":
            self._step_seconds.append(now - previous.since)
        self._finished.add(previous.doing)
        self.activity = Activity(doing, previous.step if step is None else step, now)

    def limit(self, limits: DistributedConfig) -> float:
        """Return the number of seconds that the current activity may take.

        The first activity of its kind may compile, so it may take as long as a collective: `timeout_seconds`.
        """
        doing = self.activity.doing
        if doing in UNMEASURED or doing not in self._finished:
            return limits.timeout_seconds
        if limits.hang_seconds is not None:
            return limits.hang_seconds
        recent = list(self._step_seconds)
        if not recent:
            return limits.timeout_seconds
        return max(MIN_LIMIT_SECONDS, LIMIT_IN_STEPS * median(recent))
