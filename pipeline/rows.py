"""Rows of the log whose numbers the device is still at work on: copied beside its work, read and written
later, so that no step waits for its own row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pipeline.events import Histograms
from pipeline.safeguard import GoBack
from pipeline.sinks import Sinks
from pipeline.watchers import Seen, Tell, Watcher, ask

T = TypeVar("T")

LAST_WAIT = 5.0
"""Seconds that a run which fails gives the device to come to the end of a row."""


class Late(Generic[T]):
    """What is made of numbers of the device, later. Asking for it waits for nothing.

    Args:
        numbers: Of the device, 0-dim or (N,), by name.
        make: From their copies on the host: fp64, of the same shapes.
    """

    def __init__(self, numbers: Mapping[str, Tensor], make: Callable[[dict[str, Tensor]], T]):
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
        """Whether `read` waits for nothing."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> T:
        """Waits for the device to be done with what came before it."""
        if self._made is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            parts = self._host.split([shape.numel() for shape in self._shapes.values()])
            named = zip(self._shapes.items(), parts, strict=True)
            self._made = self._make({name: part.reshape(shape) for (name, shape), part in named})
        return self._made


LateRow = Late[Seen]
"""A row and what it comes with."""


class LateRows:
    """Rows on their way to the watchers and, where these say nothing, to the sinks: each once, in order."""

    def __init__(
        self,
        watchers: Iterable[Watcher],
        sinks: Sinks,
        answer: Tell,
        on_row: Callable[[int, Mapping[str, float]], None] | None = None,
    ):
        """Make an empty queue.

        Args:
            answer: Takes what the watchers say.
            on_row: Called with each row of training once it is written.
        """
        self._on_row = on_row
        self._watchers = tuple(watchers)
        self._answer = answer
        self._sinks = sinks
        self._rows: deque[tuple[int, LateRow, Late[Histograms] | None]] = deque()

    def add(self, step: int, row: LateRow, histograms: Late[Histograms] | None = None) -> None:
        """The row of a later step than all before, and the histograms of that step."""
        self._rows.append((step, row, histograms))

    def write_until(self, step: int) -> None:
        """Those up to this step. Waits for the device; the same call on all ranks.

        Raises:
            PipelineError: a watcher's; that row and those behind it are not written.
            GoBack: that row is the last one of what is gone back from.
        """
        while self._rows and self._rows[0][0] <= step:
            at, late, histograms = self._rows.popleft()
            self.write(at, late.read())
            if self._on_row is not None:
                self._on_row(at, late.read().row)
            if histograms is not None and not self._sinks.is_empty:
                self._sinks.show(histograms.read())

    def write(self, step: int, seen: Seen) -> None:
        """One that waits for nothing, behind those that were added. See write_until."""
        try:
            ask(self._watchers, step, seen, self._answer)
        except BaseException as error:
            self._rows.clear()
            if isinstance(error, GoBack):
                self._sinks.write(step, seen.row)
            raise
        self._sinks.write(step, seen.row)

    def write_what_arrives(self) -> None:
        """After a failure of the run: waits for a moment, and for no peer."""
        until = time.monotonic() + LAST_WAIT
        with suppress(Exception):  # of a device that failed, or a full disk: the first error is the news
            while self._rows and not self._sinks.is_empty:
                at, late, _ = self._rows[0]
                while not late.has_arrived():
                    if time.monotonic() > until:
                        return
                    time.sleep(0.01)
                self._rows.popleft()
                self._sinks.write(at, late.read().row)
