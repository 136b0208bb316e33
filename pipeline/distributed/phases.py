"""Which phase a run's seconds go into: a timeline that is cut where one phase gives way to another, so that
they add up. On a GPU it is the device's own, and nothing waits until it is read.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from pipeline.distributed.progress import Phase, note_phase


class Moment:
    """When the device comes to this place in the code; on a CPU, now."""

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._time = clock()

    def has_passed(self) -> bool:
        """Whether the device has come here. Does not wait."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: Moment) -> float:
        """Waits for the device to have come here."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        if not self._event.query():
            self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


class Span:
    """Seconds between two places in the code, as the device sees them.

    On a GPU it works on while the host reads data, and only what it waits between two events of its own is
    lost; in a forward it is what it computes, and waits for the host.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock = clock
        self._device = device
        self._moments: list[tuple[Moment, Moment]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what is measured."""
        before = Moment(self._clock, self._device)
        yield
        self._moments.append((before, Moment(self._clock, self._device)))

    def take(self) -> Callable[[], float]:
        """What was measured since the last call: a function that waits for the device and says it."""
        moments, self._moments = self._moments, []
        return lambda: sum((after.seconds_since(before) for before, after in moments), 0.0)


OTHER = "other"
ASIDE = "aside"
"""What belongs to no step and has no name."""
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
"""Phases that are told under another one's name: what a rank computes for all ranks before a forward."""
ENTERS = {"backward": Phase.BACKWARD, "optimizer": Phase.STEP}
"""Phases of a step that an exception carries: see progress.phase."""
NO_STEP = ("checkpoint", "evaluation", "generation", ASIDE)
MOST_MARKS = 1024
"""Places that are kept until a row is read: from then on what the device has passed is added up."""


class Spent:
    """A stretch of the timeline."""

    def __init__(self, totals: dict[str, float]):
        """
        Args:
            totals: Seconds by phase of all stretches, to which it adds its own.
        """
        self._marks: deque[tuple[str, Moment]] = deque()
        self._seconds: dict[str, float] = defaultdict(float)
        self._totals = totals

    def mark(self, phase: str, moment: Moment) -> None:
        """From here on it is this phase."""
        self._marks.append((phase, moment))
        if len(self._marks) > MOST_MARKS:
            self.settle(waits=False)

    def settle(self, waits: bool) -> bool:
        """Adds up what the device has passed, or waits until that is all; whether it is all."""
        while len(self._marks) > 1 and (waits or self._marks[1][1].has_passed()):
            phase, began = self._marks.popleft()
            seconds = self._marks[0][1].seconds_since(began)
            self._seconds[phase] += seconds
            self._totals[phase] += seconds
        return len(self._marks) <= 1

    def seconds(self) -> Mapping[str, float]:
        """By phase. Waits for the device to be through."""
        self.settle(waits=True)
        return self._seconds


class Phases:
    """The timeline of a run, from where this is made. What is in no phase is `other`."""

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock, self._device = clock, device
        self._totals: dict[str, float] = defaultdict(float)
        self._unread: list[Spent] = []
        self._phase = OTHER
        self._listen: Callable[[str], None] | None = None
        self._start()

    def _start(self) -> None:
        self.began = Moment(self._clock, self._device)
        self._now = Spent(self._totals)
        self._now.mark(self._phase, self.began)

    def now(self) -> Moment:
        """This place."""
        return Moment(self._clock, self._device)

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Around a phase. It interrupts the one around it, but for those that are no part of a step."""
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
    def heard_by(self, listen: Callable[[str], None]) -> Iterator[None]:
        """Inside, `listen` is called where a phase ends, with its name."""
        self._listen = listen
        try:
            yield
        finally:
            self._listen = None

    def _switch(self, phase: str) -> None:
        if self._listen is not None:
            self._listen(self._phase)
        self._phase = phase
        self._now.mark(phase, Moment(self._clock, self._device))

    def take(self) -> Spent:
        """What there was since the last call."""
        taken = self._now
        self._unread = [each for each in self._unread if not each.settle(waits=False)] + [taken]
        self._start()
        taken.mark(self._phase, self.began)
        return taken

    def restart(self) -> None:
        """Forgets what there was."""
        self._unread, self._totals = [], defaultdict(float)
        self._start()

    def totals(self, waits: bool = False) -> Mapping[str, float]:
        """Seconds by phase since the start, as far as the device has come or, where it is waited for, all."""
        self._switch(self._phase)
        for each in (*self._unread, self._now):
            each.settle(waits)
        return self._totals


def columns(seconds: Mapping[str, float], *, communicates: bool) -> dict[str, float]:
    """By the names that are told, each of them, and communication where there are ranks to wait for."""
    told = dict.fromkeys(PHASES, 0.0)
    for phase, spent in seconds.items():
        told[COUNTED_AS.get(phase, phase)] += spent
    if not communicates:
        told[OTHER] += told.pop("communication")
    return told
