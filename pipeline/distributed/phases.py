"""Assigns each second of a run to a phase on one timeline, so that the phases add up to the wall time.

On a GPU a CUDA event marks each change of phase. The host does not wait for the device until the seconds are
read. A phase ends where the next one begins, so communication of DDP and ZeRO that overlaps the backward
counts as backward. Separating it would take events on the streams of the collectives.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.distributed.progress import Phase, note_phase

OTHER = "other"
ASIDE = "aside"
"""Phase of work that belongs to no step."""
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
COUNTED_AS = {"routing": "forward", ASIDE: OTHER}
"""Phases without a column, and the phase that each counts as. `routing` is an objective's `prepare_step`."""
ERROR_PHASES = {"backward": Phase.BACKWARD, "optimizer": Phase.STEP}
"""Phases of a step that an exception is tagged with; see progress.tag_errors."""
NO_STEP = ("checkpoint", "evaluation", "generation", ASIDE)
"""Phases that are no part of a step."""
MOST_MARKS = 1024
"""Number of marks that a segment keeps. Beyond it, phases that the device has finished are added up early."""


Moment = Any
"""Point on the timeline: seconds of the host's clock or, on a GPU, an event that the device records."""


def moment_now(clock: Callable[[], float], on_gpu: bool) -> Moment:
    """Return the current moment, without waiting for the device."""
    if not on_gpu:
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(earlier: Moment, later: Moment) -> float:
    """Return the seconds between two moments, after waiting until the device has reached the later one."""
    if isinstance(earlier, int | float):
        return float(later - earlier)
    if not later.query():
        later.synchronize()
    return float(earlier.elapsed_time(later) / 1000)


class TimelineSegment:
    """Seconds by phase of one segment of the timeline."""

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

    def add_ended_phases(self, waits: bool) -> bool:
        """Add the seconds of the phases that have ended to the sums.

        Args:
            waits: Whether to wait until the device has ended all of them.

        Returns:
            Whether all of them have ended.
        """
        while len(self.marks) > 1:
            ended = self.marks[1][1]
            if self._on_gpu and not waits and not ended.query():
                return False
            phase, began = self.marks.popleft()
            seconds = seconds_between(began, ended) if self._on_gpu else ended - began
            self._seconds[phase] += seconds
            self._totals[phase] += seconds
        return True

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds by phase, after waiting until the device has finished the segment."""
        if len(self.marks) > 1:
            self.add_ended_phases(waits=True)
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
        self.began = self.now() if self._on_gpu else self._clock()
        self._segment = TimelineSegment(self._totals, self._on_gpu)
        self._segment.marks.append((self._phase, self.began))

    def now(self) -> Moment:
        """Return the current moment, without waiting for the device."""
        return moment_now(self._clock, self._on_gpu)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure the block as a phase, and tag its exceptions if the phase is one of ERROR_PHASES.

        A nested phase interrupts the outer one. Inside of a phase of NO_STEP nothing is measured separately.
        """
        outer = self._phase
        if outer in NO_STEP:
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
        """Call `listener` with the name of each phase that ends in the block."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _switch(self, phase: str) -> None:
        if self._listener is not None:
            self._listener(self._phase)
        self._phase = phase
        marks = self._segment.marks
        marks.append((phase, self.now() if self._on_gpu else self._clock()))
        if len(marks) > MOST_MARKS:
            self._segment.add_ended_phases(waits=False)

    def pop_segment(self) -> TimelineSegment:
        """Return the segment since the previous call, and begin the next one."""
        ended = self._segment
        self._start_segment()
        ended.marks.append((self._phase, self.began))
        self._unread = [each for each in (*self._unread, ended) if not each.add_ended_phases(waits=False)]
        return ended

    def restart(self) -> None:
        """Discard all segments and totals, and begin a new segment."""
        self._unread = []
        self._totals = defaultdict(float)
        self._start_segment()

    def totals(self, waits: bool = False) -> Mapping[str, float]:
        """Return the seconds by phase since the start, up to the point that the device has reached.

        Args:
            waits: Whether to wait for the device, so that nothing is missing.
        """
        self._switch(self._phase)
        for each in (*self._unread, self._segment):
            each.add_ended_phases(waits)
        return self._totals


def format_columns(seconds: Mapping[str, float], *, communicates: bool) -> dict[str, float]:
    """Return the seconds by the names of the rows' columns.

    Args:
        seconds: Seconds by phase.
        communicates: Whether there are other ranks. If not, there is no column for communication, and its
            time counts as `other`.
    """
    columns = dict.fromkeys(PHASES, 0.0)
    for phase, spent in seconds.items():
        columns[COUNTED_AS.get(phase, phase)] += spent
    if not communicates:
        columns[OTHER] += columns.pop("communication")
    return columns
