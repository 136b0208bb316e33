"""Seconds between two places in the code: by the clock of the host, or on a GPU by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Span:
    """Seconds between two places in the code, as the device sees them.

    On a GPU it works on while the host reads data, and only what it waits between two events of its own is
    lost; in a forward it is what it computes, and waits for the host.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock = clock
        self._is_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what is measured."""
        if self._is_gpu:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            before = self._clock()
            yield
            self._seconds += self._clock() - before

    def take(self) -> float:
        """What was measured since the last call. Waits for the device."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
