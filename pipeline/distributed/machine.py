"""Facts about this machine: processes, limits of memory and open files, and GPUs with their drivers.

No other module reads cgroups (version 1 or 2). Limits of this process's cgroup and of its parents count,
since Slurm and Kubernetes set them on a job and not on the machine's root. Imports no torch.
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
# Programs that try every possible file descriptor take seconds if the limit is higher.
MAX_OPEN_FILES = 1 << 20
FILES_PER_PROCESS = 400  # libraries, memory-mapped data, batches from workers, the files of a checkpoint
FILES_PER_RANK = 5  # connections of gloo's and NCCL's process groups to each other rank
KERNEL_LOG = Path("/dev/kmsg")
_KILL_RECORD = re.compile(
    r"Killed process (\d+) \(.*\).* anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
_RECORD_TIME = re.compile(r"\d+,\d+,(\d+),")  # priority, number, microseconds since the machine started
CLOCK_TOLERANCE = 1.0  # seconds by which the kernel log's clock may differ from time.monotonic()
_RECORD_BYTES = 8192  # no record of the kernel log is longer
log = logging.getLogger(__name__)


def machine_id() -> str:
    """Return a text that is equal for two processes of one machine in one PID namespace.

    Such processes see each other's pids. The host's name has no influence.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # not Linux: different for every process


def process_age() -> float:
    """Return the seconds since this process was started."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after the machine's start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):  # not Linux: psutil is exact to a second
        return time.time() - psutil.Process().create_time()


def process_state(pid: int) -> str:
    """Return the state of a process of this machine: `gone`, `stopped` or `there`.

    A zombie is `gone`. A process is `stopped` by SIGSTOP or a debugger.
    """
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
    """Memory that this process uses, and that all processes under the same limit use."""

    resident: int
    """Bytes of resident memory of this process."""
    used: int
    """Bytes used by all processes under the limit, without cached files, which the kernel frees as needed."""
    limit: int
    """Bytes of the tightest limit: the machine's memory, or the limit of a cgroup."""
    by_cgroup: bool
    """Whether the limit is a cgroup's."""
    num_kills: int
    """Number of processes of this cgroup that the kernel has killed because memory ran out."""

    def __str__(self) -> str:
        owner = "its cgroup allows" if self.by_cgroup else "the machine has"
        used = format_bytes(self.used)
        limit = format_bytes(self.limit)
        return f"it used {format_bytes(self.resident)}, and {used} of the {limit} {owner} were in use"


class _Limit(NamedTuple):
    """Memory limit and the memory in use under it, in bytes."""

    limit: int
    used: int


class _CgroupFiles(NamedTuple):
    """Names of the files of a memory cgroup, which differ between version 1 and 2."""

    limit: str
    usage: str
    cached: str
    """Name of the line in memory.stat that counts cached files."""
    kills: str
    """Name of the file with the line `oom_kill`."""


_V1 = _CgroupFiles(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    cached="total_inactive_file",
    kills="memory.oom_control",
)
_V2 = _CgroupFiles(limit="memory.max", usage="memory.current", cached="inactive_file", kills="memory.events")


def read_memory_usage(root: Path = ROOT) -> MemoryUsage:
    """Return the current memory usage. This reads a few small files and is cheap.

    Args:
        root: Root of the file system from which cgroups are read.
    """
    machine = psutil.virtual_memory()
    tightest = _Limit(machine.total, machine.total - machine.available)
    by_cgroup = False
    for group in _read_limits(root):
        if group.limit < tightest.limit:
            tightest = group
            by_cgroup = True
    resident = psutil.Process().memory_info().rss
    return MemoryUsage(resident, tightest.used, tightest.limit, by_cgroup, count_kills(root))


def describe_process_limit() -> str | None:
    """Describe the memory limit that applies to this process alone (`ulimit`); `None` if there is none."""
    kinds = {"ulimit -d": resource.RLIMIT_DATA, "ulimit -v": resource.RLIMIT_AS}
    soft_limits = {command: resource.getrlimit(kind)[0] for command, kind in kinds.items()}
    limits = {command: limit for command, limit in soft_limits.items() if limit != resource.RLIM_INFINITY}
    if not limits:
        return None
    command = min(limits, key=limits.__getitem__)
    return f"this process may use {format_bytes(limits[command])} ({command})"


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that processes of this cgroup can still allocate.

    This is the machine's free memory, or less if a cgroup leaves less. A file that cannot be read sets no
    limit, since a save must not fail because of it.

    Args:
        root: Root of the file system from which cgroups are read.
    """
    free = [sys.maxsize, *(max(0, group.limit - group.used) for group in _read_limits(root))]
    with suppress(OSError):
        free.append(psutil.virtual_memory().available)
    return min(free)


def count_kills(root: Path = ROOT) -> int:
    """Return the number of processes of this process's cgroup that were killed because memory ran out.

    It is 0 if it cannot be read.
    """
    for folder, files in _list_cgroups(root):
        with suppress(OSError, ValueError, KeyError):
            return _read_table(folder / files.kills)["oom_kill"]
    return 0


def _read_limits(root: Path) -> Iterator[_Limit]:
    """Yield the limits of this process's cgroups, without those that have none."""
    for folder, files in _list_cgroups(root):
        with suppress(OSError, ValueError):  # the file is missing, or its text is "max": there is no limit
            limit = int((folder / files.limit).read_text())
            usage = int((folder / files.usage).read_text())
            cached = _read_table(folder / "memory.stat").get(files.cached, 0)
            yield _Limit(limit, max(0, usage - cached))


def _list_cgroups(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folders of this process's cgroups and of their parents, innermost first.

    In a container the path may be the one on the host. Then only its root exists, which is the container's
    own cgroup.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup"
        files = _V2
        if controllers:
            top = top / "memory"
            files = _V1
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), files


def _read_table(path: Path) -> dict[str, int]:
    """Read a file of lines with a name and a number."""
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def raise_open_files_limit(world_size: int = 1, is_told: bool = True) -> None:
    """Raise the soft limit of open files to the hard limit, for this process and its children.

    Warn if the hard limit is too low for the number of ranks.

    Args:
        world_size: Number of ranks. Each needs connections to all others.
        is_told: Whether to warn. One rank of a job should.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < highest:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        except (OSError, ValueError):  # some systems report a hard limit that they do not grant
            hard = soft
    needed = FILES_PER_PROCESS + FILES_PER_RANK * world_size
    if is_told and hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            "a process may open %d files on this machine, but each of %d ranks opens about %d; raise the "
            "hard limit (ulimit -Hn; limits.conf: nofile; systemd: LimitNOFILE; Docker: --ulimit nofile)",
            hard,
            world_size,
            needed,
        )


def read_kernel_kills(since: float, path: Path = KERNEL_LOG) -> dict[int, int]:
    """Return the processes that the kernel killed because memory ran out.

    The process ids are the host's; a container may have other ids for the same processes.

    Args:
        since: Seconds of `time.monotonic()`. Older records are skipped, since their ids may belong to
            other processes.
        path: Path of the kernel log.

    Returns:
        Process id -> bytes of resident memory at the kill. It is empty if no process was killed, or if the
        log cannot be read, as in most containers and for most users.
    """
    killed: dict[int, int] = {}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return killed
    try:
        while text := _read_next_record(descriptor):
            record_time = _RECORD_TIME.match(text)
            if record_time is None or int(record_time[1]) / 1e6 < since - CLOCK_TOLERANCE:
                continue
            for pid, *sizes in _KILL_RECORD.findall(text):
                killed[int(pid)] = sum(int(size or 0) for size in sizes) * 1024
    finally:
        os.close(descriptor)
    return killed


def _read_next_record(descriptor: int) -> str:
    """Return the next record of the kernel log; empty if there is none yet, or it cannot be read."""
    while True:
        try:
            return os.read(descriptor, _RECORD_BYTES).decode(errors="replace")
        except BrokenPipeError:  # the kernel has overwritten this record; the next read continues after it
            continue
        except OSError:
            return ""


# Vendor ids on the PCI bus.
NVIDIA = "0x10de"
AMD = "0x1002"
# CUDA's major version -> oldest driver for Linux (CUDA's release notes, "minor version compatibility").
OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
PROVIDE_GPU = "docker run --gpus all, or srun --gpus; under WSL2 install NVIDIA's driver in Windows"


class TorchBuild(NamedTuple):
    """Versions that torch was built with."""

    version: str
    cuda: str | None
    """CUDA version, as `13.0`; `None` if torch is built without CUDA."""
    hip: str | None
    """ROCm version; `None` if torch is built without ROCm."""


class CardFault(NamedTuple):
    """Reason why torch cannot compute on the GPUs of a machine."""

    found: str
    """Description of the fault."""
    fix: str
    """Advice: a command, or a sentence in the imperative."""
    is_fatal: bool
    """Whether the machine has a GPU that a run would expect to use."""


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of NVIDIA's kernel module, as `570.86.15`.

    It is `None` if the module is not loaded. Under WSL2 it never is, since the driver is in Windows.
    """
    with suppress(OSError):
        match = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _read(root / "proc/driver/nvidia/version"))
        return match[1] if match else None
    return None


def is_reachable(vendor: str, root: Path = ROOT) -> bool:
    """Return whether a GPU of this vendor and its driver are visible in this machine or container.

    Args:
        vendor: NVIDIA or AMD.
        root: Root of the file system.
    """
    if vendor == AMD:
        return (root / "dev/kfd").exists()
    under_wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return under_wsl or any((root / "dev").glob("nvidia[0-9]*"))


def count_cards(vendor: str, root: Path = ROOT) -> int:
    """Return the number of a vendor's GPUs on the PCI bus, with or without a driver.

    Args:
        vendor: NVIDIA or AMD.
        root: Root of the file system.
    """
    number = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            device_class = _read(device / "class").strip()
            is_gpu = device_class.startswith(("0x03", "0x12"))  # display controllers, accelerators
            number += is_gpu and _read(device / "vendor").strip() == vendor
    return number


def count_gpus(environment: Mapping[str, str], root: Path = ROOT) -> int:
    """Return the number of NVIDIA GPUs that this process may use, without importing torch.

    Args:
        environment: Environment variables; CUDA_VISIBLE_DEVICES takes precedence over the driver's list.
        root: Root of the file system.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip()])
    return len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def find_missing_driver(driver: str, cuda: str) -> str | None:
    """Return the version of the oldest driver that supports a CUDA version, if the driver is older.

    Args:
        driver: Version of the driver, as `570.86.15`.
        cuda: CUDA version, as `13.0`.

    Returns:
        Major version that is needed; `None` if the driver is new enough, or the CUDA version is not known.
    """
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    return None if oldest is None or numbers >= oldest else str(oldest[0])


def find_card_fault(torch: TorchBuild, root: Path = ROOT, newest_cuda: str | None = None) -> CardFault | None:
    """Find the reason why this torch cannot compute on the GPUs of this machine.

    Args:
        torch: Versions that torch was built with.
        root: Root of the file system.
        newest_cuda: Newest CUDA version that the driver reports. It takes precedence over the driver's own
            version, since a compatibility library may be installed beside the driver.

    Returns:
        The fault; `None` if torch can use every GPU, or if there is none and torch is built without CUDA.
    """
    driver = driver_version(root)
    has_amd = is_reachable(AMD, root)
    if is_reachable(NVIDIA, root):
        if torch.cuda is None:
            return _describe_wrong_build(torch, "CUDA")
        is_supported = newest_cuda is not None and (
            int(newest_cuda.split(".")[0]) >= int(torch.cuda.split(".")[0])
        )
        oldest = None
        if driver is not None and not is_supported:
            oldest = find_missing_driver(driver, torch.cuda)
        if oldest is not None:
            found = f"the driver {driver} is too old for torch's CUDA {torch.cuda}"
            fix = f"install driver {oldest} or newer, or a build of torch for an earlier CUDA"
            return CardFault(found, fix, True)
    elif driver is not None:
        found = f"driver {driver}, but no /dev/nvidia0: this container or job has no GPU"
        return CardFault(found, PROVIDE_GPU, False)
    elif cards := count_cards(NVIDIA, root):
        found = f"{cards} NVIDIA GPU{'s' * (cards > 1)}, but no driver"
        fix = "install the driver (apt-get install nvidia-driver-580), restart, and check with nvidia-smi"
        return CardFault(found, fix, torch.cuda is not None)
    elif torch.cuda is not None and not has_amd:
        found = f"torch is built for CUDA {torch.cuda}, but there is no GPU: it computes on the CPU"
        return CardFault(found, f"if the machine has a GPU: {PROVIDE_GPU}", False)
    if has_amd and torch.hip is None and not is_reachable(NVIDIA, root):
        return _describe_wrong_build(torch, "ROCm")
    if has_amd and torch.hip is not None and not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER; then log in again"
        return CardFault("/dev/kfd: Permission denied", fix, True)
    return None


def _describe_wrong_build(torch: TorchBuild, backend: str) -> CardFault:
    """Return the fault of a torch that is built without CUDA or ROCm, which its GPU needs."""
    version = torch.version.partition("+")[0]
    build = "a CPU build" if torch.cuda is None and torch.hip is None else f"built without {backend}"
    fix = f"install the build of torch {version} for {backend} (see pytorch.org)"
    if backend == "CUDA":  # the package index has the CUDA build for Linux
        fix = f"pip install --force-reinstall torch=={version}"
    # An AMD GPU may be a part of the processor that is not meant for training.
    return CardFault(f"this torch ({torch.version}) is {build}", fix, is_fatal=backend == "CUDA")


def explain_idle_gpu(torch: TorchBuild, environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return the reason why torch sees no GPU although the machine has one.

    Args:
        torch: Versions that torch was built with.
        environment: Environment variables.
        root: Root of the file system.

    Returns:
        The reason and its fix; `None` if there is no GPU, or if the user has hidden it.
    """
    variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if environment.get("DS_ACCELERATOR") == "cpu" or any(environment.get(name) == "" for name in variables):
        return None
    if not any(is_reachable(vendor, root) for vendor in (NVIDIA, AMD)):
        return None
    fault = find_card_fault(torch, root)
    if fault is not None:
        return f"{fault.found}: {fault.fix}"
    command = format_pipeline_command("doctor")
    return f"torch ({torch.version}) does not see it; to find the fault run: {command}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
