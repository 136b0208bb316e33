"""Clocks that a test moves: the host's clock, and the clock behind a GPU's events."""

from __future__ import annotations


class FakeClock:
    """Stands in for `time.perf_counter` and its like: a call returns `now`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeGpu:
    """Reaches an event when its clock passes the work launched before it, or when the host waits for it."""

    def __init__(self) -> None:
        self.queued_until = 0.0
        """Time on the device's clock when all launched work will be finished."""
        self.now = 0.0
        self.num_waits = 0
        """Number of times that the host waited for the device."""

    def event(self, enable_timing: bool = False) -> FakeEvent:
        """Return a new event; stands in for `torch.cuda.Event`."""
        return FakeEvent(self)


class FakeEvent:
    """Has those methods of `torch.cuda.Event` that measure time."""

    def __init__(self, gpu: FakeGpu):
        self._gpu = gpu
        self._reached_at = 0.0

    def record(self) -> None:
        self._reached_at = self._gpu.queued_until

    def query(self) -> bool:
        return self._reached_at <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.num_waits += not self.query()
        self._gpu.now = max(self._gpu.now, self._reached_at)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query()
        assert later.query()
        return 1000 * (later._reached_at - self._reached_at)
