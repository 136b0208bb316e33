"""Guards the ranks of one run on a node; a launch script starts it.

It runs as `python -m pipeline.distributed.launch.node_guard`. The guard stores the environment, forwards
signals and reports how each rank ended. It ends the remaining processes of the run when the launch script
asks for it, or when the script is gone: the script was killed, or the connection to it broke. The guard
touches only processes that were started with this run's PIPELINE_ENVIRONMENT.

DeepSpeed's own launcher (0.19) has three faults. It ends with 0 after its launch.py was killed. It ends
processes of other jobs with `pkill -f`. And it puts every exported value on a command line, which all users
of the machine can read; the guard receives the environment through ssh's standard input.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.distributed.launch.environment import write_document
from pipeline.distributed.launch.ssh import decode_message, encode_message
from pipeline.distributed.machine import count_kills, read_kernel_kills
from pipeline.distributed.ranks import ENVIRONMENT_FILE_VARIABLE
from pipeline.distributed.waiting import find_free_port

# Seconds without input after which the launch script counts as gone. The script sends a message every 5 s.
SILENCE_TIMEOUT = 30.0
READ_SECONDS = 1.0  # seconds that one read of the connection waits for input
POLL_SECONDS = 0.1
EXIT_TIMEOUT = 3.0  # seconds that the children of a rank, and its launcher, have to end after the rank
# Scans of /proc in a row. Each scan finds the children of processes that ended during the scan before it.
MAX_SCANS = 10
# Attempts to kill all processes. The number is limited, because a process that waits for a dead disk cannot
# be killed.
MAX_KILL_ATTEMPTS = 10
RANK_VARIABLES = (b"RANK=", b"OMPI_COMM_WORLD_RANK=")  # every rank has one of these, with its number


class Connection:
    """Connection of the guard to the launch script, over standard input and output."""

    def __init__(self) -> None:
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._last_input = time.monotonic()
        self.is_open = True
        """Whether the launch script counts as alive, so that more messages can come."""

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for input, and return the messages in it.

        Sets `is_open` to False at the end of the input, and after `SILENCE_TIMEOUT` seconds without input.

        Args:
            seconds: Limit of the wait.
        """
        if not self.is_open:
            time.sleep(seconds)
            return []
        if self._selector.select(seconds):
            data = os.read(0, 1 << 16)
            self._last_input = time.monotonic()
            self.is_open = bool(data)
            self._buffer += data
        elif time.monotonic() - self._last_input > SILENCE_TIMEOUT:
            self.is_open = False
        *lines, self._buffer = self._buffer.split(b"\n")
        return [message for line in lines if (message := decode_message(line)) is not None]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the launch script, or do nothing if the script is gone."""
        with suppress(OSError):
            os.write(1, encode_message(message))


class Guard:
    """Finds, signals and ends the processes of one run on this machine.

    Args:
        path: File with the environment. Every process of the run has this path in PIPELINE_ENVIRONMENT.
    """

    def __init__(self, path: Path):
        self.path = path
        """File with the environment. The ranks write their exit records into the same folder."""
        self._marker = f"{ENVIRONMENT_FILE_VARIABLE}={path}".encode()
        self._processes: list[psutil.Process] = []

    def find_processes(self) -> list[psutil.Process]:
        """Return every process of the run, from /proc.

        One scan can miss a process in two ways. A process may start during the scan while its parent ends. So
        a scan that finds no process is repeated, for pids that are new since then. And a process may be in
        the middle of `exec` and have no variables yet. So its variables are read again.
        """
        self._processes = []
        examined: set[int] = set()
        deadline = time.monotonic() + EXIT_TIMEOUT
        for _ in range(MAX_SCANS):
            pids = set(psutil.pids()) - examined
            if self._processes or not pids:
                break
            examined |= pids
            while pids:
                pids = {pid for pid in pids if not self._examine(pid)}
                if time.monotonic() > deadline:
                    break
        return self._processes

    def _examine(self, pid: int) -> bool:
        """Add a process to the list if it belongs to the run.

        Returns:
            Whether the answer is certain. It is not while the process is in the middle of `exec`.
        """
        variables = _read_environment(pid)
        if variables is not None and self._marker in variables:
            with suppress(psutil.Error):
                self._processes.append(psutil.Process(pid))
        return variables is not None

    def is_running(self) -> bool:
        """Return whether a process of the run exists.

        /proc is scanned only if all processes of the last scan have ended, since a scan takes time.
        """
        return any(_is_alive(process) for process in self._processes) or bool(self.find_processes())

    def find_ranks(self) -> list[psutil.Process]:
        """Return the processes that are ranks, without their launcher and without their children."""
        candidates = []
        for process in self.find_processes():
            variables = _read_environment(process.pid) or ()
            if any(variable.startswith(RANK_VARIABLES) for variable in variables):
                candidates.append(process)
        # The children of a rank inherit its variables, so a candidate with such a parent is no rank.
        pids = {process.pid for process in candidates}
        ranks = []
        for process in candidates:
            with suppress(psutil.Error):
                if process.ppid() not in pids:
                    ranks.append(process)
        return ranks

    def send_signal(self, number: int, skipped_pids: Container[int] = ()) -> list[int]:
        """Send a signal to each rank except those with `skipped_pids`.

        Returns:
            Pids of all ranks, also of those that were skipped.
        """
        ranks = self.find_ranks()
        for process in ranks:
            if process.pid not in skipped_pids:
                with suppress(psutil.Error):
                    process.send_signal(number)
        return [process.pid for process in ranks]

    def kill(self) -> int:
        """Kill all remaining processes of the run, and return their number."""
        killed = set()
        for _ in range(MAX_KILL_ATTEMPTS):
            for process in self.find_processes():
                with suppress(psutil.Error):
                    process.kill()
                    killed.add(process.pid)
            if not self._processes:
                break
            psutil.wait_procs(self._processes, timeout=READ_SECONDS)
        return len(killed)

    def read_exit_records(self) -> dict[str, Any]:
        """Return the exit record of each rank that wrote one, keyed by the rank as text."""
        records = {}
        for file in self.path.parent.glob("rank-*"):
            if file.suffix != ".part":
                records[file.name.removeprefix("rank-")] = json.loads(file.read_text())
        return records


def _read_environment(pid: int) -> list[bytes] | None:
    """Return the variables that a process was started with, each as NAME=VALUE.

    The result is `None` if the process is in the middle of `exec`. It is empty if the process has no
    variables, has ended, or belongs to another user.
    """
    folder = Path(f"/proc/{pid}")
    try:
        variables = (folder / "environ").read_bytes()
        if variables:
            return variables.split(b"\0")
        # See proc(5). A thread of the kernel and a dead process have no memory. For a process that was
        # started without variables (env -i), the area of the variables has length 0. For a process in the
        # middle of `exec` it has length 0 too, but the code has no address yet: the kernel sets it later.
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        memory = fields[20]
        code_start = fields[23]
        variables_start = fields[47]
        variables_end = fields[48]
        has_empty_area = code_start != b"0" and variables_start == variables_end
        has_no_variables = memory == b"0" or has_empty_area
        return [] if has_no_variables else None
    except OSError:
        return []


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def describe_node() -> dict[str, Any]:
    """Return the `address` of this machine and a free `port` on it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = words[2] if len(words) == 4 else ""
    if not address or address.startswith(("127.", "::1")):
        # The launch script runs on this machine. Take the address that deepspeed itself would take.
        with suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=5, check=True)
            address = (result.stdout.split() or [""])[0]
    return {"address": address or socket.gethostname(), "port": find_free_port()}


def watch_run(guard: Guard, connection: Connection) -> dict[str, Any]:
    """Watch the run until the launch script asks to end it or is gone, and end the run.

    Returns:
        The last message for the launch script; empty if the script is gone.
    """
    has_started = False
    has_ended = False
    start_time = time.monotonic()
    kills_before = count_kills()
    while True:
        for message in connection.read(READ_SECONDS):
            if "signal" in message:
                guard.send_signal(message["signal"])
            if "end" in message:
                num_killed = end_run(guard, message["end"])
                # Each source may be unreadable, and then gives 0.
                num_kernel_kills = max(len(read_kernel_kills(start_time)), count_kills() - kills_before)
                return {
                    "ended": guard.read_exit_records(),
                    "killed": num_killed,
                    "killed_for_memory": num_kernel_kills,
                }
        if not connection.is_open:
            end_run(guard, SILENCE_TIMEOUT)
            return {}
        if not has_ended:
            is_running = guard.is_running()
            has_started = has_started or is_running
            if has_started and not is_running:
                has_ended = True
                connection.send({"gone": guard.read_exit_records()})


def end_run(guard: Guard, seconds: float) -> int:
    """Ask the ranks to save and end, then kill the remaining processes of the run.

    Args:
        guard: Guard of the run.
        seconds: Time that the ranks have to save and end.

    Returns:
        Number of processes that had to be killed.
    """
    deadline = time.monotonic() + seconds
    signaled: list[int] = []
    while True:
        ranks = guard.send_signal(signal.SIGTERM, signaled)
        if not ranks or time.monotonic() >= deadline:
            break
        signaled += ranks  # the next call reaches only ranks that the launcher starts meanwhile
        time.sleep(POLL_SECONDS)
    deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT)
    while guard.is_running() and time.monotonic() < deadline:
        signaled += guard.send_signal(signal.SIGTERM, signaled)
        time.sleep(POLL_SECONDS)
    return guard.kill()


def main() -> int:
    """Read the first message from standard input, guard the run, and return the exit code of the guard.

    The code is 1 if the launch script is gone before its first message, or if the folder cannot be created.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of standard input ends the guard
    connection = Connection()
    messages: list[dict[str, Any]] = []
    while not messages and connection.is_open:
        messages = connection.read(READ_SECONDS)
    if not messages:
        return 1
    document = messages[0]
    folder = Path(document["folder"])
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        connection.send({"problem": f"cannot create {folder}: {error.strerror}"})
        return 1
    try:
        path = folder / "environment.json"
        write_document(path, document)
        connection.send({"ready": describe_node()})
        report = watch_run(Guard(path), connection)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    connection.send(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
