"""Processes of ours on other nodes, a run's guard and the doctor's probe: how they start, and their protocol.

An agent is a module of this project that talks over its standard input and output, through ssh or as a
process here: a JSON object a line. What else comes (a log-in script that prints) is no message.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_FOLDER, NO_PYTHON = 81, 82
"""Exit codes of a node that has not the working folder, or not its Python."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
_KEY = "pipeline"


def local_command(module: str) -> list[str]:
    """Starts an agent on this machine."""
    return [sys.executable, "-m", module]


def ssh_command(
    host: str, module: str, folder: Path, python: str = sys.executable, port: int | None = None
) -> list[str]:
    """Starts an agent on a node; a folder or Python that is missing there has an exit code of its own."""
    there, program = shlex.quote(str(folder)), shlex.quote(python)
    script = (
        f"cd {there} || exit {NO_FOLDER}; "
        f"test -x {program} || {{ echo no program {program} >&2; exit {NO_PYTHON}; }}; "
        f"exec {program} -m {module}"
    )
    options = [*SSH_OPTIONS, "-o", "ConnectTimeout=10", *([] if port is None else ["-p", str(port)])]
    # The log-in shell there may be any; `sh` is always there.
    return ["ssh", "-T", *options, "--", host, f"exec sh -c {shlex.quote(script)}"]


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps({_KEY: message}).encode() + b"\n"


def unpack(line: bytes) -> dict[str, Any] | None:
    """The message of a line; None: it is none."""
    try:
        message = json.loads(line)[_KEY]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, dict) else None
