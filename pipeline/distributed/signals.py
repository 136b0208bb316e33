"""Signals that come before a run can save, a launcher that is gone, and which ranks report that they end.

A launcher that is asked to end ends its ranks; one that is killed cannot. A rank whose launcher is gone asks
itself to stop: it saves and leaves, where it would train on unseen.

Imports no torch: the first seconds of a process are those in which it is imported.
"""

from __future__ import annotations

import logging
import os
import platform
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from pipeline.distributed.ranks import ENVIRONMENT_FILE, OPEN_MPI_VARIABLES, Ranks
from pipeline.errors import Terminated

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask for a stop, beside Ctrl-C."""
STDOUT, STDERR = 1, 2
LAUNCHER_PERIOD = 1.0  # seconds between two looks for the launcher
log = logging.getLogger(__name__)


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Have the stop signals raise Terminated; by default they would end the process without a word.

    A signal that is ignored (SIGHUP under nohup), or has another handler, stays so.
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
    """Ignore the stop signals, for the last seconds of a process that ends anyway."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def detach_closed_terminal() -> None:
    """Discard what is printed if the terminal (a closed ssh) or the reader (`| tee`) is gone.

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


def reports_own_exit(alone_here: bool) -> bool:
    """Return whether a rank that does not report the job's failure reports its own end.

    Args:
        alone_here: Whether no other rank of its machine reports anything.
    """
    # Our scripts, srun and mpirun show what all ranks print on one console.
    if any(name in os.environ for name in (ENVIRONMENT_FILE, "SLURM_PROCID", OPEN_MPI_VARIABLES[0])):
        return False
    return alone_here or _has_own_stderr()


def _has_own_stderr() -> bool:
    """Return whether stderr goes elsewhere than the launcher's: a file for each rank, a pod's log."""
    try:
        own, launchers = os.fstat(STDERR), os.stat(f"/proc/{os.getppid()}/fd/{STDERR}")
    except OSError:
        return True
    return (own.st_dev, own.st_ino) != (launchers.st_dev, launchers.st_ino)


def stop_with_launcher(ranks: Ranks, period: float = LAUNCHER_PERIOD) -> None:
    """Watch the processes above this one; when one ends, send SIGTERM to this process.

    Above a rank of the deepspeed launcher there are two: launch.py, and `deepspeed` which started that. Any
    other launcher is its ranks' parent. Does nothing where a process was not started by a launcher.
    """
    if "LOCAL_RANK" not in os.environ and ranks.world_size == 1:  # srun and mpirun have other names for it
        return
    parent = os.getppid()
    above = None
    if "deepspeed.launcher.launch" in _words(parent):
        above = _parent_of(parent)
        # Started without it, launch.py may outlive the shell above it, and be meant to.
        if above is not None and not any(word.endswith("deepspeed") for word in _words(above)[:3]):
            above = None

    def watch() -> None:
        # None: not to be told just now, by a process out of file descriptors.
        while os.getppid() == parent and (above is None or _parent_of(parent) in (above, None)):
            time.sleep(period)
        line = f"rank {ranks.rank} on {platform.node()} (pid {os.getpid()}): its launcher is gone; it stops"
        detach_closed_terminal()
        log.warning("%s", line)
        if not ranks.is_main_process:  # whose console shows warnings
            print(f"warning: {line}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except (psutil.Error, OSError):  # gone, or not to be told
        return None


def _words(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.Error, OSError):
        return []
