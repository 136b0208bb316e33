"""Reads a hostfile with lines such as `worker-1 slots=8`, and chooses the devices of a run.

Hostfile and options have the syntax of the deepspeed launcher. Input that the deepspeed launcher would
misread without a message is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.shipped import LAUNCH
from pipeline.distributed.waiting import find_own_address
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
    slots_by_name: dict[str, int] = {}
    line_numbers: dict[str, int] = {}  # name -> number of its line
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
        if name in line_numbers:
            raise LaunchError(
                f"{path}:{line_number}: {name} is already on line {line_numbers[name]}; give each machine "
                "one line with all its slots"
            )
        line_numbers[name] = line_number
        slots_by_name[name] = int(match["slots"])
    if not slots_by_name:
        raise LaunchError(
            f"hostfile {path} lists no machine; add a line such as {EXAMPLE_LINE!r} for each machine"
        )
    return slots_by_name


def advise_on_one_machine(devices: Devices) -> str:
    """Return advice if the only machine of a run is this one; empty if the run needs ssh."""
    names = list(devices)
    if len(names) != 1 or find_own_address(names[0]) is None:
        return ""
    return (
        f"{names[0]} is this machine: one machine needs neither hostfile nor ssh; train with "
        f"{LAUNCH / 'multi_gpu.sh'}"
    )


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
    """Value of CUDA_VISIBLE_DEVICES in the shell, which selects the same devices on every machine.

    `None` or an empty text selects all devices.
    """
    source: str = "the hostfile"
    """Source of the list of available devices, for messages."""


def choose_devices(slots: Mapping[str, int], selection: Selection) -> Devices:
    """Return the devices of the run.

    Args:
        slots: Name of each machine -> number of its devices.
        selection: Options of the user.

    Raises:
        LaunchError: The user selects devices in two ways, a machine or device does not exist, or no device is
            left.
    """
    has_counts = selection.num_nodes is not None or selection.num_gpus is not None
    ways = {
        "--include": bool(selection.include),
        "--exclude": bool(selection.exclude),
        "--num_nodes/--num_gpus": has_counts,
        f"CUDA_VISIBLE_DEVICES={selection.visible} (of this shell)": bool(selection.visible),
    }
    used_ways = [name for name, is_used in ways.items() if is_used]
    if len(used_ways) > 1:
        raise LaunchError(f"{' and '.join(used_ways)} each choose the devices; give only one of them")
    available = {name: list(range(count)) for name, count in slots.items()}
    if selection.include:
        chosen = _parse_devices("--include", selection.include, available, selection.source)
        return {name: chosen[name] for name in available if name in chosen}
    if selection.exclude:
        excluded = _parse_devices("--exclude", selection.exclude, available, selection.source)
        remaining: Devices = {}
        for name, devices in available.items():
            numbers = [number for number in devices if number not in excluded.get(name, [])]
            if numbers:
                remaining[name] = numbers
        if not remaining:
            raise LaunchError(
                f"--exclude {selection.exclude} leaves no device of {selection.source}; exclude fewer "
                "machines or devices"
            )
        return remaining
    if selection.visible:
        return _take_visible(selection.visible, available, selection.source)
    return _take_first(available, selection)


def _take_first(available: Devices, selection: Selection) -> Devices:
    """Return the first devices of the first machines, by --num_nodes and --num_gpus."""
    num_nodes = selection.num_nodes
    num_gpus = selection.num_gpus
    if num_nodes is not None and not 1 <= num_nodes <= len(available):
        raise LaunchError(
            f"--num_nodes {num_nodes}: {selection.source} has {len(available)} machines; give 1 to "
            f"{len(available)}"
        )
    chosen = dict(list(available.items())[:num_nodes])
    for name, devices in chosen.items():
        if num_gpus is not None and not 1 <= num_gpus <= len(devices):
            raise LaunchError(
                f"--num_gpus {num_gpus}: {name} has slots={len(devices)} ({selection.source}); give 1 to "
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


def _check_devices(option: str, name: str, numbers: list[int], devices: list[int], source: str) -> None:
    """Check the device numbers that the user gives for a machine.

    Args:
        option: Option or variable with its value, for the message.
        name: Name of the machine.
        numbers: Device numbers that the user gives.
        devices: Devices of the machine.
        source: Source of the list of devices, for the message.

    Raises:
        LaunchError: A number is not a device of the machine, or is repeated.
    """
    for number in numbers:
        if number not in devices:
            raise LaunchError(
                f"{option}: {name} has no device {number}, but slots={len(devices)} ({source}); give numbers "
                f"from 0 to {len(devices) - 1}"
            )
    if len(set(numbers)) < len(numbers):
        raise LaunchError(f"{option}: a device of {name} is given twice; give each device once")
