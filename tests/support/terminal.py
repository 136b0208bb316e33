"""Runs programs in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import textwrap
from collections.abc import Mapping, Sequence

from support.fork_server import process_context, run_program

PATIENCE = 120.0  # seconds without any output


def run_in_terminal(program: str, columns: int) -> str:
    """Run a Python program in a terminal of so many columns, and return its output."""
    own_end, program_end = pty.openpty()
    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=program_end,
        stdout=program_end,
        stderr=program_end,
        env=inherited | {"TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"},
    )
    os.close(program_end)
    output = b""
    try:
        while chunk := os.read(own_end, 65536):
            output += chunk
    except OSError:
        pass  # Linux reports EIO at the end of a terminal's output
    finally:
        os.close(own_end)
    assert process.wait() == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


class TerminalProgram:
    """Runs `python *arguments` in a terminal, in a fork with the imports done, and types into it.

    Args:
        arguments: Script, or `-m` and a module, with its arguments.
        environment: All variables of the program.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._own_end, program_end = pty.openpty()
        termios.tcsetwinsize(program_end, (24, 1000))  # so that no line is wrapped
        self._process = process_context().Process(
            target=_run_in_terminal, args=(os.ttyname(program_end), list(arguments), dict(environment))
        )
        self._process.start()
        self._program_end = program_end  # open to the end, so that its output can be read after that
        self._unread = b""

    def type(self, text: str) -> None:
        """Type a text; the characters 3 and 4 are Ctrl-C and Ctrl-D."""
        os.write(self._own_end, text.encode())

    def read_to(self, text: str) -> str:
        """Return the output up to and including a text."""
        while text.encode() not in self._unread:
            ready, _, _ = select.select([self._own_end], [], [], PATIENCE)
            assert ready, f"{text!r} is missing after {self._unread.decode(errors='replace')!r}"
            self._unread += os.read(self._own_end, 65536)
        before, found, self._unread = self._unread.partition(text.encode())
        return (before + found).decode().replace("\r\n", "\n")

    def wait(self) -> int:
        """Wait for the end of the program and return its exit code."""
        self._process.join(300)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def close(self) -> None:
        """End the program if it runs."""
        self._process.kill()
        self._process.join()
        os.close(self._own_end)
        os.close(self._program_end)


def _run_in_terminal(terminal: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)  # a session leader's first terminal controls it: Ctrl-C arrives
    for number in range(3):
        os.dup2(descriptor, number)
    sys.stdin = os.fdopen(0)
    run_program(arguments, environment, [])
