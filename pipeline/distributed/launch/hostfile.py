"""The machines of a job, `worker-1 slots=8` a line, and which of their devices a run takes.

The words are the deepspeed launcher's. What it would silently take for something else is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import LaunchError
from pipeline.files import CONFIGURATION_LIMIT, read_regular_file

LINE = re.compile(r"(?P<name>[^\s#=]+)\s+slots=(?P<slots>[0-9]{1,6})")
# What neither a shell, nor ssh, nor pdsh, nor the launcher's NAME:0,1@NAME takes for something else.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXAMPLE = "worker-1 slots=8"
NUMBER = re.compile(r"[0-9]{1,6}")
Devices = dict[str, list[int]]
"""Machine -> numbers of its devices, in the order of the ranks."""


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the machines as ssh knows them -> slots, the number of ranks on each.

    They are in the file's order: the first is the master.

    Raises:
        LaunchError: There is no such file, a line is not `NAME slots=N`, a name has other characters than a
            name has or stands there twice, or there is no machine at all.
    """
    try:
        lines = read_regular_file(path, CONFIGURATION_LIMIT).decode("utf-8-sig").splitlines()
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
    return {name: slots for name, (_, slots) in found.items()}


@dataclass(frozen=True)
class Selection:
    """Machines and devices that are wanted, as the user gave them."""

    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the shell: the same devices on every machine."""
    source: str = "the hostfile"
    """Name of what says which devices there are, for messages."""


def choose_devices(slots: Mapping[str, int], wanted: Selection) -> Devices:
    """Return the devices of the run.

    Args:
        slots: Machine -> number of its devices.
        wanted: Machines and devices that the user chose.

    Raises:
        LaunchError: There are two ways to choose, a machine or device that is not there, or none is left.
    """
    counted = wanted.num_nodes is not None or wanted.num_gpus is not None
    ways = {
        "--include": bool(wanted.include),
        "--exclude": bool(wanted.exclude),
        "--num_nodes/--num_gpus": counted,
        f"CUDA_VISIBLE_DEVICES={wanted.visible} (of this shell)": bool(wanted.visible),
    }
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise LaunchError(f"{' and '.join(given)} both choose the devices; give one of them")
    every = {name: list(range(count)) for name, count in slots.items()}
    if wanted.include:
        chosen = _parse("--include", wanted.include, every, wanted.source)
        return {name: chosen[name] for name in every if name in chosen}
    if wanted.exclude:
        without = _parse("--exclude", wanted.exclude, every, wanted.source)
        left = {name: [n for n in every[name] if n not in without.get(name, [])] for name in every}
        left = {name: devices for name, devices in left.items() if devices}
        if not left:
            raise LaunchError(f"--exclude {wanted.exclude} leaves no device of {wanted.source}'s")
        return left
    if wanted.visible:
        return _visible(wanted.visible, every, wanted.source)
    return _first(every, wanted)


def _first(every: Devices, wanted: Selection) -> Devices:
    num_nodes, num_gpus = wanted.num_nodes, wanted.num_gpus
    if num_nodes is not None and not 1 <= num_nodes <= len(every):
        raise LaunchError(f"--num_nodes {num_nodes}: {wanted.source} has {len(every)} machines")
    left = dict(list(every.items())[:num_nodes])
    for name, devices in left.items():
        if num_gpus is not None and not 1 <= num_gpus <= len(devices):
            raise LaunchError(f"--num_gpus {num_gpus}: {name} has slots={len(devices)} in {wanted.source}")
    return {name: devices[:num_gpus] for name, devices in left.items()}


def _visible(text: str, every: Devices, source: str) -> Devices:
    words = text.split(",")
    if not all(NUMBER.fullmatch(word) for word in words):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={text}: several machines' devices are chosen by number, as 0,2; "
            "unset it, or give --include NAME:0,2@NAME:0,2"
        )
    numbers = [int(word) for word in words]
    for name, devices in every.items():
        _check(f"CUDA_VISIBLE_DEVICES={text}", name, numbers, devices, source)
    return dict.fromkeys(every, numbers)


def _parse(option: str, text: str, every: Devices, source: str) -> Devices:
    chosen: Devices = {}
    for spec in text.split("@"):
        name, colon, listed = spec.partition(":")
        if name not in every:
            raise LaunchError(f"{option} {text}: {name!r} is not in {source}, but {', '.join(every)}")
        numbers = every[name]
        if colon:
            words = listed.split(",")
            if not all(NUMBER.fullmatch(word) for word in words):
                raise LaunchError(f"{option} {text}: write it as NAME or NAME:0,2, with @ between several")
            numbers = [int(word) for word in words]
            _check(f"{option} {text}", name, numbers, every[name], source)
        chosen[name] = sorted({*chosen.get(name, []), *numbers})
    return chosen


def _check(given: str, name: str, numbers: list[int], devices: list[int], source: str) -> None:
    for number in numbers:
        if number not in devices:
            raise LaunchError(
                f"{given}: {name} has no device {number}; {source} gives it slots={len(devices)}, "
                f"0 to {len(devices) - 1}"
            )
    if len(set(numbers)) < len(numbers):
        raise LaunchError(f"{given}: a device is named twice for {name}")
