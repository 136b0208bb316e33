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

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
RECENT_STEPS = 50
"""Number of latest steps whose median time predicts the time of a step."""
LIMIT_IN_MEDIAN_STEPS = 10
"""Time that a step may take, as a multiple of the median time of recent steps."""
MIN_LIMIT_SECONDS = 60.0
"""Lowest limit for a step. A step that waits for a file system may take this long."""
UNTIMED_ACTIVITIES = ("starting", "resuming", "saving", "generation", "tasks", "ending")
"""Activities that may take as long as a collective, since step times do not predict them."""


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
_PHASE_ATTRIBUTE = "pipeline_phase"  # attribute of an exception


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

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Wrap a function, so that an exception that it raises is tagged."""

        @functools.wraps(function)
        def wrapper(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            try:
                return function(*arguments, **named)
            except BaseException as error:
                note_phase(error, self._phase)
                raise

        return wrapper


def note_phase(error: BaseException, phase: Phase) -> None:
    """Record on an exception the phase in which it was raised, unless a phase is recorded already."""
    error.__dict__.setdefault(_PHASE_ATTRIBUTE, phase)


def find_phase(errors: Sequence[BaseException]) -> Phase | None:
    """Return the recorded phase of the first exception that has one; `None` if none has.

    Args:
        errors: An exception, then the exceptions that were raised because of it.
    """
    for error in errors:
        if _PHASE_ATTRIBUTE in error.__dict__:
            phase: Phase = error.__dict__[_PHASE_ATTRIBUTE]
            return phase
    return None


class Activity(NamedTuple):
    """Activity of the training thread."""

    doing: str
    """Kind of activity; see Progress.start_activity."""
    step: int
    """Number of optimizer steps completed."""
    since: float
    """Start of the activity, in seconds of the clock of Progress."""


class Progress:
    """Records the current activity of the training thread.

    `start_activity` never waits for another thread. Other threads may read `activity` at any time.

    Args:
        clock: Clock that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._finished: set[str] = set()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.activity = Activity("starting", 0, clock())
        """Current activity. Each new activity is a new object."""

    def start_activity(self, doing: str, step: int | None = None) -> None:
        """End the previous activity and start the next one.

        Args:
            doing: `step`, `evaluation` (one activity for each batch), or one of UNTIMED_ACTIVITIES.
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

        The first activity of its kind may compile, so it may take as long as a collective.

        Args:
            limits: Section `distributed` of the recipe: `timeout_seconds` is the limit of a collective, and
                `hang_seconds` the limit of a step if it is not `None`.
        """
        doing = self.activity.doing
        if doing in UNTIMED_ACTIVITIES or doing not in self._finished:
            return limits.timeout_seconds
        if limits.hang_seconds is not None:
            return limits.hang_seconds
        recent = list(self._step_seconds)
        if not recent:
            return limits.timeout_seconds
        return max(MIN_LIMIT_SECONDS, LIMIT_IN_MEDIAN_STEPS * median(recent))
