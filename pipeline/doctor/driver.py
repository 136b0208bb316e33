"""The driver and the health of the cards: what nvidia-smi and the kernel say of them."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from pathlib import Path
from typing import TypedDict

from pipeline.distributed.driver import AMD, NVIDIA, ROOT, count_cards, driver_version, is_reachable, is_wsl

FIELDS = "index,persistence_mode,ecc.errors.uncorrected.volatile.total,retired_pages.pending"


class Health(TypedDict):
    """Of one GPU, as nvidia-smi tells it; `[N/A]` where the card has no such thing."""

    index: str
    persistence: str
    uncorrected: str
    """Errors of its memory since the driver was loaded."""
    pending: str
    """Whether pages wait for a reset to be retired."""


class Driver(TypedDict):
    """What stands between torch and the cards."""

    nvidia: str | None
    """Version of the kernel module, or of Windows' driver under WSL2; None: there is none."""
    cuda: str | None
    """The newest CUDA that it knows."""
    problem: str | None
    """Why nvidia-smi ends with an error, where there is a driver."""
    given: bool
    """This machine or container has a device of NVIDIA's."""
    cards: int
    """NVIDIA's on the PCI bus."""
    amd_cards: int
    amd_problem: str | None
    """Why /dev/kfd cannot be opened; None: it can, or is not there."""
    wsl: bool
    health: list[Health]
    xids: list[str]
    """The last faults of cards in the kernel's log, where this user may read it."""


def read_driver(root: Path = ROOT) -> Driver:
    """Of this machine."""
    code, said = _run(["nvidia-smi"])
    newest = re.search(r"CUDA Version\s*:\s*([\d.]+)", said)
    own = re.search(r"Driver Version\s*:\s*([\d.]+)", said)
    nvidia = driver_version(root) or (own[1] if own else None)
    lines = said.strip().splitlines()
    problem = (lines[-1].strip() if lines else f"code {code}") if code and nvidia is not None else None
    health = []
    if code == 0:
        _, answer = _run(["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"])
        rows = [row for row in csv.reader(answer.splitlines(), skipinitialspace=True) if len(row) == 4]
        health = [Health(index=a, persistence=b, uncorrected=c, pending=d) for a, b, c, d in rows]
    _, log = _run(["dmesg"])
    kfd, amd_problem = root / "dev/kfd", None
    if kfd.exists() and not os.access(kfd, os.R_OK | os.W_OK):
        amd_problem = "Permission denied"
    return Driver(
        nvidia=nvidia,
        cuda=newest[1] if newest else None,
        problem=problem,
        given=is_reachable(NVIDIA, root),
        cards=count_cards(NVIDIA, root),
        amd_cards=count_cards(AMD, root),
        amd_problem=amd_problem,
        wsl=is_wsl(root),
        health=health,
        xids=re.findall(r"Xid \(PCI:[\w:.]+\): \d+", log)[-3:],
    )


def _run(command: list[str]) -> tuple[int | None, str]:
    """(exit code, what it said); None: there is no such program, or it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=6, check=False)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return done.returncode, done.stdout + done.stderr
