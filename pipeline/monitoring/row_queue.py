"""Rows of the log whose numbers the device still computes: no step waits for its own row.

They are copied beside the device's work, and read and written later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pipeline.monitoring.alerts import Alert, HandleAlert, RollbackRequested, RowDetails, check_row
from pipeline.monitoring.events import Histograms
from pipeline.monitoring.trackers.interface import Trackers

T = TypeVar("T")

FAILURE_WAIT_SECONDS = 5.0
"""Seconds that a failed run gives the device to reach the end of a row."""


class DeferredValue(Generic[T]):
    """An object that is made of numbers of the device, later. Making one waits for nothing."""

    def __init__(self, numbers: Mapping[str, Tensor], make: Callable[[dict[str, Tensor]], T]):
        """Copy the numbers to the host beside the device's work.

        Args:
            numbers: Name -> numbers of the device, 0-dim or (N,).
            make: Takes their copies on the host: fp64, of the same shapes.
        """
        packed = torch.cat([each.to(torch.float64).reshape(-1) for each in numbers.values()])
        self._shapes = {name: each.shape for name, each in numbers.items()}
        self._make = make
        self._made: T | None = None
        self._arrived: torch.cuda.Event | None = None
        is_gpu = packed.device.type == "cuda"
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=is_gpu)
        self._host.copy_(packed, non_blocking=True)
        if is_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def has_arrived(self) -> bool:
        """Return whether `read` waits for nothing."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> T:
        """Return the object. Waits for the device to reach the numbers."""
        if self._made is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            parts = self._host.split([shape.numel() for shape in self._shapes.values()])
            named = zip(self._shapes.items(), parts, strict=True)
            self._made = self._make({name: part.reshape(shape) for (name, shape), part in named})
        return self._made


DeferredRow = DeferredValue[RowDetails]
"""A row and what is behind it."""


class RowQueue:
    """Rows on their way to the alerts and then to the trackers: each once, in order."""

    def __init__(
        self,
        alerts: Iterable[Alert],
        trackers: Trackers,
        handle_alert: HandleAlert,
        on_row: Callable[[int, Mapping[str, float]], None] | None = None,
    ):
        """Make an empty queue.

        Args:
            alerts: Asked about each row.
            trackers: Written to.
            handle_alert: Takes the answers of the alerts.
            on_row: Called with each row of training once it is written.
        """
        self._on_row = on_row
        self._alerts = tuple(alerts)
        self._handle_alert = handle_alert
        self._trackers = trackers
        self._rows: deque[tuple[int, DeferredRow, DeferredValue[Histograms] | None]] = deque()

    def add(self, step: int, row: DeferredRow, histograms: DeferredValue[Histograms] | None = None) -> None:
        """Add the row of a later step than all before, and the histograms of that step."""
        self._rows.append((step, row, histograms))

    def write_until(self, step: int) -> RollbackRequested | None:
        """Write the rows up to this step. Waits for the device; the same call on all ranks.

        Returns:
            The request to roll back, if an alert led to one: the rows behind it are dropped.

        Raises:
            PipelineError: an alert ends the run; that row and those behind it are not written.
        """
        while self._rows and self._rows[0][0] <= step:
            at, row, histograms = self._rows.popleft()
            seen = row.read()
            if (rollback := self.write(at, seen)) is not None:
                return rollback
            if self._on_row is not None:
                self._on_row(at, seen.row)
            if histograms is not None and not self._trackers.is_empty:
                self._trackers.show(histograms.read())
        return None

    def write(self, step: int, seen: RowDetails) -> RollbackRequested | None:
        """Write a row that waits for nothing, behind those that were added. See write_until."""
        try:
            rollback = check_row(self._alerts, step, seen, self._handle_alert)
        except BaseException:
            self._rows.clear()
            raise
        if rollback is not None:
            self._rows.clear()
        self._trackers.write(step, seen.row)
        return rollback

    def write_what_arrives(self) -> None:
        """Write the rows that the device reaches in a moment, after a failure. Waits for no other rank."""
        until = time.monotonic() + FAILURE_WAIT_SECONDS
        with suppress(Exception):  # of a device that failed, or a full disk: the first error is the news
            while self._rows and not self._trackers.is_empty:
                at, row, _ = self._rows[0]
                while not row.has_arrived():
                    if time.monotonic() > until:
                        return
                    time.sleep(0.01)
                self._rows.popleft()
                self._trackers.write(at, row.read().row)
