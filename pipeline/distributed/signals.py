"""Signals that come before a run can save, and which ranks report on stderr that they end.

Imports no torch: the first seconds of a process are those in which it is imported.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pipeline.distributed.ranks import ENVIRONMENT_FILE, OPEN_MPI, PMI

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks for a stop, beside Ctrl-C."""
STDOUT, STDERR = 1, 2


class Terminated(BaseException):
    """One of STOP_SIGNALS before training or after it. SIGTERM comes where another rank has ended, too."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def terminable() -> Iterator[None]:
    """Within it those signals raise Terminated; by default they would end the process without a word.

    What is ignored (SIGHUP under nohup), or seen to by somebody else, stays so.
    """
    is_main = threading.current_thread() is threading.main_thread()
    wanted = [number for number in STOP_SIGNALS if is_main and signal.getsignal(number) == signal.SIG_DFL]
    own = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a child that was forked: as if this had not been
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        detach_closed_terminal()
        raise Terminated(number)

    for number in wanted:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    """For the last seconds of a process that ends anyway."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def detach_closed_terminal() -> None:
    """Lets what is printed go nowhere where the terminal (a closed ssh) or the reader (`| tee`) is gone.

    It would be an error, before the run could be saved.
    """
    for stream in (STDOUT, STDERR):
        watch = select.poll()
        watch.register(stream, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


@contextmanager
def printing() -> Iterator[None]:
    """Inside it, printing on a terminal that was just closed is no error: its SIGHUP comes a moment later."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        detach_closed_terminal()


def reports_own_exit(alone_here: bool) -> bool:
    """Whether a rank that does not tell the job's failure says of its own end.

    Args:
        alone_here: Nobody else on its machine says anything.
    """
    # Our scripts, srun and mpirun show what all ranks print on one console.
    if any(name in os.environ for name in (ENVIRONMENT_FILE, "SLURM_PROCID", OPEN_MPI.rank, PMI.rank)):
        return False
    return alone_here or _has_own_stderr()


def _has_own_stderr() -> bool:
    """Whether it goes elsewhere than the launcher's: a file for each rank, a pod's log."""
    try:
        own, launchers = os.fstat(STDERR), os.stat(f"/proc/{os.getppid()}/fd/{STDERR}")
    except OSError:
        return True
    return (own.st_dev, own.st_ino) != (launchers.st_dev, launchers.st_ino)
