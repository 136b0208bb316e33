"""Queue of rows whose numbers the device is still computing, so that no step waits for its own row.

On a GPU the numbers of a row are copied to pinned host memory in one asynchronous copy. The row is read,
checked by the alerts and written after the next step is launched. Pending rows are also written before an
evaluation, a checkpoint and the end of the run. A run that fails waits at most FAILURE_WAIT_SECONDS to write
them. `kill -9` and a hang lose one row; no checkpoint includes its step. On a CPU no row is delayed.
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
"""Seconds that a failed run waits for the device to finish its pending rows."""


class DeferredValue(Generic[T]):
    """A value that is computed on the host, when it is read, from numbers that the device computes.

    Creating it does not wait for the device.
    """

    def __init__(self, numbers: Mapping[str, Tensor], make: Callable[[dict[str, Tensor]], T]):
        """Start an asynchronous copy of the numbers to the host.

        Args:
            numbers: Name -> tensor on the device, 0-dim or (N,).
            make: Computes the value from the copies on the host, which have the same shapes in fp64. It is
                called once.
        """
        packed = torch.cat([tensor.to(torch.float64).reshape(-1) for tensor in numbers.values()])
        self._shapes = {name: tensor.shape for name, tensor in numbers.items()}
        self._make = make
        self._value: T | None = None  # `None` before the first `read`
        self._arrived: torch.cuda.Event | None = None  # `None` on a CPU
        is_gpu = packed.device.type == "cuda"
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=is_gpu)
        self._host.copy_(packed, non_blocking=True)
        if is_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def has_arrived(self) -> bool:
        """Return whether `read` would return without waiting for the device."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> T:
        """Return the value. The first call waits until the device has computed the numbers."""
        if self._value is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            parts = self._host.split([shape.numel() for shape in self._shapes.values()])
            shaped = zip(self._shapes.items(), parts, strict=True)
            self._value = self._make({name: part.reshape(shape) for (name, shape), part in shaped})
        return self._value


DeferredRow = DeferredValue[RowDetails]
"""Row of metrics, with its details, that is read later."""


class RowQueue:
    """Passes each row to the alerts and then to the trackers, once and in order."""

    def __init__(
        self,
        alerts: Iterable[Alert],
        trackers: Trackers,
        handle_alert: HandleAlert,
        on_row: Callable[[int, Mapping[str, float]], None] | None = None,
    ):
        """Create an empty queue.

        Args:
            alerts: Alerts that check each row.
            trackers: Trackers that receive each row.
            handle_alert: Handles the events that the alerts return.
            on_row: Called with the step and the columns of each row of the queue after it is written; not for
                a row that led to a rollback.
        """
        self._on_row = on_row
        self._alerts = tuple(alerts)
        self._handle_alert = handle_alert
        self._trackers = trackers
        self._rows: deque[tuple[int, DeferredRow, DeferredValue[Histograms] | None]] = deque()

    def add(self, step: int, row: DeferredRow, histograms: DeferredValue[Histograms] | None = None) -> None:
        """Add a row and its step's histograms; steps must be in ascending order."""
        self._rows.append((step, row, histograms))

    def write_until(self, step: int) -> RollbackRequested | None:
        """Check and write the rows up to this step, then pass their histograms to the trackers.

        Waits for the device; all ranks make the same call.

        Returns:
            The request to roll back if an alert led to one. Its row is written, and the rows after it are
            dropped.

        Raises:
            PipelineError: An alert ends the run; its row and the rows after it are not written.
        """
        while self._rows and self._rows[0][0] <= step:
            row_step, row, histograms = self._rows.popleft()
            details = row.read()
            rollback = self.write(row_step, details)
            if rollback is not None:
                return rollback
            if self._on_row is not None:
                self._on_row(row_step, details.row)
            if histograms is not None and not self._trackers.is_empty:
                self._trackers.show(histograms.read())
        return None

    def write(self, step: int, details: RowDetails) -> RollbackRequested | None:
        """Check and write a row that is already on the host, such as an evaluation.

        `write_until` must have written the queued rows before it. Returns and raises as `write_until` does.
        """
        try:
            rollback = check_row(self._alerts, step, details, self._handle_alert)
        except BaseException:
            self._rows.clear()
            raise
        if rollback is not None:
            self._rows.clear()
        self._trackers.write(step, details.row)
        return rollback

    def write_what_arrives(self) -> None:
        """Write the rows that the device completes within FAILURE_WAIT_SECONDS, after a failure.

        Does not wait for other ranks: the rows are not checked, and their histograms are dropped.
        """
        deadline = time.monotonic() + FAILURE_WAIT_SECONDS
        with suppress(Exception):  # a failed device or a full disk: the first error is the one to report
            while self._rows and not self._trackers.is_empty:
                row_step, row, _ = self._rows[0]
                while not row.has_arrived():
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.01)
                self._rows.popleft()
                self._trackers.write(row_step, row.read().row)
