"""Checks that run on each machine of a job; the table is CHECKS. Imports no torch.

A check reads the state of its machine, judges it there, and returns a CheckResult with its faults.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from pipeline.distributed.doctor.rows import HOST, Fault, Status
from pipeline.distributed.machine import (
    AMD,
    NVIDIA,
    ROOT,
    TorchBuild,
    available_memory,
    count_gpus,
    driver_version,
    find_gpu_fault,
    is_reachable,
)
from pipeline.distributed.op_builds import ASYNC_IO, CPU_ADAM, QUANTIZER
from pipeline.files import GIB, format_bytes

PROJECT = Path(__file__).parents[3]
SOURCES = {"pipeline": {".py"}, "launch": {".py", ".sh", ".yaml"}, "ds_configs": {".json"}}
"""Folder of the project -> endings of the source files that must be equal on all machines."""
MUST_AGREE = ("torch", "CUDA", "ROCm", "NCCL", "deepspeed")
"""Packages whose versions must be equal on all machines. Other versions that differ are warnings."""
TOOL_TIMEOUT = 60
"""Seconds for nvidia-smi and other programs. Without persistence mode, eight GPUs take ten seconds."""
RANK_MEMORY_LIMITS = (1 * GIB, 2 * GIB)
"""Free bytes per rank below which a check fails, or warns. torch and DeepSpeed alone take about 1 GiB."""
DISK_LIMITS = (1 * GIB, 10 * GIB)
"""Free bytes of a folder below which a check fails, or warns."""
SMALL_DISK_LIMITS = {"/tmp": (GIB // 4, GIB), "/dev/shm": (GIB // 16, GIB)}
"""Limits like DISK for folders that need less. Containers often have 64 MiB of /dev/shm.

NCCL and the loader's workers exchange data through /dev/shm.
"""
OPS = {op.label: op for op in (CPU_ADAM, ASYNC_IO, QUANTIZER)}
"""Label -> native op."""


@dataclass(frozen=True)
class MachineQuestion:
    """Question of the doctor to one machine: facts about the job, and the values to compare with."""

    token: str
    """Secret of this examination. An answer that contains it comes from the doctor's own processes."""
    name: str
    """Name of this machine in the job."""
    names: list[str]
    """All hosts of the job."""
    folders: list[str]
    """Folders that the run writes to. The first is the folder of runs."""
    devices: list[int] | None = None
    """Devices of the job on this machine; `None` for all."""
    ops: list[str] | None = None
    """Labels of the native ops that the run needs; `None` if no run is known."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that a launch would set."""
    here: dict[str, str | None] = field(default_factory=dict)
    """Source and versions on the launching machine (see `read_here`)."""
    is_remote: bool = True
    """Whether the launching machine reaches this one by ssh."""

    def on_host(self, command: str) -> str:
        """Return the command line that runs a command on this machine, typed where the doctor was started."""
        return f"ssh {HOST} {command}" if self.is_remote else command


@dataclass(frozen=True)
class CheckResult:
    """Result of one check on one machine."""

    fine: str
    """Text of the row if there is no fault."""
    faults: list[Fault]
    """Faults that the check found; empty if it passed."""


def run_tool(*command: str) -> tuple[int | None, str]:
    """Run a program, and return its exit code and its output.

    The exit code is `None` if the program is not installed. The output joins standard output and error.

    Raises:
        subprocess.TimeoutExpired: The program did not end within TOOL_LIMIT.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT, check=False)
    except OSError:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def read_source_and_versions() -> dict[str, str | None]:
    """Return the commit, a digest of the source files, and the versions of this machine.

    The commit is `None` without git. For the versions see `read_versions`.
    """
    digest = hashlib.sha256()
    for folder, endings in SOURCES.items():
        for path in sorted((PROJECT / folder).rglob("*")):
            if path.suffix in endings and path.is_file():
                digest.update(f"{path.relative_to(PROJECT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    code, commit = run_tool("git", "-C", str(PROJECT), "rev-parse", "HEAD")
    source = {"commit": None if code else commit.strip(), "digest": digest.hexdigest()}
    return source | read_versions()


def read_versions() -> dict[str, str | None]:
    """Return the version of each package; `None` if it is not installed, or torch is built without it."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    torch_version: dict[str, Any] = {}
    spec = util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        # torch/version.py has only assignments. Importing torch would take seconds.
        with contextlib.suppress(OSError):
            torch_version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    for name, key in {"torch": "__version__", "CUDA": "cuda", "ROCm": "hip"}.items():
        versions[name] = torch_version.get(key)
    packages = {
        "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "deepspeed": ("deepspeed",),
        "transformers": ("transformers",),
    }
    for name, candidates in packages.items():
        versions[name] = None
        for package in candidates:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(package)
                break
    return versions


def check_project(question: MachineQuestion) -> CheckResult:
    """Compare this machine's source files with those of the launching machine."""
    own = read_source_and_versions()
    commit = own["commit"]
    expected_commit = question.here["commit"]
    faults = []
    fix = f"rsync -a --delete --exclude runs {PROJECT}/ {HOST}:{PROJECT}/"
    if commit != expected_commit and None not in (commit, expected_commit):
        found = f"commit {str(commit)[:10]}, but the launching machine has {str(expected_commit)[:10]}"
        faults.append(Fault("fail", found, fix))
    elif own["digest"] != question.here["digest"]:
        faults.append(Fault("fail", "source files differ from the launching machine's", fix))
    fine = f"commit {expected_commit[:10]}" if expected_commit else "same source files"
    return CheckResult(fine, faults)


def check_versions(question: MachineQuestion) -> CheckResult:
    """Compare this machine's packages with those of the launching machine."""
    own = read_versions()
    faults = []
    for name, version in own.items():
        expected = question.here[name]
        install = question.on_host(f"{sys.executable} -m pip install {name.lower()}=={expected}")
        if version is None and name in ("torch", "deepspeed"):
            faults.append(Fault("fail", f"{name} is not installed", install))
        elif version != expected:
            minor, expected_minor = (str(each).rpartition(".")[0] for each in (version, expected))
            is_serious = name in MUST_AGREE or (name == "python" and minor != expected_minor)
            fix = install
            if name == "python":
                fix = f"create the environment on {HOST} with Python {expected}"
            elif name in ("CUDA", "ROCm", "NCCL"):
                fix = f"install the same torch on {HOST}, with its dependencies"
            found = f"{name} {version}, but the launching machine has {expected}"
            faults.append(Fault("fail" if is_serious else "warning", found, fix))
    return CheckResult(", ".join(f"{name} {version}" for name, version in own.items() if version), faults)


def read_gpus() -> list[dict[str, str]]:
    """Return the GPUs that nvidia-smi reports and that CUDA_VISIBLE_DEVICES leaves visible.

    Returns:
        For each GPU: `index`, `name`, `total` and `used` memory in MiB, `uuid`, and `errors` (uncorrectable
        ECC errors). A value that the GPU lacks is `[N/A]`.
    """
    fields = {
        "index": "index",
        "name": "name",
        "total": "memory.total",
        "used": "memory.used",
        "uuid": "uuid",
        "errors": "ecc.errors.uncorrected.volatile.total",
    }
    query = f"--query-gpu={','.join(fields.values())}"
    code, output = run_tool("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = list(csv.reader(output.splitlines(), skipinitialspace=True))
    gpus = [dict(zip(fields, row, strict=True)) for row in rows if code == 0 and len(row) == len(fields)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    visible_gpus = []
    for word in map(str.strip, visible.split(",")):
        matches = [gpu for gpu in gpus if word and (gpu["index"] == word or gpu["uuid"].startswith(word))]
        if not matches:  # CUDA ignores everything from the first invalid entry on
            break
        visible_gpus += matches[:1]
    return visible_gpus


def check_devices(question: MachineQuestion) -> CheckResult:
    """Check that the job's devices exist, have no ECC errors and are not in use."""
    gpus = read_gpus()
    requested = question.devices
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not gpus:
        faults = []
        if requested and len(requested) > cores:
            fix = f"write {HOST} slots={cores} in the hostfile"
            faults.append(Fault("warning", f"{len(requested)} slots share {cores} cores", fix))
        return CheckResult(f"{cores} cores", faults)
    faults = []
    if requested and max(requested) >= len(gpus):
        found = f"device {max(requested)} is requested, but the machine has {len(gpus)} GPUs"
        faults.append(Fault("fail", found, f"write {HOST} slots={len(gpus)} in the hostfile"))
    for position in range(len(gpus)) if requested is None else requested:
        if position < len(gpus):
            faults += _find_gpu_faults(question, gpus[position])
    return CheckResult(f"{len(gpus)} x {gpus[0]['name']}", faults)


def _find_gpu_faults(question: MachineQuestion, gpu: dict[str, str]) -> list[Fault]:
    faults = []
    # A GPU that shares the processor's memory reports `[N/A]`.
    used, total = (int(gpu[name]) << 20 if gpu[name].isdigit() else 0 for name in ("used", "total"))
    if used > max(GIB, total // 20):
        status: Status = "fail" if used > total // 2 else "warning"
        found = f"GPU {gpu['index']}: {format_bytes(used)} of {format_bytes(total)} is in use"
        fix = question.on_host("nvidia-smi") + " shows the process: end it, or exclude the GPU"
        faults.append(Fault(status, found, fix))
    if gpu["errors"].isdigit() and int(gpu["errors"]):
        found = f"GPU {gpu['index']}: {gpu['errors']} uncorrectable ECC errors"
        reset = question.on_host(f"sudo nvidia-smi --gpu-reset -i {gpu['index']}")
        faults.append(Fault("warning", found, f"{reset}; if errors return, exclude the GPU"))
    return faults


def check_driver(question: MachineQuestion, root: Path = ROOT) -> CheckResult:
    """Check that torch can use the machine's GPUs, and that the kernel has logged no errors of them.

    Args:
        question: Question of the doctor.
        root: Root of the file system.
    """
    code, output = run_tool("nvidia-smi")
    newest_cuda = re.search(r"CUDA Version\s*:\s*([\d.]+)", output)
    version = driver_version(root)
    faults = []
    if code and version is not None and is_reachable(NVIDIA, root):
        fix = f"restart {HOST}, or unload the old kernel module (modprobe -r nvidia)"
        problem = (output.strip().splitlines() or [f"exit code {code}"])[-1].strip()
        faults.append(Fault("fail", f"nvidia-smi fails: {problem[:150]}", fix))
    versions = read_versions()
    if versions["torch"] is not None:  # check_versions reports a missing torch
        torch = TorchBuild(versions["torch"], versions["CUDA"], versions["ROCm"])
        fault = find_gpu_fault(torch, root, newest_cuda[1] if newest_cuda else None)
        if fault is not None:
            prefix = f"on {HOST}: " if question.is_remote else ""
            faults.append(
                Fault("fail" if fault.is_fatal else "warning", fault.description, prefix + fault.fix)
            )
    _, log = run_tool("dmesg")
    xids = re.findall(r"Xid \(PCI:[\w:.]+\): \d+", log)
    if xids:
        fix = question.on_host("dmesg") + " | grep Xid; exclude the GPU if it has Xid 48, 79, 94 or 95"
        faults.append(Fault("warning", f"the kernel log has GPU errors, the last one {xids[-1]}", fix))
    if version is not None:
        fine = f"NVIDIA {version}"
    elif is_reachable(AMD, root):
        fine = "AMD"
    else:
        fine = "NVIDIA" if code == 0 else "no GPU, no driver"
    return CheckResult(f"{fine}, up to CUDA {newest_cuda[1]}" if newest_cuda else fine, faults)


def _judge(value: float, limits: tuple[float, float]) -> Status:
    """Return `fail` below the first limit, `warning` below the second, and `ok` otherwise."""
    if value < limits[0]:
        return "fail"
    return "warning" if value < limits[1] else "ok"


def check_memory(question: MachineQuestion) -> CheckResult:
    """Check that each rank of this machine has enough memory."""
    free = available_memory()
    ranks = len(question.devices) if question.devices is not None else count_gpus(os.environ) or 1
    faults = []
    status = _judge(free / ranks, RANK_MEMORY_LIMITS)
    if status != "ok":
        found = f"{format_bytes(free)} free for {ranks} rank{'s' * (ranks > 1)}"
        fix = question.on_host("ps -eo rss,user,comm --sort=-rss")
        fix += " | head shows the largest processes: end them, or raise the job's limit"
        faults.append(Fault(status, found, fix))
    return CheckResult(f"at least {format_bytes(RANK_MEMORY_LIMITS[1])} free for each rank", faults)


def find_existing_folder(folder: str) -> Path:
    """Return the folder if it exists, otherwise its closest parent that exists."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_disk(question: MachineQuestion) -> CheckResult:
    """Check the free space of the run's folders, of /tmp and of /dev/shm."""
    paths = [*question.folders, "/tmp", "/dev/shm"]
    faults = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            state = os.statvfs(find_existing_folder(path))
            free = state.f_bavail * state.f_frsize
            fix = question.on_host(f"df -h {path}") + "; make room, or use another folder"
            if path == "/dev/shm":
                fix = question.on_host("'mount -o remount,size=16G /dev/shm'") + " (docker: --shm-size=16g)"
            status = _judge(free, SMALL_DISK_LIMITS.get(path, DISK_LIMITS))
            if status != "ok":
                faults.append(Fault(status, f"{path}: {format_bytes(free)} free", fix))
            elif state.f_files and state.f_favail < 1000:
                fix = question.on_host(f"df -i {path}") + "; delete files, or use another folder"
                faults.append(Fault("fail", f"{path}: room for only {state.f_favail} more files", fix))
    return CheckResult(f"enough free in {', '.join(paths)}", faults)


def format_marker(question: MachineQuestion, name: str) -> str:
    """Return the name of the marker file that a host writes into the folder of runs.

    The other hosts see it if they share the folder.
    """
    return f".doctor-{question.token}-{name}"


def check_folders(question: MachineQuestion) -> CheckResult:
    """Check that the run's folders are writable. This host's marker remains in the first one."""
    faults = []
    for number, path in enumerate(question.folders):
        name = format_marker(question, question.name) + (f".{number}" if number else "")
        try:
            file = find_existing_folder(path) / name
            file.write_text("created by the doctor of deepspeed-pipeline; may be deleted\n")
            if number:
                file.unlink()
        except OSError as error:
            fix = question.on_host(f"ls -ld {path}") + "; give this user write permission, or make room"
            faults.append(Fault("fail", f"{path} cannot be written: {error.strerror or error}", fix))
    return CheckResult("can be written", faults)


def check_native_ops(question: MachineQuestion) -> CheckResult:
    """Check that the native ops that the run needs are built, or that this machine can compile them.

    If no run is known, check CPU Adam.
    """
    own_folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"
    roots = [Path(own_folder)] if own_folder else sorted(cache.glob("*"))
    built = {library.stem for root in roots for library in root.glob("*/*.so")}
    cuda = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    includes = [Path(prefix) / "include/libaio.h" for prefix in ("/usr", "/usr/local", sys.prefix)]
    has_nvcc = shutil.which("nvcc", path=str(cuda / "bin")) or shutil.which("nvcc")
    has_ninja = shutil.which("ninja") or Path(sys.executable).with_name("ninja").exists()
    install_ninja = f"{sys.executable} -m pip install ninja"
    # Name, whether it is found, the ops that need it, and the command that provides it.
    requirements = [
        ("C++ compiler", shutil.which(os.environ.get("CXX", "c++")), OPS, "apt-get install g++"),
        ("ninja", has_ninja, OPS, install_ninja),
        ("libaio", any(map(Path.exists, includes)), [ASYNC_IO.label], "apt-get install libaio-dev"),
        (
            "nvcc",
            has_nvcc,
            [QUANTIZER.label],
            "printenv CUDA_HOME; set it to CUDA of torch's version",
        ),
    ]
    faults = []
    for label in [CPU_ADAM.label] if question.ops is None else question.ops:
        if set(OPS[label].folders) <= built:
            continue
        # Without CPU Adam a run uses torch's AdamW. Nothing replaces the other ops.
        status: Status = "warning" if label == CPU_ADAM.label else "fail"
        missing = [
            (name, fix) for name, is_found, users, fix in requirements if label in users and not is_found
        ]
        faults += [
            Fault(status, f"no {name} for {label}", question.on_host(fix)) for name, fix in missing[:1]
        ]
    fine = "the run needs none" if question.ops == [] else "built, or can be built when needed"
    return CheckResult(fine, faults)


CHECKS: dict[str, Callable[[MachineQuestion], CheckResult]] = {
    "project": check_project,
    "versions": check_versions,
    "devices": check_devices,
    "driver": check_driver,
    "memory": check_memory,
    "disk": check_disk,
    "folders": check_folders,
    "native ops": check_native_ops,
}
"""Name of each check in the table -> its function."""
