"""Runs programs in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap


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
