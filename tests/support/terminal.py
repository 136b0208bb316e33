"""Programs in a terminal of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap


def run_in_terminal(program: str, columns: int) -> str:
    """What the program writes to a terminal of that many columns."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=kept | {"TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"},
    )
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
