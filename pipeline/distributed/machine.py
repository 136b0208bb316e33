"""Reads facts about this machine: processes, limits of memory and open files, and GPUs with their drivers.

No other module reads cgroups (version 1 or 2). Limits of this process's cgroup and of its parents count,
since Slurm and Kubernetes set limits on a job and not on the machine's root. Imports no torch.
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
# Files that each rank opens: libraries, memory-mapped data, batches from workers, files of a checkpoint.
FILES_PER_PROCESS = 400
# Connections that each rank opens to each other rank, for the process groups of gloo and NCCL.
FILES_PER_RANK = 5
KERNEL_LOG = Path("/dev/kmsg")
_KILL_RECORD = re.compile(
    r"Killed process (\d+) \(.*\).* anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
_RECORD_TIME = re.compile(r"\d+,\d+,(\d+),")  # priority, number, microseconds since the machine started
CLOCK_TOLERANCE = 1.0  # seconds by which the kernel log's clock may differ from time.monotonic()
_MAX_RECORD_BYTES = 8192  # no record of the kernel log is longer
log = logging.getLogger(__name__)


def machine_id() -> str:
    """Return an id that is equal for all processes of one machine in one PID namespace.

    Such processes see each other's pids. The id does not depend on the host name. On a system other than
    Linux, each process has an id of its own.
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
    """Return the state of a process of this machine: `gone`, `stopped` or `alive`.

    A zombie is `gone`. A process is `stopped` by SIGSTOP or a debugger. A process whose state cannot be read
    is `alive`.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):
        return "alive"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "alive"


@dataclass(frozen=True)
class MemoryUsage:
    """Memory that one process uses, the tightest limit that applies to it, and the memory in use under it."""

    resident: int
    """Bytes of resident memory of the process."""
    used: int
    """Bytes used by all processes under the limit, without cached files, which the kernel frees as needed."""
    limit: int
    """Bytes of the tightest limit: the machine's memory, or the limit of a cgroup."""
    by_cgroup: bool
    """Whether the limit is a cgroup's."""
    num_kills: int
    """Number of processes of the process's cgroup that the kernel has killed because memory ran out."""

    def __str__(self) -> str:
        owner = "its cgroup allows" if self.by_cgroup else "the machine has"
        used = format_bytes(self.used)
        limit = format_bytes(self.limit)
        return f"it used {format_bytes(self.resident)}, and {used} of the {limit} {owner} were in use"


class _MemoryLimit(NamedTuple):
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
    """Return the current memory usage of this process. This reads a few small files and is cheap.

    Args:
        root: Root of the file system from which cgroups are read.

    Raises:
        OSError: This process can open no more files.
    """
    machine = psutil.virtual_memory()
    tightest = _MemoryLimit(machine.total, machine.total - machine.available)
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
    limits = [(limit, command) for command, limit in soft_limits.items() if limit != resource.RLIM_INFINITY]
    if not limits:
        return None
    limit, command = min(limits)
    return f"this process may use {format_bytes(limit)} ({command})"


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that processes of this cgroup can still allocate.

    This is the machine's free memory, or less if a cgroup leaves less. If a file cannot be read, its limit is
    ignored, so that a save does not fail because of it.

    Args:
        root: Root of the file system from which cgroups are read.
    """
    free = [sys.maxsize, *(max(0, group.limit - group.used) for group in _read_limits(root))]
    with suppress(OSError):
        free.append(psutil.virtual_memory().available)
    return min(free)


def count_kills(root: Path = ROOT) -> int:
    """Return the number of processes of this process's cgroup that the kernel killed for memory.

    The result is 0 if the number cannot be read.

    Args:
        root: Root of the file system from which cgroups are read.
    """
    for folder, files in _list_cgroups(root):
        with suppress(OSError, ValueError, KeyError):
            return _read_table(folder / files.kills)["oom_kill"]
    return 0


def _read_limits(root: Path) -> Iterator[_MemoryLimit]:
    """Yield the memory limits of this process's cgroups. Cgroups without a limit are left out."""
    for folder, files in _list_cgroups(root):
        with suppress(OSError, ValueError):  # the file is missing, or its text is "max": there is no limit
            limit = int((folder / files.limit).read_text())
            usage = int((folder / files.usage).read_text())
            cached = _read_table(folder / "memory.stat").get(files.cached, 0)
            yield _MemoryLimit(limit, max(0, usage - cached))


def _list_cgroups(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folders of this process's cgroups and of their parents, innermost first.

    In a container /proc may give the path of the cgroup on the host, which does not exist in the container.
    Only the root of the path exists there, and it is the container's own cgroup.
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


def raise_open_files_limit(world_size: int = 1, warn: bool = True) -> None:
    """Raise the soft limit of open files to the hard limit, for this process and its children.

    The soft limit is never raised above MAX_OPEN_FILES.

    Args:
        world_size: Number of ranks. Each rank needs connections to all others.
        warn: Whether to log a warning if the hard limit is too low for the number of ranks. One rank of a
            job should.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < highest:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        except (OSError, ValueError):  # some systems report a hard limit that they do not grant
            hard = soft
    needed = FILES_PER_PROCESS + FILES_PER_RANK * world_size
    is_too_low = hard != resource.RLIM_INFINITY and hard < needed
    if warn and is_too_low:
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
        Process id -> bytes of resident memory at the kill. The result is empty if no process was killed, or
        if the log cannot be read. Most containers and most users cannot read it.
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
    """Return the next record of the kernel log; empty at the end of the log, or if it cannot be read."""
    while True:
        try:
            return os.read(descriptor, _MAX_RECORD_BYTES).decode(errors="replace")
        except BrokenPipeError:  # the kernel has overwritten this record; the next read continues after it
            continue
        except OSError:
            return ""


# Vendor ids on the PCI bus.
NVIDIA = "0x10de"
AMD = "0x1002"
# CUDA's major version -> major and minor version of the oldest driver for Linux that supports it. See CUDA's
# release notes, "minor version compatibility".
OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
PROVIDE_GPU_ADVICE = "docker run --gpus all, or srun --gpus; under WSL2 install NVIDIA's driver in Windows"


class TorchBuild(NamedTuple):
    """Versions that torch was built with."""

    version: str
    cuda: str | None
    """CUDA version, as `13.0`; `None` if torch is built without CUDA."""
    hip: str | None
    """ROCm version; `None` if torch is built without ROCm."""


class GpuFault(NamedTuple):
    """Reason why torch cannot compute on the GPUs of a machine."""

    description: str
    """Description of the fault, without a full stop."""
    fix: str
    """Advice: a command, or a sentence in the imperative."""
    is_fatal: bool
    """Whether the machine has a GPU that a run would expect to use. If not, the fault is only a warning."""


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of NVIDIA's kernel module, as `570.86.15`; `None` if the module is not loaded.

    Under WSL2 the module is never loaded, since the driver is in Windows.

    Args:
        root: Root of the file system.
    """
    with suppress(OSError):
        match = re.search(
            r"Module\s+(?:for \S+\s+)?([\d.]+)", _read_text(root / "proc/driver/nvidia/version")
        )
        return match[1] if match else None
    return None


def is_gpu_visible(vendor: str, root: Path = ROOT) -> bool:
    """Return whether a GPU of this vendor and its driver are visible in this machine or container.

    Args:
        vendor: NVIDIA or AMD.
        root: Root of the file system.
    """
    if vendor == AMD:
        return (root / "dev/kfd").exists()
    under_wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return under_wsl or any((root / "dev").glob("nvidia[0-9]*"))


def count_installed_gpus(vendor: str, root: Path = ROOT) -> int:
    """Return the number of a vendor's GPUs on the PCI bus, with or without a driver.

    Args:
        vendor: NVIDIA or AMD.
        root: Root of the file system.
    """
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            device_class = _read_text(device / "class").strip()
            is_gpu = device_class.startswith(("0x03", "0x12"))  # display controllers, accelerators
            if is_gpu and _read_text(device / "vendor").strip() == vendor:
                count += 1
    return count


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


def find_required_driver(driver: str, cuda: str) -> str | None:
    """Return the driver version that a CUDA version requires, if the installed driver is older.

    Args:
        driver: Version of the installed driver, as `570.86.15`.
        cuda: CUDA version, as `13.0`.

    Returns:
        Required major version; `None` if the driver is new enough, or OLDEST_DRIVERS lacks the CUDA version.
    """
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    installed = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    if oldest is None or installed >= oldest:
        return None
    return str(oldest[0])


def find_gpu_fault(build: TorchBuild, root: Path = ROOT, newest_cuda: str | None = None) -> GpuFault | None:
    """Find the reason why the installed torch cannot compute on the GPUs of this machine.

    Args:
        build: Versions that torch was built with.
        root: Root of the file system.
        newest_cuda: Newest CUDA version that nvidia-smi reports. It takes precedence over the version of the
            driver, since a compatibility library may be installed beside the driver. `None` if it is unknown.

    Returns:
        The fault; `None` if torch can use every GPU, or if there is none and torch is built without CUDA.
    """
    driver = driver_version(root)
    has_nvidia = is_gpu_visible(NVIDIA, root)
    has_amd = is_gpu_visible(AMD, root)
    if has_nvidia:
        if build.cuda is None:
            return _describe_wrong_build(build, "CUDA")
        is_supported = newest_cuda is not None and (
            int(newest_cuda.split(".")[0]) >= int(build.cuda.split(".")[0])
        )
        required = None
        if driver is not None and not is_supported:
            required = find_required_driver(driver, build.cuda)
        if required is not None:
            description = f"the driver {driver} is too old for torch's CUDA {build.cuda}"
            fix = f"install driver {required} or newer, or a build of torch for an earlier CUDA"
            return GpuFault(description, fix, is_fatal=True)
    elif driver is not None:
        description = f"driver {driver}, but no /dev/nvidia0: this container or job has no GPU"
        return GpuFault(description, PROVIDE_GPU_ADVICE, is_fatal=False)
    elif num_installed := count_installed_gpus(NVIDIA, root):
        description = f"{num_installed} NVIDIA GPU{'s' * (num_installed > 1)}, but no driver"
        fix = "install the driver (apt-get install nvidia-driver-580), restart, and check with nvidia-smi"
        return GpuFault(description, fix, is_fatal=build.cuda is not None)
    elif build.cuda is not None and not has_amd:
        description = f"torch is built for CUDA {build.cuda}, but there is no GPU: it computes on the CPU"
        return GpuFault(description, f"if the machine has a GPU: {PROVIDE_GPU_ADVICE}", is_fatal=False)
    if has_amd and build.hip is None and not has_nvidia:
        return _describe_wrong_build(build, "ROCm")
    if has_amd and build.hip is not None and not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER; then log in again"
        return GpuFault("/dev/kfd: Permission denied", fix, is_fatal=True)
    return None


def _describe_wrong_build(build: TorchBuild, backend: str) -> GpuFault:
    """Return the fault of a torch that lacks the backend of the machine's GPU.

    Args:
        build: Versions that torch was built with.
        backend: `CUDA` or `ROCm`.
    """
    version = build.version.partition("+")[0]
    is_cpu_build = build.cuda is None and build.hip is None
    kind = "a CPU build" if is_cpu_build else f"built without {backend}"
    fix = f"install the build of torch {version} for {backend} (see pytorch.org)"
    if backend == "CUDA":  # the package index has the CUDA build for Linux
        fix = f"pip install --force-reinstall torch=={version}"
    # An AMD GPU may be a part of the processor that is not meant for training.
    return GpuFault(f"this torch ({build.version}) is {kind}", fix, is_fatal=backend == "CUDA")


def explain_idle_gpu(build: TorchBuild, environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return the reason why torch sees no GPU although the machine has one.

    Args:
        build: Versions that torch was built with.
        environment: Environment variables.
        root: Root of the file system.

    Returns:
        The reason and its fix; `None` if there is no GPU, or if the user has hidden it.
    """
    variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hides_gpus = any(environment.get(name) == "" for name in variables)
    if hides_gpus or environment.get("DS_ACCELERATOR") == "cpu":
        return None
    if not any(is_gpu_visible(vendor, root) for vendor in (NVIDIA, AMD)):
        return None
    fault = find_gpu_fault(build, root)
    if fault is not None:
        return f"{fault.description}: {fault.fix}"
    command = format_pipeline_command("doctor")
    return f"torch ({build.version}) does not see it; to find the fault run: {command}"


def _read_text(path: Path) -> str:
    """Return the text of a file; bytes that are not UTF-8 are replaced."""
    return path.read_text(errors="replace")
