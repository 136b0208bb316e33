"""Stops a run on a signal: the run finishes its step, saves a checkpoint and exits.

A signal sets a flag on one rank. Other requests, such as one for a checkpoint, have flags too. The flags are
summed over all ranks together with the token count, so every rank acts on them at the same step. On CUDA the
sum is read two steps later, so that the host never waits for the device.
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

SAVE_FLAG = 1
"""Request of any rank for a checkpoint."""
STOP_FLAG = 1 << 20
"""Request of any rank to stop. Up to a million ranks, sums of SAVE_FLAG and STOP_FLAG do not mix in fp64."""
EVALUATE_FLAG = 1 << 40
"""Request of rank 0 for an evaluation."""
END_FLAG = 1 << 41
"""Request of rank 0 to end the run."""


class StopOnSignal:
    """Requests a stop at the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP, while it is used as a context manager.

    A SIGINT after the first signal raises KeyboardInterrupt, which ends the process. Slurm sends SIGUSR1
    before a time limit or a preemption if the job asks for it (`--signal=USR1@120`). A closed terminal sends
    SIGHUP. If SIGHUP was ignored before (nohup), it stays ignored.
    """

    SIGNALS = (signal.SIGINT, *STOP_SIGNALS)
    """Signals that request a stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """Number of the first signal; `None` before it."""
        self.signal_time: float | None = None
        """Time of the first signal by time.monotonic(); `None` before it."""
        self._previous_handlers: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether a signal has requested a stop."""
        return self.signal_number is not None

    def __enter__(self) -> StopOnSignal:
        for number in self.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous_handlers.items():
            # Code that ends the process may have set another handler since `__enter__`. Leave that one.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; at a later SIGINT raise KeyboardInterrupt."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        detach_closed_terminal()
        # A launcher may forward a signal that this process received too, so another signal changes nothing.
        if not self.requested:
            self.signal_number = number
            self.signal_time = time.monotonic()
            name = signal.Signals(number).name
            log.info("received %s: the run saves a checkpoint after this step and stops", name)


class Flags(NamedTuple):
    """Requests that every rank acts on, whichever rank made them."""

    save: bool = False
    """Whether to save a checkpoint."""
    stop: bool = False
    """Whether a rank received a signal: save a checkpoint and exit."""
    evaluate: bool = False
    """Whether to evaluate."""
    end: bool = False
    """Whether to end the run in the same way as after its last step, because a callback asks for it."""

    def __or__(self, other: Flags) -> Flags:
        """Return the requests that are in either of the two."""
        return Flags(*(first or second for first, second in zip(self, other, strict=True)))


class FlagReader:
    """Reads the summed flags of all ranks without waiting for the device. Every rank gets the same result.

    On CUDA the flags of a step are read two steps later, when the device has long finished copying them.

    Args:
        device: Device of the flags.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read(self, flags: Tensor) -> Flags:
        """Record the summed flags of a step, and return those that are to be acted on now.

        On a CPU these are the flags of the same step; on CUDA, those of two steps before (none at first).

        Args:
            flags: Sum of SAVE_FLAG, STOP_FLAG, EVALUATE_FLAG and END_FLAG over all ranks, a scalar.
        """
        if not self._on_gpu:
            return _decode_flags(flags)
        host_flags = torch.empty((), dtype=flags.dtype, pin_memory=True)
        host_flags.copy_(flags, non_blocking=True)
        is_copied = torch.cuda.Event()
        is_copied.record()
        self._pending.append((host_flags, is_copied))
        if len(self._pending) <= 2:
            return Flags()
        oldest_flags, oldest_is_copied = self._pending.popleft()
        oldest_is_copied.synchronize()
        return _decode_flags(oldest_flags)


def _decode_flags(flags: Tensor) -> Flags:
    """Return the requests in a sum of flags, in which each flag has bits of its own."""
    rank_0_requests, counts = divmod(int(flags), EVALUATE_FLAG)
    num_stops, num_saves = divmod(counts, STOP_FLAG)
    return Flags(
        save=num_saves > 0,
        stop=num_stops > 0,
        evaluate=rank_0_requests % 2 > 0,
        end=rank_0_requests > 1,
    )


class PeriodicTimer:
    """Becomes due once per period.

    Args:
        seconds: Length of the period; with 0 the timer is never due.
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
