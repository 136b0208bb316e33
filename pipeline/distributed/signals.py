"""Handles stop signals before a run can save, and stops a rank whose launcher has ended.

A launcher that is asked to stop ends its ranks, but a launcher that is killed cannot. A rank whose launcher
has ended sends SIGTERM to itself. It then saves a checkpoint and exits, instead of training on unnoticed. The
module also decides whether a rank prints why it exits.

The module imports no torch, because it must handle signals while torch is imported, in the first seconds of a
process.
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

from pipeline.distributed.ranks import ENVIRONMENT_FILE_VARIABLE, OPEN_MPI_VARIABLES, Ranks
from pipeline.errors import Terminated

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that request a stop, in addition to Ctrl-C."""
STDOUT = 1
"""File descriptor of the standard output."""
STDERR = 2
"""File descriptor of the standard error output."""
LAUNCHER_CHECK_SECONDS = 1.0
"""Seconds between two checks whether the launcher is alive."""
log = logging.getLogger(__name__)


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Make STOP_SIGNALS raise Terminated inside the `with` block.

    By default these signals end the process without a message. A signal that is ignored (SIGHUP under nohup)
    or has another handler is not changed. Outside the main thread this does nothing, since Python allows no
    handlers there.

    Raises:
        Terminated: A stop signal arrived.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    handled = [
        number for number in STOP_SIGNALS if is_main_thread and signal.getsignal(number) == signal.SIG_DFL
    ]
    own_pid = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own_pid:  # a forked child inherits the handler, but ends as by default
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        detach_closed_terminal()
        raise Terminated(number)

    for number in handled:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    """Ignore the stop signals. Call it when the process is about to end anyway."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def detach_closed_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal (a closed ssh) or reader (`| tee`) is gone.

    If the terminal or reader is gone, the next print would raise an error before the run can save.
    """
    for stream in (STDOUT, STDERR):
        poller = select.poll()
        poller.register(stream, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0)):
            with suppress(OSError):
                null_device = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null_device, stream)
                os.close(null_device)


def reports_own_exit(is_only_reporter: bool) -> bool:
    """Return whether this rank should print why it exits, although another rank reports the job's failure.

    Args:
        is_only_reporter: Whether no other rank of this machine prints anything.
    """
    # Our launch scripts, srun and mpirun show the output of all ranks on one console. One report is enough.
    if any(name in os.environ for name in (ENVIRONMENT_FILE_VARIABLE, "SLURM_PROCID", OPEN_MPI_VARIABLES[0])):
        return False
    return is_only_reporter or _has_own_stderr()


def _has_own_stderr() -> bool:
    """Return whether stderr is not the launcher's, but a file for each rank or a pod's log."""
    try:
        own_file = os.fstat(STDERR)
        launcher_file = os.stat(f"/proc/{os.getppid()}/fd/{STDERR}")
    except OSError:
        return True
    return (own_file.st_dev, own_file.st_ino) != (launcher_file.st_dev, launcher_file.st_ino)


def stop_with_launcher(ranks: Ranks, check_seconds: float = LAUNCHER_CHECK_SECONDS) -> None:
    """Start a thread that sends SIGTERM to this process when its launcher ends.

    The deepspeed launcher consists of two processes, and the thread watches both: launch.py is the parent of
    a rank, and `deepspeed` is the parent of launch.py. Any other launcher is itself the parent of its ranks.
    Does nothing if no launcher started this process.

    Args:
        ranks: Rank and world size of this process.
        check_seconds: Seconds between two checks.
    """
    # srun and mpirun do not set LOCAL_RANK, but their jobs have several ranks.
    if "LOCAL_RANK" not in os.environ and ranks.world_size == 1:
        return
    parent = os.getppid()
    grandparent = None
    if "deepspeed.launcher.launch" in _read_command_line(parent):
        grandparent = _find_parent(parent)
        # If no `deepspeed` started launch.py, a shell did. The user may want launch.py to outlive that shell.
        if grandparent is not None:
            command_line = _read_command_line(grandparent)
            if not any(word.endswith("deepspeed") for word in command_line[:3]):
                grandparent = None

    def has_grandparent() -> bool:
        if grandparent is None:
            return True  # it is not watched
        current = _find_parent(parent)
        # The result is `None` if this process has no free file descriptor, which is no reason to stop.
        return current is None or current == grandparent

    def watch() -> None:
        while os.getppid() == parent and has_grandparent():
            time.sleep(check_seconds)
        name = f"rank {ranks.rank} on {platform.node()} (pid {os.getpid()})"
        message = f"{name}: its launcher has ended, so this rank stops"
        detach_closed_terminal()
        log.warning("%s", message)
        if not ranks.is_main_process:  # rank 0's console shows the log
            print(f"warning: {message}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _find_parent(pid: int) -> int | None:
    """Return the process id of the parent of a process; `None` if it cannot be read."""
    try:
        return psutil.Process(pid).ppid()
    except (psutil.Error, OSError):  # the process has ended, or cannot be read now
        return None


def _read_command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if it cannot be read."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.Error, OSError):
        return []
