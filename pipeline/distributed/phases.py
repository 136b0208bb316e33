"""Assigns each second of a run to a phase on one timeline, so that the phases add up to the wall time.

On a GPU a CUDA event marks each change of phase. The host does not synchronize with the device until the
seconds are read. A phase ends where the next one begins, so communication of DDP and ZeRO that overlaps the
backward counts as backward. Separating the two would take events on the streams of the collectives.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.distributed.progress import Phase, note_phase

OTHER = "other"
"""Phase of the parts of a step that have no phase of their own."""
OTHER_OUTSIDE_STEPS = "aside"
"""Phase of work that belongs to no step and has no phase of its own."""
PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "checkpoint",
    "evaluation",
    "generation",
    OTHER,
)
"""Phases that have a column in the rows of a run, in the order of the columns."""
COUNTED_AS = {"routing": "forward", OTHER_OUTSIDE_STEPS: OTHER}
"""Phase without a column -> the phase that it counts as. `routing` is an objective's `prepare_step`."""
ERROR_PHASES = {"backward": Phase.BACKWARD, "optimizer": Phase.STEP}
"""Phase in which an exception is raised -> the phase that it is tagged with; see progress.note_phase."""
PHASES_OUTSIDE_STEPS = ("checkpoint", "evaluation", "generation", OTHER_OUTSIDE_STEPS)
"""Phases that are no part of a step."""
MAX_MARKS = 1024
"""Number of marks from which a segment adds up the phases that the device has finished, to save memory."""


Moment = Any
"""Point on the timeline: seconds of the host's clock or, on a GPU, an event that the device records."""


def moment_now(clock: Callable[[], float], on_gpu: bool) -> Moment:
    """Return the current moment, without synchronizing with the device."""
    if not on_gpu:
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(earlier: Moment, later: Moment) -> float:
    """Return the seconds between two moments. On a GPU, wait until the device has reached the later one."""
    if isinstance(earlier, int | float):
        return float(later - earlier)
    if not later.query():
        later.synchronize()
    return float(earlier.elapsed_time(later) / 1000)


class TimelineSegment:
    """Seconds by phase of one segment of the timeline: the time between two calls of Phases.pop_segment."""

    def __init__(self, totals: dict[str, float], on_gpu: bool):
        """Begin a segment.

        Args:
            totals: Seconds by phase of all segments, to which this one adds its own.
            on_gpu: Whether the marks are CUDA events, which the device reaches later than the host.
        """
        self.marks: deque[tuple[str, Moment]] = deque()
        """Phases with the moments at which they began, in order; the last phase has not ended."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._totals = totals
        self._on_gpu = on_gpu

    def add_ended_phases(self, synchronize: bool) -> bool:
        """Add the seconds of the phases that have ended to the sums.

        Args:
            synchronize: Whether to wait until the device has reached the end of all of them.

        Returns:
            Whether all of them have ended.
        """
        while len(self.marks) > 1:
            ended = self.marks[1][1]
            if self._on_gpu and not synchronize and not ended.query():
                return False  # the device has not reached the end of this phase
            phase, began = self.marks.popleft()
            seconds = seconds_between(began, ended) if self._on_gpu else ended - began
            self._seconds[phase] += seconds
            self._totals[phase] += seconds
        return True

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds by phase, after waiting until the device has finished the segment."""
        if len(self.marks) > 1:
            self.add_ended_phases(synchronize=True)
        return self._seconds


class Phases:
    """Timeline of a run, which begins when the object is created.

    Time outside of all phases counts as `other`.

    Args:
        clock: Clock that returns seconds.
        device: Device of the run. For CUDA the device's time is measured, else the host's.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock = clock
        self._on_gpu = device.type == "cuda"
        self._totals: dict[str, float] = defaultdict(float)
        self._unread: list[TimelineSegment] = []
        self._phase = OTHER
        self._listener: Callable[[str], None] | None = None
        self._start_segment()

    def _start_segment(self) -> None:
        """Begin a segment in the current phase, and record its start as `began`."""
        self.began: Moment = self.now() if self._on_gpu else self._clock()
        """Start of the current segment."""
        self._segment = TimelineSegment(self._totals, self._on_gpu)
        self._segment.marks.append((self._phase, self.began))

    def now(self) -> Moment:
        """Return the current moment, without synchronizing with the device."""
        return moment_now(self._clock, self._on_gpu)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure the block as a phase, and tag its exceptions if the phase is one of ERROR_PHASES.

        A nested phase interrupts the outer one. Inside a phase of PHASES_OUTSIDE_STEPS, nested phases count
        as that phase.
        """
        outer = self._phase
        if outer in PHASES_OUTSIDE_STEPS:
            yield
            return
        self._switch(phase)
        try:
            yield
        except BaseException as error:
            if phase in ERROR_PHASES:
                note_phase(error, ERROR_PHASES[phase])
            raise
        finally:
            self._switch(outer)

    @contextmanager
    def notify_phase_ends(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Call `listener` with the name of each phase that ends or is interrupted in the block."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _switch(self, phase: str) -> None:
        """End the current phase and begin the next one."""
        if self._listener is not None:
            self._listener(self._phase)
        self._phase = phase
        marks = self._segment.marks
        # On a CPU the clock is called directly, since this runs several times a step.
        marks.append((phase, self.now() if self._on_gpu else self._clock()))
        if len(marks) > MAX_MARKS:
            self._segment.add_ended_phases(synchronize=False)

    def pop_segment(self) -> TimelineSegment:
        """Return the segment since the previous call, and begin the next one."""
        ended = self._segment
        self._start_segment()
        ended.marks.append((self._phase, self.began))
        segments = [*self._unread, ended]
        self._unread = [each for each in segments if not each.add_ended_phases(synchronize=False)]
        return ended

    def restart(self) -> None:
        """Discard all segments and totals, and begin a new segment."""
        self._unread = []
        self._totals = defaultdict(float)
        self._start_segment()

    def totals(self, synchronize: bool = False) -> Mapping[str, float]:
        """Return the seconds by phase since the start, up to the point that the device has reached.

        Args:
            synchronize: Whether to synchronize with the device first, so that no time is missing.
        """
        self._switch(self._phase)
        for each in (*self._unread, self._segment):
            each.add_ended_phases(synchronize)
        return self._totals


def format_columns(seconds: Mapping[str, float], *, communicates: bool) -> dict[str, float]:
    """Return the seconds of each column: phases without a column count as another phase.

    Args:
        seconds: Seconds by phase.
        communicates: Whether there are other ranks. If there are none, there is no column for communication,
            and the time of that phase counts as `other`.
    """
    columns = dict.fromkeys(PHASES, 0.0)
    for phase, spent in seconds.items():
        columns[COUNTED_AS.get(phase, phase)] += spent
    if not communicates:
        columns[OTHER] += columns.pop("communication")
    return columns
