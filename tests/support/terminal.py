"""Programs in a terminal of their own."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from support.forked import HAS_GPU, Program


def in_terminal(program: str, columns: int) -> str:
    """What the program writes to a terminal of that many columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = _environment(columns)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    return _written(process, ours, theirs)


def launch_in_terminal(words: Sequence[str], **extra: str) -> str:
    """What a script with its arguments writes to one of 100 columns; forked where it can be."""
    environment = _environment(100) | extra
    ours, theirs = pty.openpty()
    process: Program | subprocess.Popen[bytes]
    if HAS_GPU:
        command = [sys.executable, *words]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    else:
        process = Program(words, environment, Path(os.ttyname(theirs)))
        opened = select.poll()  # which takes descriptors above 1,023, as a long session of tests has them
        opened.register(ours, select.POLLIN)
        opened.poll()
    return _written(process, ours, theirs)


def _environment(columns: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI", "LINES")}
    return kept | {"TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"}


def _written(process: Program | subprocess.Popen[bytes], ours: int, theirs: int) -> str:
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:
        pass  # Linux ends a pty with EIO
    finally:
        os.close(ours)
    assert process.wait() == 0, output.decode()
    return output.decode().replace("\r\n", "\n")
