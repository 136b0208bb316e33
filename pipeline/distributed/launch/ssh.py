"""Starts a module of this project on a node and exchanges messages with its process.

The modules are the guard of a run and the probe of the doctor. They exchange messages over standard input and
output. Each message is one line with a JSON object.
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

NO_FOLDER = 81
"""Exit code of a node without the working folder."""
NO_PYTHON = 82
"""Exit code of a node without the Python of the launch script."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
"""Options with which ssh never asks for a password, and ends about 10 s after its connection has broken."""
FIRST_REPORT_SECONDS = 10.0
"""Seconds until the console names the nodes that have not answered, and again after 2, 4, 8 times as long."""
MAX_MESSAGE_BYTES = 1 << 26
_MESSAGE_KEY = "pipeline"  # key of the JSON object that marks a line as a message


def local_command(module: str) -> list[str]:
    """Return the command that runs a module of this project on this machine."""
    return [sys.executable, "-m", module]


def ssh_command(host: str, module: str, folder: Path, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module on a node through ssh.

    The command ends with `NO_FOLDER` if the node lacks the folder, and with `NO_PYTHON` if it lacks Python at
    the path.

    Args:
        host: Name of the node, as ssh knows it.
        module: Name of the module.
        folder: Working folder on the node.
        python: Path of Python on the node.
    """
    quoted_folder = shlex.quote(str(folder))
    program = shlex.quote(python)
    script = (
        f"cd {quoted_folder} || exit {NO_FOLDER}; "
        f"test -x {program} || {{ echo no program {program} >&2; exit {NO_PYTHON}; }}; "
        f"exec {program} -m {module}"
    )
    options = [*SSH_OPTIONS, "-o", "ConnectTimeout=10"]
    # The login shell of the node may have another syntax; `sh` exists on every node.
    return ["ssh", "-T", *options, "--", host, f"exec sh -c {shlex.quote(script)}"]


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps({_MESSAGE_KEY: message}).encode() + b"\n"


def decode_message(line: bytes) -> dict[str, Any] | None:
    """Return the message in a line; `None` for a line without one, such as the output of a login script."""
    try:
        message = json.loads(line)[_MESSAGE_KEY]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, dict) else None


class NodeProcess:
    """Connection to a process of this project on a node. The process ends when its input ends.

    Args:
        name: Name of the node.
        reader: Stream of messages from the process.
        writer: Stream of messages to the process.
        process: Local process of the connection: ssh, or the process itself if the node is this machine.
            `None` if the process on the node has connected by itself.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: Process | None = None,
    ):
        self.name = name
        """Name of the node."""
        self.step = "starting"
        """Latest step that the process has reported, such as a check that it runs."""
        self.on_step: Callable[[str], None] = lambda step: None
        """Function that `receive` calls with each step that the process reports."""
        self._reader = reader
        self._writer = writer
        self._process = process

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or do nothing if the process is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message, or `None` if the process is gone.

        The output of login scripts is skipped. A message with a step is not returned: it sets `step` and
        calls `on_step`.
        """
        with suppress(OSError):
            while line := await self._reader.readline():
                message = decode_message(line)
                if message is None:
                    continue
                if "step" not in message:
                    return message
                self.step = message["step"]
                self.on_step(self.step)
        return None

    async def read_stderr(self) -> str:
        """Return what the process or ssh wrote to standard error. Call it after the process has ended.

        The text is never empty.
        """
        output = b""
        if self._process is not None and self._process.stderr is not None:
            with suppress(TimeoutError):  # a child of the process may keep standard error open
                async with asyncio.timeout(2):
                    while part := await self._process.stderr.read(1 << 16):
                        output += part
        return output.decode(errors="replace").strip() or "the connection was closed"

    async def close(self, timeout_seconds: float = 5.0) -> int | None:
        """Close the connection, which ends the process.

        Args:
            timeout_seconds: Seconds that the local process has to end before it is killed.

        Returns:
            Exit code of the local process; `None` if there is no local process.
        """
        with suppress(OSError):
            self._writer.close()
        if self._process is None:
            return None
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_seconds)
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()


async def start_process(name: str, command: Sequence[str]) -> NodeProcess:
    """Start the command that connects to a node.

    Args:
        name: Name of the node.
        command: Result of `ssh_command` or `local_command`.

    Raises:
        LaunchError: The program of the command is not installed on this machine.
    """
    try:
        # In a new session Ctrl-C does not reach the process, so the connection survives it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=MAX_MESSAGE_BYTES
        )
    except FileNotFoundError:
        program = command[0]
        raise LaunchError(
            f"{program} is not on this machine; install it: apt-get install {program}"
        ) from None
    assert process.stdout is not None
    assert process.stdin is not None
    return NodeProcess(name, process.stdout, process.stdin, process)


async def wait_and_report(
    tasks: Mapping[str, asyncio.Task[Any]], describe: Callable[[str], str] = str
) -> None:
    """Wait for all tasks, and print after 10, 20, 40 s (and so on) which of them have not ended.

    Args:
        tasks: Name of each node -> the task that waits for it.
        describe: Function that returns the text about a node from its name.
    """
    waited_seconds = 0.0
    interval = FIRST_REPORT_SECONDS
    while True:
        _, pending = await asyncio.wait(tasks.values(), timeout=interval)
        if not pending:
            return
        waited_seconds += interval
        interval = waited_seconds  # each report comes after twice as long as the one before
        late = [describe(name) for name, task in tasks.items() if not task.done()]
        print(f"waiting: {', '.join(late)} after {waited_seconds:.0f} s", file=sys.stderr, flush=True)
