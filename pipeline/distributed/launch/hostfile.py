"""Reads a hostfile with lines such as `worker-1 slots=8`, and chooses the devices of a run.

Hostfile and options have the syntax of the deepspeed launcher. Input that this launcher would silently
misread is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import LaunchError
from pipeline.files import MAX_CONFIGURATION_BYTES, read_regular_file

LINE_PATTERN = re.compile(r"(?P<name>[^\s#=]+)\s+slots=(?P<slots>[0-9]{1,6})")
# Names of these characters mean nothing else to a shell, to ssh, to pdsh, or in --include NAME:0,1@NAME.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXAMPLE_LINE = "worker-1 slots=8"
NUMBER_PATTERN = re.compile(r"[0-9]{1,6}")
Devices = dict[str, list[int]]
"""Name of each machine -> the numbers of its devices, in the order of the ranks."""


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the number of slots (ranks) of each machine, in the order of the file.

    The keys are the names by which ssh knows the machines. The first machine is the master.

    Raises:
        LaunchError: The file cannot be read or lists no machine, a line is not `NAME slots=N`, or a name is
            invalid or repeated.
    """
    try:
        lines = read_regular_file(path, MAX_CONFIGURATION_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise LaunchError(
            f"hostfile {path}: {reason}; give a file with one line per machine, such as {EXAMPLE_LINE!r}"
        ) from None
    found: dict[str, tuple[int, int]] = {}  # name -> line number and slots
    for line_number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = LINE_PATTERN.fullmatch(entry)
        if match is None or int(match["slots"]) == 0:
            raise LaunchError(
                f"{path}:{line_number}: got {line.strip()!r}, expected a name and a number of ranks; write a "
                f"line such as {EXAMPLE_LINE!r}"
            )
        name = match["name"]
        if NAME_PATTERN.fullmatch(name) is None:
            raise LaunchError(
                f"{path}:{line_number}: got the name {name!r}, expected letters, digits, '.', '_' and '-'; "
                "give the machine such a name in ~/.ssh/config, with its user, address and port there"
            )
        if name in found:
            raise LaunchError(
                f"{path}:{line_number}: {name} is already on line {found[name][0]}; give each machine one "
                "line with all its slots"
            )
        found[name] = (line_number, int(match["slots"]))
    if not found:
        raise LaunchError(f"hostfile {path} lists no machine; add a line such as {EXAMPLE_LINE!r} for each")
    return {name: slots for name, (_, slots) in found.items()}


@dataclass(frozen=True)
class Selection:
    """Options with which the user selects machines and devices, as text."""

    include: str = ""
    """Machines and devices to use, as NAME:0,1@NAME."""
    exclude: str = ""
    """Machines and devices to leave out, in the same format."""
    num_nodes: int | None = None
    """Number of machines to use, from the first one; `None` for all."""
    num_gpus: int | None = None
    """Number of devices to use on each machine, from the first one; `None` for all."""
    visible: str | None = None
    """Value of CUDA_VISIBLE_DEVICES in the shell; it selects the same devices on every machine."""
    source: str = "the hostfile"
    """Source of the available devices, for messages."""


def choose_devices(slots: Mapping[str, int], wanted: Selection) -> Devices:
    """Return the devices of the run.

    Args:
        slots: Number of devices of each machine.
        wanted: Selection of the user.

    Raises:
        LaunchError: The user selects devices in two ways, a machine or device does not exist, or no device is
            left.
    """
    has_counts = wanted.num_nodes is not None or wanted.num_gpus is not None
    ways = {
        "--include": bool(wanted.include),
        "--exclude": bool(wanted.exclude),
        "--num_nodes/--num_gpus": has_counts,
        f"CUDA_VISIBLE_DEVICES={wanted.visible} (of this shell)": bool(wanted.visible),
    }
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise LaunchError(f"{' and '.join(given)} each choose the devices; give only one of them")
    available = {name: list(range(count)) for name, count in slots.items()}
    if wanted.include:
        chosen = _parse_devices("--include", wanted.include, available, wanted.source)
        return {name: chosen[name] for name in available if name in chosen}
    if wanted.exclude:
        excluded = _parse_devices("--exclude", wanted.exclude, available, wanted.source)
        left: Devices = {}
        for name, devices in available.items():
            left[name] = [number for number in devices if number not in excluded.get(name, [])]
        left = {name: devices for name, devices in left.items() if devices}
        if not left:
            raise LaunchError(
                f"--exclude {wanted.exclude} leaves no device of {wanted.source}; exclude fewer machines or "
                "devices"
            )
        return left
    if wanted.visible:
        return _take_visible(wanted.visible, available, wanted.source)
    return _take_first(available, wanted)


def _take_first(available: Devices, wanted: Selection) -> Devices:
    """Return the first devices of the first machines, by --num_nodes and --num_gpus."""
    num_nodes = wanted.num_nodes
    num_gpus = wanted.num_gpus
    if num_nodes is not None and not 1 <= num_nodes <= len(available):
        raise LaunchError(
            f"--num_nodes {num_nodes}: {wanted.source} has {len(available)} machines; give 1 to "
            f"{len(available)}"
        )
    chosen = dict(list(available.items())[:num_nodes])
    for name, devices in chosen.items():
        if num_gpus is not None and not 1 <= num_gpus <= len(devices):
            raise LaunchError(
                f"--num_gpus {num_gpus}: {name} has slots={len(devices)} ({wanted.source}); give 1 to "
                f"{len(devices)}"
            )
    return {name: devices[:num_gpus] for name, devices in chosen.items()}


def _take_visible(text: str, available: Devices, source: str) -> Devices:
    """Return the devices that CUDA_VISIBLE_DEVICES lists, the same on every machine."""
    words = text.split(",")
    if not all(NUMBER_PATTERN.fullmatch(word) for word in words):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={text}: the launcher chooses devices by number; set it to numbers such as "
            "0,2, or unset it and give --include NAME:0,2"
        )
    numbers = [int(word) for word in words]
    for name, devices in available.items():
        _check_devices(f"CUDA_VISIBLE_DEVICES={text}", name, numbers, devices, source)
    return dict.fromkeys(available, numbers)


def _parse_devices(option: str, text: str, available: Devices, source: str) -> Devices:
    """Return the devices that an option such as NAME:0,1@NAME lists.

    A name without numbers means all devices of the machine.
    """
    chosen: Devices = {}
    for spec in text.split("@"):
        name, colon, device_list = spec.partition(":")
        if name not in available:
            raise LaunchError(
                f"{option} {text}: {name!r} is not in {source}; give one or more of {', '.join(available)}"
            )
        numbers = available[name]
        if colon:
            words = device_list.split(",")
            if not all(NUMBER_PATTERN.fullmatch(word) for word in words):
                raise LaunchError(
                    f"{option} {text}: after the colon expected numbers of devices; write NAME or NAME:0,2, "
                    "with @ between several"
                )
            numbers = [int(word) for word in words]
            _check_devices(f"{option} {text}", name, numbers, available[name], source)
        chosen[name] = sorted({*chosen.get(name, []), *numbers})
    return chosen


def _check_devices(given: str, name: str, numbers: list[int], devices: list[int], source: str) -> None:
    """Raise a `LaunchError` if a number is not a device of the machine or is repeated."""
    for number in numbers:
        if number not in devices:
            raise LaunchError(
                f"{given}: {name} has no device {number}, but slots={len(devices)} ({source}); give numbers "
                f"from 0 to {len(devices) - 1}"
            )
    if len(set(numbers)) < len(numbers):
        raise LaunchError(f"{given}: a device of {name} is given twice; give each device once")
