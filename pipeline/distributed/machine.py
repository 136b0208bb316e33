"""This machine: its cards and drivers, its processes, and the limits of memory and files.

The only reader of cgroups. Limits of version 1 and 2 count, this process's own and those of the groups around
it: Slurm and Kubernetes set them on a job, not on the machine's root. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.config.command_lines import format_pipeline_command
from pipeline.files import format_bytes

ROOT = Path("/")
MOST_FILES = 1 << 20  # beyond, programs that walk through all numbers of files take seconds
FILES_ALONE = 400  # libraries, the data's maps, batches from workers, the files of a checkpoint
FILES_PER_RANK = 5  # connections of gloo's and NCCL's groups to each other rank
KERNEL_LOG = Path("/dev/kmsg")
_KILLED = re.compile(
    r"Killed process (\d+) \(.*\).* anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
_WRITTEN = re.compile(r"\d+,\d+,(\d+),")  # priority, number, microseconds since the machine started
CLOCKS_DIFFER = 1.0  # seconds by which the two clocks may differ
_RECORD = 8192  # bytes; the kernel's records are smaller
log = logging.getLogger(__name__)


def machine_id() -> str:
    """Return a text that is equal for two processes that see each other's pids, whatever the host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # not Linux: nobody can be looked at


def process_age() -> float:
    """Return the seconds since this process began."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError):  # not Linux; there psutil is right to a second
        return time.time() - psutil.Process().create_time()


def process_state(pid: int) -> str:
    """Return `gone` (dead, or waiting to be reaped), `stopped` (SIGSTOP, a debugger) or `there`."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):
        return "there"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "there"


@dataclass(frozen=True)
class MemoryUsage:
    """Memory of this process and of its machine or cgroup, in bytes."""

    resident: int
    """Memory of this process."""
    used: int
    """Memory used by all who share the limit, without cached files, which the kernel frees as needed."""
    limit: int
    by_cgroup: bool
    num_kills: int
    """Processes that the kernel killed in this cgroup for want of memory."""

    def __str__(self) -> str:
        whose = "its cgroup allows" if self.by_cgroup else "the machine has"
        used, limit = format_bytes(self.used), format_bytes(self.limit)
        return f"it held {format_bytes(self.resident)}, and {used} of the {limit} {whose} were in use"


class _Limit(NamedTuple):
    limit: int
    used: int


class _Names(NamedTuple):
    """Files of a cgroup."""

    limit: str
    usage: str
    cached: str
    """A line of memory.stat."""
    kills: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")


def read_memory_usage(root: Path = ROOT) -> MemoryUsage:
    """Return the current memory usage, read from a few small files below `root`."""
    machine = psutil.virtual_memory()
    tightest = _Limit(machine.total, machine.total - machine.available)
    by_cgroup = False
    for group in _limits(root):
        if group.limit < tightest.limit:
            tightest, by_cgroup = group, True
    resident = psutil.Process().memory_info().rss
    return MemoryUsage(resident, tightest.used, tightest.limit, by_cgroup, count_kills(root))


def describe_process_limit() -> str | None:
    """Return the limit of this process alone, if its shell or its launcher set one (`ulimit`)."""
    flags = {"ulimit -d": resource.RLIMIT_DATA, "ulimit -v": resource.RLIMIT_AS}
    limits = {flag: resource.getrlimit(each)[0] for flag, each in flags.items()}
    found = {flag: limit for flag, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not found:
        return None
    flag = min(found, key=found.__getitem__)
    return f"this process may take {format_bytes(found[flag])} ({flag})"


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that processes here may still take: the machine's, or what the fullest cgroup leaves.

    What cannot be read sets no limit: a save must not fail for it.
    """
    free = [sys.maxsize, *(max(0, group.limit - group.used) for group in _limits(root))]
    with suppress(OSError):
        free.append(psutil.virtual_memory().available)
    return min(free)


def count_kills(root: Path = ROOT) -> int:
    """Return how many processes were killed for memory in this process's cgroup so far."""
    for folder, names in _cgroups(root):
        with suppress(OSError, ValueError, KeyError):
            return _table(folder / names.kills)["oom_kill"]
    return 0


def _limits(root: Path) -> Iterator[_Limit]:
    for folder, names in _cgroups(root):
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            limit, used = (int((folder / name).read_text()) for name in (names.limit, names.usage))
            yield _Limit(limit, max(0, used - _table(folder / "memory.stat").get(names.cached, 0)))


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield this process's cgroups and those around them, innermost first.

    In a container the path may be the host's, of which only the root, the container's own, is there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = root / "sys/fs/cgroup", _V2
        if controllers:
            top, names = top / "memory", _V1
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), names


def _table(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def raise_open_files_limit(world_size: int = 1, is_told: bool = True) -> None:
    """Raise the soft limit to the hard one, for children too. Warns if that is too few for the ranks.

    Args:
        world_size: Number of ranks; each needs connections to all others.
        is_told: Whether this is the rank that warns.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # some systems say a hard limit that they do not give
            hard = soft
    needed = FILES_ALONE + FILES_PER_RANK * world_size
    if is_told and hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            "a process may open %d files here, and one of %d ranks opens about %d: raise the hard limit "
            "(ulimit -Hn; nofile in limits.conf, LimitNOFILE in systemd, --ulimit nofile in Docker)",
            hard,
            world_size,
            needed,
        )


def read_kernel_kills(since: float, path: Path = KERNEL_LOG) -> dict[int, int]:
    """Return process id -> resident bytes of each process that the kernel killed for memory.

    Ids are those of the host, which a container may number differently.

    Empty if nothing was killed, or the log cannot be read (another user's, most containers).

    Args:
        since: Seconds of `time.monotonic()`. Older records are skipped, since their ids may belong to
            other processes.
        path: The kernel's log.
    """
    found: dict[int, int] = {}
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        while text := _next_record(log):
            written = _WRITTEN.match(text)
            if written is None or int(written[1]) / 1e6 < since - CLOCKS_DIFFER:
                continue
            for pid, *parts in _KILLED.findall(text):
                found[int(pid)] = sum(int(part or 0) for part in parts) * 1024
    finally:
        os.close(log)
    return found


def _next_record(log: int) -> str:
    """Return the next record; empty if there is none yet."""
    while True:
        try:
            return os.read(log, _RECORD).decode(errors="replace")
        except BrokenPipeError:  # what stood here was overwritten meanwhile: the next is read
            continue
        except OSError:
            return ""


NVIDIA, AMD = "0x10de", "0x1002"
# By CUDA's major version: the oldest driver for Linux (CUDA's release notes, "minor version compatibility").
OLDEST = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
GIVE_A_CARD = "docker run --gpus all, srun --gpus; under WSL2, NVIDIA's driver in Windows"


class TorchBuild(NamedTuple):
    """Versions that torch was built with."""

    version: str
    cuda: str | None
    """CUDA version, as `13.0`; None if built without CUDA."""
    hip: str | None


class CardFault(NamedTuple):
    """Reason why torch cannot compute on the GPUs of a machine."""

    found: str
    fix: str
    is_fatal: bool
    """Whether a card is there that a run would expect to use."""


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of NVIDIA's kernel module, `570.86.15`; None if it is not loaded, as under WSL2."""
    with suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _read(root / "proc/driver/nvidia/version"))
        return found[1] if found else None
    return None


def is_reachable(vendor: str, root: Path = ROOT) -> bool:
    """Return whether this machine, or container, was given a device of NVIDIA's or AMD's with its driver."""
    if vendor == AMD:
        return (root / "dev/kfd").exists()
    under_wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return under_wsl or any((root / "dev").glob("nvidia[0-9]*"))


def count_cards(vendor: str, root: Path = ROOT) -> int:
    """Return how many cards of a vendor are on the PCI bus, with or without a driver."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            kind = _read(device / "class").strip()  # 03: display, 12: accelerators
            is_card = kind.startswith(("0x03", "0x12"))
            found += is_card and _read(device / "vendor").strip() == vendor
    return found


def count_gpus(environment: Mapping[str, str], root: Path = ROOT) -> int:
    """Return how many GPUs of NVIDIA's this process may use, without torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip()])
    return len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def find_missing_driver(driver: str, cuda: str) -> str | None:
    """Return the oldest driver that this CUDA runs on; None if the driver is new enough."""
    oldest = OLDEST.get(int(cuda.partition(".")[0]))
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    return None if oldest is None or numbers >= oldest else str(oldest[0])


def find_card_fault(torch: TorchBuild, root: Path = ROOT, newest_cuda: str | None = None) -> CardFault | None:
    """Find why this torch cannot compute on the cards of this machine.

    Args:
        torch: Versions that torch was built with.
        root: Root of the file system.
        newest_cuda: Newest CUDA version that the driver reports. It takes precedence over the driver's own
            version, since a compatibility library may be installed beside the driver.
    """
    driver, has_amd = driver_version(root), is_reachable(AMD, root)
    if is_reachable(NVIDIA, root):
        if torch.cuda is None:
            return _wrong_build(torch, "CUDA")
        knows_it = newest_cuda is not None and int(newest_cuda.split(".")[0]) >= int(torch.cuda.split(".")[0])
        if (
            driver is not None
            and not knows_it
            and (oldest := find_missing_driver(driver, torch.cuda)) is not None
        ):
            found = f"the driver {driver} is too old for torch's CUDA {torch.cuda}"
            fix = f"install driver {oldest} or newer, or torch's build of an earlier CUDA"
            return CardFault(found, fix, True)
    elif driver is not None:
        found = f"driver {driver}, and no /dev/nvidia0: this container or job was given no card"
        return CardFault(found, GIVE_A_CARD, False)
    elif cards := count_cards(NVIDIA, root):
        found = f"{cards} NVIDIA card{'s' * (cards > 1)} and no driver"
        fix = "install it (apt-get install nvidia-driver-580), restart, and see nvidia-smi"
        return CardFault(found, fix, torch.cuda is not None)
    elif torch.cuda is not None and not has_amd:
        found = f"torch is built for CUDA {torch.cuda}, and there is no card: it computes on the CPU"
        return CardFault(found, f"where there is one: {GIVE_A_CARD}", False)
    if has_amd and torch.hip is None and not is_reachable(NVIDIA, root):
        return _wrong_build(torch, "ROCm")
    if has_amd and torch.hip is not None and not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER; then log in again"
        return CardFault("/dev/kfd: Permission denied", fix, True)
    return None


def _wrong_build(torch: TorchBuild, kind: str) -> CardFault:
    plain = torch.version.partition("+")[0]
    built = "a CPU build" if torch.cuda is None and torch.hip is None else f"built without {kind}"
    fix = f"install torch {plain} as built for {kind} (torch's own index of wheels has it)"
    if kind == "CUDA":  # what the package index gives for Linux
        fix = f"pip install --force-reinstall torch=={plain}"
    # An AMD device may be part of the processor, which nobody means to train on.
    return CardFault(f"this torch ({torch.version}) is {built}", fix, is_fatal=kind == "CUDA")


def explain_idle_gpu(torch: TorchBuild, environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return why torch sees no GPU although the machine has one; None if it has none or the user hid it."""
    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if environment.get("DS_ACCELERATOR") == "cpu" or any(environment.get(name) == "" for name in hiding):
        return None
    if not any(is_reachable(vendor, root) for vendor in (NVIDIA, AMD)):
        return None
    fault = find_card_fault(torch, root)
    if fault is not None:
        return f"{fault.found}: {fault.fix}"
    return f"torch ({torch.version}) sees none; what is found here: {format_pipeline_command('doctor')}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
