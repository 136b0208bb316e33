"""Starts a module of this project on another node and exchanges messages with it.

The guard of a run and the probe of the doctor exchange messages over standard input and output. Each message
is one line with a JSON object.
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
FIRST_REPORT_SECONDS = 10.0
"""Seconds until the console names the nodes that have not answered; it repeats that at 2, 4, 8 times this."""
MAX_MESSAGE_BYTES = 1 << 26  # bytes of one message
_MESSAGE_KEY = "pipeline"


def local_command(module: str) -> list[str]:
    """Return the command that runs a module on this machine."""
    return [sys.executable, "-m", module]


def ssh_command(host: str, module: str, folder: Path, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module on a node through ssh.

    Without the folder the command ends with `NO_FOLDER`, without the Python with `NO_PYTHON`.

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
    """Return the message in a line; `None` for other text, such as the output of a login script."""
    try:
        message = json.loads(line)[_MESSAGE_KEY]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, dict) else None


class NodeProcess:
    """Connection to a process of this project on a node; the process ends when its input ends.

    Args:
        name: Name of the node.
        reader: Stream of messages from the process.
        writer: Stream of messages to the process.
        process: Local process that carries the connection, such as ssh; `None` if the process on the node
            has connected by itself.
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
        self.on_step: Callable[[str], None] = lambda step: None
        """Function that is called with each step that the process reports."""
        self._reader = reader
        self._writer = writer
        self._process = process

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or do nothing if the process is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message, or `None` if the process is gone.

        It skips the output of login scripts. A message with a step sets `step` and is not returned.
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
        """Return the text that the process or ssh wrote to standard error; call it after the end."""
        output = b""
        if self._process is not None and self._process.stderr is not None:
            with suppress(TimeoutError):  # another process may keep standard error open
                async with asyncio.timeout(2):
                    while part := await self._process.stderr.read(1 << 16):
                        output += part
        return output.decode(errors="replace").strip() or "the connection was closed"

    async def close(self, patience: float = 5.0) -> int | None:
        """Close the connection, which ends the process.

        Args:
            patience: Seconds until the local process is killed.

        Returns:
            Exit code of the local process; `None` if there is none.
        """
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
    """Wait for all tasks, and print now and then which of them have not ended.

    Args:
        tasks: Task that waits for each node, by the name of the node.
        describe: Function that returns the text for a name.
    """
    waited = 0.0
    patience = FIRST_REPORT_SECONDS
    while (await asyncio.wait(tasks.values(), timeout=patience))[1]:
        waited += patience
        patience = waited
        late = [describe(name) for name, task in tasks.items() if not task.done()]
        print(f"waiting: {', '.join(late)} after {waited:.0f} s", file=sys.stderr, flush=True)
