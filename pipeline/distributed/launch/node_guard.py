"""Guards the ranks of one run on a node; a launch script starts it.

It runs as `python -m pipeline.distributed.launch.node_guard`. It stores the environment, forwards signals and
reports how each rank ended. It ends what is left of the run if the launch script says so, or falls silent: it
was killed or cut off. It touches only processes that were started with this run's PIPELINE_ENVIRONMENT.
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
from pipeline.distributed.ranks import ENVIRONMENT_FILE
from pipeline.distributed.waiting import find_free_port

SILENCE = 30.0  # seconds without a word from the launch script, which speaks every five
TICK = 1.0
POLL = 0.1
LAST = 3.0  # that a rank's children, and the launcher above it, have after it
GENERATIONS = 10  # of processes that one look follows, each started by one that left at once
RANK_NAMES = (b"RANK=", b"OMPI_COMM_WORLD_RANK=")


class Connection:
    """The connection to the launch script, over standard input and output."""

    def __init__(self) -> None:
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self.heard_at = time.monotonic()
        self.is_open = True

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Return what comes within so many seconds; `is_open` turns False if nothing will come any more."""
        if not self.is_open:
            time.sleep(seconds)
            return []
        if self._selector.select(seconds):
            data = os.read(0, 1 << 16)
            self.heard_at = time.monotonic()
            self.is_open = bool(data)
            self._buffer += data
        elif time.monotonic() - self.heard_at > SILENCE:
            self.is_open = False
        *lines, self._buffer = self._buffer.split(b"\n")
        return [message for line in lines if (message := decode_message(line)) is not None]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the launch script; if it is gone nothing happens."""
        with suppress(OSError):
            os.write(1, encode_message(message))


class Guard:
    """The processes of one run on this machine."""

    def __init__(self, path: Path):
        self.path = path
        self._marker = f"{ENVIRONMENT_FILE}={path}".encode()
        self._known: list[psutil.Process] = []

    def find(self) -> list[psutil.Process]:
        """Return every process of the run, from /proc.

        A process can hide: one that is started while /proc is read and whose parent leaves meanwhile, or one
        that is on its way into another program and has no variables yet. Such ones are looked at again.
        """
        self._known = []
        seen: set[int] = set()
        deadline = time.monotonic() + LAST
        for _ in range(GENERATIONS):
            fresh = set(psutil.pids()) - seen
            if self._known or not fresh:
                break
            seen |= fresh
            while fresh:
                fresh = {pid for pid in fresh if not self._is_read(pid)}
                if time.monotonic() > deadline:
                    break
        return self._known

    def _is_read(self, pid: int) -> bool:
        """Return whether a process could be looked at; if it is the run's it is known from now on."""
        variables = _environment(pid)
        if variables is not None and self._marker in variables:
            with suppress(psutil.Error):
                self._known.append(psutil.Process(pid))
        return variables is not None

    def is_running(self) -> bool:
        """Return whether any process of the run is there. Looks for new ones if the known ones are gone."""
        return any(_lives(process) for process in self._known) or bool(self.find())

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks among the processes: not the launcher above, nor a rank's own children."""
        marked = [p for p in self.find() if any(v.startswith(RANK_NAMES) for v in _environment(p.pid) or ())]
        pids = {process.pid for process in marked}
        found = []
        for process in marked:
            with suppress(psutil.Error):
                if process.ppid() not in pids:
                    found.append(process)
        return found

    def send(self, number: int, told: Container[int] = ()) -> list[int]:
        """Send a signal to each rank whose pid is not in `told`; return the pids of all ranks."""
        ranks = self.ranks()
        for process in ranks:
            if process.pid not in told:
                with suppress(psutil.Error):
                    process.send_signal(number)
        return [process.pid for process in ranks]

    def kill(self) -> int:
        """Kill all that is left; return how many processes that were."""
        killed = set()
        for _ in range(10):  # what waits for a dead disk cannot be killed
            for process in self.find():
                with suppress(psutil.Error):
                    process.kill()
                    killed.add(process.pid)
            if not self._known:
                break
            psutil.wait_procs(self._known, timeout=TICK)
        return len(killed)

    def exit_records(self) -> dict[str, Any]:
        """Return the exit record that each rank wrote."""
        found = {}
        for file in self.path.parent.glob("rank-*"):
            if file.suffix != ".part":
                found[file.name.removeprefix("rank-")] = json.loads(file.read_text())
        return found


def _environment(pid: int) -> list[bytes] | None:
    """Return the variables that a process was started with; None if it is on its way into a program."""
    folder = Path(f"/proc/{pid}")
    try:
        if variables := (folder / "environ").read_bytes():
            return variables.split(b"\0")
        # proc(5): a thread of the kernel and a dead process have no memory; what was started without
        # variables (env -i) has a place for them, of no length. So has one in exec, whose code has no
        # address yet: the kernel writes that after the variables.
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        memory, code, start, end = fields[20], fields[23], fields[47], fields[48]
        has_none = memory == b"0" or (code != b"0" and start == end)
        return [] if has_none else None
    except OSError:  # gone, or another user's
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def describe_node() -> dict[str, Any]:
    """Return where this machine can be reached, and a free port on it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = words[2] if len(words) == 4 else ""
    if not address or address.startswith(("127.", "::1")):
        # The launch script runs on this very machine: what deepspeed itself would ask.
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=5, check=True)
            address = (answer.stdout.split() or [""])[0]
    return {"address": address or socket.gethostname(), "port": find_free_port()}


def watch_run(guard: Guard, connection: Connection) -> dict[str, Any]:
    """Watch until the launch script says that the run is over, or is gone; return the last message to it."""
    started = gone = False
    began, kills_before = time.monotonic(), count_kills()
    while True:
        for message in connection.read(TICK):
            if "signal" in message:
                guard.send(message["signal"])
            if "end" in message:
                killed = end_run(guard, message["end"])
                return {
                    "ended": guard.exit_records(),
                    "killed": killed,
                    "killed_for_memory": max(len(read_kernel_kills(began)), count_kills() - kills_before),
                }
        if not connection.is_open:
            end_run(guard, SILENCE)
            return {}
        if not gone:
            running = guard.is_running()
            started = started or running
            if started and not running:
                gone = True
                connection.send({"gone": guard.exit_records()})


def end_run(guard: Guard, seconds: float) -> int:
    """Ask the ranks to save and leave; after so many seconds kill what is left, and return how many."""
    deadline = time.monotonic() + seconds
    told: list[int] = []
    while (ranks := guard.send(signal.SIGTERM, told)) and time.monotonic() < deadline:
        told += ranks  # a launcher may just be starting more
        time.sleep(POLL)
    deadline = min(deadline, time.monotonic() + LAST)
    while guard.is_running() and time.monotonic() < deadline:
        told += guard.send(signal.SIGTERM, told)
        time.sleep(POLL)
    return guard.kill()


def main() -> int:
    """Read the run's document from standard input, and guard the run."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # standard input tells when to go
    connection = Connection()
    messages: list[dict[str, Any]] = []
    while not messages and connection.is_open:
        messages = connection.read(TICK)
    if not messages:
        return 1
    document = messages[0]
    folder = Path(document["folder"])
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        connection.send({"problem": f"{folder}: {error.strerror}"})
        return 1
    try:
        path = folder / "environment.json"
        write_document(path, document)
        connection.send({"ready": describe_node()})
        last = watch_run(Guard(path), connection)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    connection.send(last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
