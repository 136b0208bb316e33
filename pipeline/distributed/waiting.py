"""Waits for other machines with a time limit, prints what is missing, and finds own addresses and free ports.

Imports no torch.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from pipeline.config.command_lines import format_pipeline_command
from pipeline.errors import LaunchError

SECONDS_BEFORE_FIRST_REPORT = 30.0
"""Seconds of waiting before the first report, if that is less than a quarter of the time limit."""
DOCTOR_COMMAND = format_pipeline_command("doctor", "--hostfile", "HOSTFILE")
"""Command line that checks the connections between machines, for messages."""


class TimedWait:
    """Waits in small steps up to a time limit, and prints what is missing at intervals that double.

    The caller loops: it checks its condition, and calls the object while the condition does not hold.

    Args:
        seconds: Limit of the whole wait, from the creation of this object.
        setting: Name of the setting or option that gives the limit, for the error.
    """

    def __init__(self, seconds: float, setting: str = "distributed.timeout_seconds"):
        self._began = time.monotonic()
        self._limit_seconds = seconds
        self._setting = setting
        self._next_report_seconds = min(SECONDS_BEFORE_FIRST_REPORT, seconds / 4)

    def __call__(self, problem: str, advice: str, print_progress: bool = True) -> None:
        """Wait 0.05 s, and print the problem if a report is due.

        Args:
            problem: Sentence about what is missing, without its full stop.
            advice: Step that the user can take, for the error.
            print_progress: Whether to print reports.

        Raises:
            LaunchError: The limit has passed.
        """
        waited = time.monotonic() - self._began
        if waited > self._limit_seconds:
            raise LaunchError(f"{problem} after {waited:.0f} s ({self._setting}); {advice}")
        if waited > self._next_report_seconds:
            self._next_report_seconds *= 2
            if print_progress:
                print(f"waiting: {problem} after {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.05)


def wait_for_port(
    host: str,
    port: int,
    problem: str,
    wait: TimedWait,
    print_progress: bool = True,
    is_own_host: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until a process listens at the port, or the host turns out to be this machine.

    Args:
        host: Name or address to connect to.
        port: Port to connect to.
        problem: Sentence for the time in which nothing listens: which machine or rank does not reach which.
        wait: Limits the wait and prints progress.
        print_progress: Whether to print progress.
        is_own_host: Function that returns whether `host` is this machine. It is called before each attempt,
            since the address of a name can change.

    Raises:
        LaunchError: Nothing listened within the limit, or the name could not be resolved.
    """
    while not is_own_host():
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            unreachable = f"{problem}, {host}:{port} ({reason})"
            wait(unreachable, f"find the cause with {DOCTOR_COMMAND}", print_progress)


def find_own_address(host: str) -> str | None:
    """Return the first of a host name's addresses that belongs to this machine; `None` if none does."""
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the name cannot be resolved
        return None
    for family, kind, _, _, address in candidates:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return str(address[0])
    return None


def find_free_port(host: str = "") -> int:
    """Return a TCP port of this machine that no process uses now. Another process may take it at any time.

    Args:
        host: Address of this machine on which the port must be free; empty for all addresses.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
