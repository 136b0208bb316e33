"""The hostfile: a machine a line, `worker-1 slots=8`, as the deepspeed launcher has it, its mistakes told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import LaunchError
from pipeline.foreign import CONFIGURATION, read_plain

LINE = re.compile(r"(?P<name>[^\s#=]+)\s+slots=(?P<slots>[0-9]{1,6})")
# What neither a shell, nor ssh, nor pdsh, nor the launcher's NAME:0,1@NAME takes for something else.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXAMPLE = "worker-1 slots=8"


@dataclass(frozen=True)
class Host:
    """A machine of the job."""

    name: str
    """As ssh knows it."""
    slots: int
    """Ranks on it: its GPUs, or processes on a CPU."""


def read_hostfile(path: Path) -> list[Host]:
    """The machines, in the file's order: the first is the master.

    Raises:
        LaunchError: no such file, a line that is not `NAME slots=N`, a name with other
            characters than a name has, a name twice, or no machine at all.
    """
    try:
        lines = read_plain(path, CONFIGURATION).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise LaunchError(
            f"hostfile {path}: {reason}; give a file with a line for each machine, as {EXAMPLE!r}"
        ) from None
    found: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = LINE.fullmatch(words)
        if match is None or int(match["slots"]) == 0:
            raise LaunchError(f"{path}:{number}: {line.strip()!r} is not a machine; write it as {EXAMPLE!r}")
        name = match["name"]
        if NAME.fullmatch(name) is None:
            raise LaunchError(
                f"{path}:{number}: {name!r} is no name of a machine (letters, digits, '.', '_', '-'); give "
                "the machine such a name in ~/.ssh/config, with its user, address and port there"
            )
        if name in found:
            raise LaunchError(
                f"{path}:{number}: {name} is on line {found[name][0]} already; give each machine one line "
                "with all its slots"
            )
        found[name] = (number, int(match["slots"]))
    if not found:
        raise LaunchError(f"hostfile {path} names no machine; add a line for each, as {EXAMPLE!r}")
    return [Host(name, slots) for name, (_, slots) in found.items()]
