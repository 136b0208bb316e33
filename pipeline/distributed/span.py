"""Seconds between two places in the code: by the clock of the host, or on a GPU by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
