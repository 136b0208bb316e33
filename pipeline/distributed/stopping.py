"""Stops a run on a signal: the run finishes its step, saves and exits.

A signal sets a flag on one rank. Flags are summed over the ranks together with the token count, and take
effect once all ranks have seen the sum. On CUDA it is read two steps late, so that the host never waits for
the device.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.distributed.signals import STOP_SIGNALS, detach_closed_terminal

log = logging.getLogger(__name__)

SAVE_FLAG, STOP_FLAG = 1, 1 << 20
"""Request of a rank after a step. Sums over up to a million ranks keep the two apart (fp64)."""
EVALUATE_FLAG, END_FLAG = 1 << 40, 1 << 41
"""Requests of rank 0 alone."""


class StopOnSignal:
    """Asks for a stop at the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP; a second SIGINT ends the process.

    SIGUSR1 is what Slurm is told to send before a time limit or a preemption (`--signal=USR1@120`). SIGHUP
    comes where the terminal was closed; it stays ignored where it was (nohup).
    """

    SIGNALS = (signal.SIGINT, *STOP_SIGNALS)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.came_at: float | None = None
        """time.monotonic() of the first signal."""
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether a signal has asked for a stop."""
        return self.signal_number is not None

    def __enter__(self) -> StopOnSignal:
        for number in self.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:  # else whoever ends the process has seen to it
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        detach_closed_terminal()
        # A launcher passes on the signal the terminal already sent to every process: once is enough.
        if not self.requested:
            self.signal_number = number
            self.came_at = time.monotonic()
            log.info("%s: stopping after this step, with a checkpoint", signal.Signals(number).name)


class Flags(NamedTuple):
    """Requests that all ranks have received, whichever rank made them."""

    save: bool = False
    stop: bool = False
    """A signal came: save and leave."""
    evaluate: bool = False
    end: bool = False
    """A callback ends the run, as its last step would."""

    def __or__(self, other: Flags) -> Flags:
        return Flags(*(ours or theirs for ours, theirs in zip(self, other, strict=True)))


class FlagReader:
    """Reads the ranks' summed flags, the same ones on every rank, and never waits for the device.

    On CUDA the flags of a step are read two steps later, through an event of their own: by then they have
    long arrived.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def read(self, flags: Tensor) -> Flags:
        """Record the summed flags of the step just launched; return what all ranks know by now."""
        if not self._on_gpu:
            return _counted(flags)
        host = torch.empty((), dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((host, event))
        if len(self._pending) <= 2:
            return Flags()
        oldest, arrived = self._pending.popleft()
        assert arrived is not None
        arrived.synchronize()
        return _counted(oldest)


def _counted(flags: Tensor) -> Flags:
    of_rank_0, counts = divmod(int(flags), EVALUATE_FLAG)
    stops, saves = divmod(counts, STOP_FLAG)
    return Flags(save=saves > 0, stop=stops > 0, evaluate=of_rank_0 % 2 > 0, end=of_rank_0 > 1)


class PeriodicTimer:
    """Becomes due once per period.

    Args:
        seconds: Length of the period; 0 means never.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._since = time.monotonic()

    def due(self) -> bool:
        """Return whether the period has passed; if it has, start the next one."""
        if not self._seconds or time.monotonic() - self._since < self._seconds:
            return False
        self.restart()
        return True

    def restart(self) -> None:
        """Start a new period now."""
        self._since = time.monotonic()
