"""Ctrl-C and SIGTERM: finish the step, save, leave. A stop is agreed by all ranks before it is believed."""

from __future__ import annotations

import logging
import signal
from collections import deque
from types import FrameType, TracebackType

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class StopOnSignal:
    """While active, the first SIGINT or SIGTERM asks for a stop; a second one ends the process at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> StopOnSignal:
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        # A launcher passes on the signal the terminal already sent to every process: once is enough.
        if not self.requested:
            self.signal_number = number
            log.info("%s: stopping after this step, with a checkpoint", signal.Signals(number).name)


class StopAgreement:
    """Believes a stop once every rank knows of it, without making the host wait for the device.

    On CUDA the votes of a step are read two steps later, through an event of their own: by then they have
    long arrived, and every rank reads the same ones at the same step.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def submit(self, votes: Tensor) -> bool:
        """Takes the summed votes of the step just launched; True once a stop is agreed."""
        if not self._on_gpu:
            return bool(votes > 0)
        host = torch.empty((), dtype=votes.dtype, pin_memory=True)
        host.copy_(votes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((host, event))
        if len(self._pending) <= 2:
            return False
        oldest, arrived = self._pending.popleft()
        assert arrived is not None
        arrived.synchronize()
        return bool(oldest > 0)
