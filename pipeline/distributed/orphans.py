"""A rank whose launcher is gone asks itself to stop: it saves and leaves, where it would train on unseen.

The launchers end their ranks when they are told to end; killed, they cannot.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time

import psutil

from pipeline.distributed.ranks import Ranks
from pipeline.distributed.signals import detach_closed_terminal

PERIOD = 1.0  # seconds
log = logging.getLogger(__name__)


def stop_with_launcher(ranks: Ranks, period: float = PERIOD) -> None:
    """Watches the processes above this one from now on; when one ends, SIGTERM comes to this process.

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
