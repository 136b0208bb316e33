"""Assigns the seconds of a run to phases on one timeline, so that they add up to its wall time.

On a GPU a CUDA event marks each change of phase, and nothing waits for the device until the seconds are read.
A phase ends where the next one begins, so communication of DDP and ZeRO that overlaps the backward counts as
backward: separating it would take events on the collectives' own streams.
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
"""Phases that count under another one's name: what a rank computes for all ranks before a forward."""
ENTERS = {"backward": Phase.BACKWARD, "optimizer": Phase.STEP}
"""Phases of a step that an exception carries: see progress.tag_errors."""
NO_STEP = ("checkpoint", "evaluation", "generation", ASIDE)
MOST_MARKS = 1024
"""Places that are kept until a row is read: from then on what the device has passed is added up."""


Moment = Any
"""A place in the code: seconds by the host's clock or, on a GPU, an event that the device records."""


def moment_now(clock: Callable[[], float], on_gpu: bool) -> Moment:
    """Return this place. Does not wait."""
    if not on_gpu:
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(earlier: Moment, later: Moment) -> float:
    """Return the seconds between two places. Waits for the device to come to the later one."""
    if isinstance(earlier, int | float):
        return float(later - earlier)
    if not later.query():
        later.synchronize()
    return float(earlier.elapsed_time(later) / 1000)


class TimelineSegment:
    """Seconds by phase of one segment of the timeline."""

    def __init__(self, totals: dict[str, float], on_gpu: bool):
        """Begin a stretch.

        Args:
            totals: Seconds by phase of all stretches; this one adds its own.
            on_gpu: Whether the device comes to the marks later than the host.
        """
        self.marks: deque[tuple[str, Moment]] = deque()
        """Each phase with its beginning, in order; the last one has not ended."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._totals = totals
        self._on_gpu = on_gpu

    def add_ended_phases(self, waits: bool) -> bool:
        """Add up the phases that have ended.

        Args:
            waits: Wait for the device to end all of them.

        Returns:
            Whether all have ended.
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
        """Return the seconds by phase. Waits for the device to be through."""
        if len(self.marks) > 1:
            self.add_ended_phases(waits=True)
        return self._seconds


class Phases:
    """Timeline of a run, which begins when this is created. Time outside of every phase counts as `other`."""

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock = clock
        self._on_gpu = device.type == "cuda"
        self._totals: dict[str, float] = defaultdict(float)
        self._unread: list[TimelineSegment] = []
        self._phase = OTHER
        self._listen: Callable[[str], None] | None = None
        self._start()

    def _start(self) -> None:
        self.began = self.now() if self._on_gpu else self._clock()
        self._now = TimelineSegment(self._totals, self._on_gpu)
        self._now.marks.append((self._phase, self.began))

    def now(self) -> Moment:
        """Return this place."""
        return moment_now(self._clock, self._on_gpu)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure a phase. It interrupts the one around it, but for those that are no part of a step."""
        outer = self._phase
        if outer in NO_STEP:
            yield
            return
        self._switch(phase)
        try:
            yield
        except BaseException as error:
            if phase in ENTERS:
                note_phase(error, ENTERS[phase])
            raise
        finally:
            self._switch(outer)

    @contextmanager
    def notify_phase_ends(self, listen: Callable[[str], None]) -> Iterator[None]:
        """Call `listen` with the name of each phase that ends in the context."""
        self._listen = listen
        try:
            yield
        finally:
            self._listen = None

    def _switch(self, phase: str) -> None:
        if self._listen is not None:
            self._listen(self._phase)
        self._phase = phase
        marks = self._now.marks
        marks.append((phase, self.now() if self._on_gpu else self._clock()))
        if len(marks) > MOST_MARKS:
            self._now.add_ended_phases(waits=False)

    def pop_segment(self) -> TimelineSegment:
        """Return the stretch since the last call, and begin the next."""
        taken = self._now
        self._start()
        taken.marks.append((self._phase, self.began))
        self._unread = [each for each in (*self._unread, taken) if not each.add_ended_phases(waits=False)]
        return taken

    def restart(self) -> None:
        """Forget everything so far."""
        self._unread, self._totals = [], defaultdict(float)
        self._start()

    def totals(self, waits: bool = False) -> Mapping[str, float]:
        """Return the seconds by phase since the start, as far as the device has come.

        Args:
            waits: Wait for the device, and return all of them.
        """
        self._switch(self._phase)
        for each in (*self._unread, self._now):
            each.add_ended_phases(waits)
        return self._totals


def format_columns(seconds: Mapping[str, float], *, communicates: bool) -> dict[str, float]:
    """Return the seconds by the names of the rows' columns.

    Args:
        seconds: Seconds by phase.
        communicates: Whether there are ranks to wait for; otherwise there is no communication column.
    """
    told = dict.fromkeys(PHASES, 0.0)
    for phase, spent in seconds.items():
        told[COUNTED_AS.get(phase, phase)] += spent
    if not communicates:
        told[OTHER] += told.pop("communication")
    return told
