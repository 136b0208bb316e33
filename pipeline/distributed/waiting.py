"""Waits for another machine with a time limit, and prints what it waits for. Imports no torch."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from pipeline.config.command_lines import format_pipeline_command
from pipeline.errors import LaunchError

SECONDS_BEFORE_FIRST_REPORT = 30.0
"""Seconds until it is said who is waited for; less where the timeout is short."""
DOCTOR_COMMAND = format_pipeline_command("doctor", "--hostfile", "HOSTFILE")


class TimedWait:
    """Waits in small steps and prints what it waits for, at intervals that double.

    Args:
        seconds: Limit after which it is given up.
        setting: Name of what sets the limit.
    """

    def __init__(self, seconds: float, setting: str = "distributed.timeout_seconds"):
        self._began = time.monotonic()
        self._seconds, self._setting = seconds, setting
        self._say_after = min(SECONDS_BEFORE_FIRST_REPORT, seconds / 4)

    def __call__(self, line: str, advice: str, print_progress: bool = True) -> None:
        """Wait a moment more.

        Raises:
            LaunchError: The limit is reached.
        """
        waited = time.monotonic() - self._began
        if waited > self._seconds:
            raise LaunchError(f"{line} after {waited:.0f} s ({self._setting}); {advice}")
        if waited > self._say_after and print_progress:
            print(f"waiting: {line} after {waited:.0f} s", file=sys.stderr, flush=True)
        if waited > self._say_after:
            self._say_after *= 2
        time.sleep(0.05)


def wait_for_port(
    host: str,
    port: int,
    what: str,
    wait: TimedWait,
    print_progress: bool = True,
    is_own_host: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until a process listens at the port, or the host turns out to be this machine.

    Args:
        host: Name or address to connect to.
        port: Port to connect to.
        what: Sentence that names the machine that does not reach the other.
        wait: Limits the wait and prints progress.
        print_progress: Whether to print progress.
        is_own_host: Returns whether the name has become one of this machine's; ends the wait.

    Raises:
        LaunchError: Nothing did in time, or there is no such name.
    """
    while not is_own_host():
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            wait(f"{what}, {host}:{port} ({reason})", f"what is in the way: {DOCTOR_COMMAND}", print_progress)


def find_own_address(host: str) -> str | None:
    """Return the first address of a name that is one of this machine's; None if none is."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # no name of any machine
        return None
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return str(address[0])
    return None


def find_free_port(host: str = "") -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
