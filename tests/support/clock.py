"""Clocks that move when a test says so: the host's, and a GPU's behind its events."""

from __future__ import annotations


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Gpu:
    """A device that comes to an event when it is through with what was launched before, or is waited for."""

    def __init__(self) -> None:
        self.launched = 0.0
        """When it will be through with everything, by its own clock."""
        self.now = 0.0
        self.waits = 0

    def event(self, enable_timing: bool = False) -> Event:
        """In the place of torch.cuda.Event."""
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self.at = 0.0

    def record(self) -> None:
        self.at = self._gpu.launched

    def query(self) -> bool:
        return self.at <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.waits += not self.query()
        self._gpu.now = max(self._gpu.now, self.at)

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query()
        return 1000 * (later.at - self.at)
