"""Cards and their drivers, as the system's files show them: asks neither CUDA nor NVML, and imports no torch.

Folders are looked at below `root`, which is / but in tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.config.command_lines import own_command

ROOT = Path("/")
NVIDIA, AMD = "0x10de", "0x1002"
# By CUDA's major version: the oldest driver for Linux (CUDA's release notes, "minor version compatibility").
OLDEST = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


class Torch(NamedTuple):
    """How a torch was built."""

    version: str
    cuda: str | None
    """`13.0`; None: without CUDA."""
    hip: str | None


def driver_version(root: Path = ROOT) -> str | None:
    """Of NVIDIA's kernel module: `570.86.15`; None: it is not loaded, or Windows has it (WSL2)."""
    with suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _read(root / "proc/driver/nvidia/version"))
        return found[1] if found else None
    return None


def is_wsl(root: Path = ROOT) -> bool:
    """Whether this is Linux inside of Windows, which has the driver."""
    with suppress(OSError):
        return "microsoft" in _read(root / "proc/version").lower()
    return False


def is_reachable(vendor: str, root: Path = ROOT) -> bool:
    """Whether this machine, or container, was given a device of NVIDIA's or AMD's with its driver."""
    if vendor == AMD:
        return (root / "dev/kfd").exists()
    if is_wsl(root):
        return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return any((root / "dev").glob("nvidia[0-9]*"))


def count_cards(vendor: str, root: Path = ROOT) -> int:
    """Those on the PCI bus, with or without a driver."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            kind = _read(device / "class").strip()  # 03: display, 12: accelerators
            is_card = kind.startswith(("0x03", "0x12"))
            found += is_card and _read(device / "vendor").strip() == vendor
    return found


def too_old(driver: str, cuda: str) -> str | None:
    """The oldest driver that this CUDA runs on, where the driver is older."""
    oldest = OLDEST.get(int(cuda.partition(".")[0]))
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    return None if oldest is None or numbers >= oldest else str(oldest[0])


def idle_card(torch: Torch, environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """What to say where torch sees no GPU although there is one, and nobody asked for that."""
    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if environment.get("DS_ACCELERATOR") == "cpu" or any(environment.get(name) == "" for name in hiding):
        return None
    for vendor, own, kind in ((NVIDIA, torch.cuda, "CUDA"), (AMD, torch.hip, "ROCm")):
        if not is_reachable(vendor, root):
            continue
        if own is None:
            built = "a CPU build" if torch.cuda is None and torch.hip is None else f"built without {kind}"
            return f"this torch ({torch.version}) is {built}: {reinstall(torch.version, kind)}"
        driver = driver_version(root)
        if vendor == NVIDIA and driver is not None and (oldest := too_old(driver, own)) is not None:
            return (
                f"the driver {driver} is too old for torch's CUDA {own}: install driver {oldest} or newer, "
                "or torch's build of an earlier CUDA"
            )
        return f"torch ({torch.version}) sees none; what is found here: {own_command('doctor')}"
    return None


def reinstall(version: str, kind: str) -> str:
    """How torch of this version comes with CUDA or ROCm."""
    plain = version.partition("+")[0]
    if kind == "CUDA":  # what the package index gives for Linux
        return f"pip install --force-reinstall torch=={plain}"
    return f"install torch {plain} as built for {kind} (torch's own index of wheels has it)"


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
