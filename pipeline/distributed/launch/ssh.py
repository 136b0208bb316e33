"""Starts a module of this project on another node and exchanges messages with it.

A run's guard and the doctor's probe talk over standard input and output, a JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import LaunchError

NO_FOLDER, NO_PYTHON = 81, 82
"""Exit codes of a node that lacks the working folder, or its Python."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
SAY_AFTER = 10.0
"""Seconds until the console says which nodes are waited for; then after twice as many, and so on."""
LONGEST_LINE = 1 << 26  # bytes
_KEY = "pipeline"


def local_command(module: str) -> list[str]:
    """Return the command of a module on this machine."""
    return [sys.executable, "-m", module]


def ssh_command(host: str, module: str, folder: Path, python: str = sys.executable) -> list[str]:
    """Return the command of a module on a node. A missing folder or Python has an exit code of its own."""
    there, program = shlex.quote(str(folder)), shlex.quote(python)
    script = (
        f"cd {there} || exit {NO_FOLDER}; "
        f"test -x {program} || {{ echo no program {program} >&2; exit {NO_PYTHON}; }}; "
        f"exec {program} -m {module}"
    )
    options = [*SSH_OPTIONS, "-o", "ConnectTimeout=10"]
    # The log-in shell there may be any; `sh` is always there.
    return ["ssh", "-T", *options, "--", host, f"exec sh -c {shlex.quote(script)}"]


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps({_KEY: message}).encode() + b"\n"


def decode_message(line: bytes) -> dict[str, Any] | None:
    """Return the message of a line; None if it is none, as what a login script prints."""
    try:
        message = json.loads(line)[_KEY]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, dict) else None


class NodeProcess:
    """A process of ours on a node, which ends when its input does.

    Args:
        process: What leads to it; None if it has connected to this process by itself.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: Process | None = None,
    ):
        self.name = name
        self.step = "starting"
        """Step that the process reported last."""
        self.heard: Callable[[str], None] = lambda step: None
        """Called with each step."""
        self._reader = reader
        self._writer = writer
        self._process = process

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; if the process is gone nothing happens."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the process is gone. What a login script prints is skipped."""
        with suppress(OSError):
            while line := await self._reader.readline():
                message = decode_message(line)
                if message is None:
                    continue
                if "step" not in message:
                    return message
                self.step = message["step"]
                self.heard(self.step)
        return None

    async def last_words(self) -> str:
        """Return what the process, or ssh, has written to standard error. For one that has ended."""
        said = b""
        if self._process is not None and self._process.stderr is not None:
            with suppress(TimeoutError):  # another process may hold it open
                async with asyncio.timeout(2):
                    while part := await self._process.stderr.read(1 << 16):
                        said += part
        return said.decode(errors="replace").strip() or "the connection was closed"

    async def close(self, patience: float = 5.0) -> int | None:
        """End the process, by force after so many seconds. Returns its exit code."""
        with suppress(OSError):
            self._writer.close()
        if self._process is None:
            return None
        try:
            return await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()


async def start_process(name: str, command: Sequence[str]) -> NodeProcess:
    """Start the command that leads to a node.

    Raises:
        LaunchError: Its program is not on this machine.
    """
    try:
        # A session of its own: Ctrl-C must not end the connection.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=LONGEST_LINE
        )
    except FileNotFoundError:
        program = command[0]
        raise LaunchError(
            f"{program} is not on this machine: install it (apt-get install {program})"
        ) from None
    assert process.stdout is not None
    assert process.stdin is not None
    return NodeProcess(name, process.stdout, process.stdin, process)


async def wait_and_report(
    tasks: Mapping[str, asyncio.Task[Any]], describe: Callable[[str], str] = str
) -> None:
    """Wait for all tasks, and say on the console which of them are waited for.

    Args:
        tasks: Name of a node -> what waits for it.
        describe: Gives the words for a name.
    """
    waited, patience = 0.0, SAY_AFTER
    while (await asyncio.wait(tasks.values(), timeout=patience))[1]:
        waited += patience
        patience = waited
        late = [describe(name) for name, task in tasks.items() if not task.done()]
        print(f"waiting: {', '.join(late)} after {waited:.0f} s", file=sys.stderr, flush=True)
