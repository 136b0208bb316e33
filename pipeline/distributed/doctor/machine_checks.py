"""Checks that run on each machine of a job; CHECKS lists them. Imports no torch.

A check runs on the machine that it checks. It returns a CheckResult, with the faults of this machine.
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
    is_gpu_visible,
)
from pipeline.distributed.op_builds import ASYNC_IO, CPU_ADAM, QUANTIZER
from pipeline.files import GIB, format_bytes

PROJECT = Path(__file__).parents[3]
SOURCES = {"pipeline": {".py"}, "launch": {".py", ".sh", ".yaml"}, "ds_configs": {".json"}}
"""Folder of the project -> endings of the source files that must be equal on all machines."""
MUST_AGREE = ("torch", "CUDA", "ROCm", "NCCL", "deepspeed")
"""Packages whose versions must be equal on all machines. Other different versions are only warnings."""
TOOL_TIMEOUT = 60
"""Seconds that nvidia-smi and other programs may take. Without persistence mode, eight GPUs take ten."""
RANK_MEMORY_LIMITS = (1 * GIB, 2 * GIB)
"""Free bytes per rank below which a check fails, or warns. torch and DeepSpeed alone take about 1 GiB."""
DISK_LIMITS = (1 * GIB, 10 * GIB)
"""Free bytes of a folder below which a check fails, or warns."""
SMALL_DISK_LIMITS = {"/tmp": (GIB // 4, GIB), "/dev/shm": (GIB // 16, GIB)}
"""Folder that needs less -> its limits, in place of DISK_LIMITS.

NCCL and the loader's workers exchange data through /dev/shm, and containers often have only 64 MiB of it.
"""
MIN_FREE_FILES = 1000
"""Number of files that must still fit on a folder's file system."""
NATIVE_OPS = {op.label: op for op in (CPU_ADAM, ASYNC_IO, QUANTIZER)}
"""Label -> native op."""


@dataclass(frozen=True)
class MachineQuestion:
    """Question of the doctor to one machine: facts about the job, and the values to compare with."""

    token: str
    """Secret of this examination. A message that contains it comes from the doctor's own processes."""
    host: str
    """Name of this machine in the job."""
    hosts: list[str]
    """Names of all machines of the job."""
    folders: list[str]
    """Folders that the run writes to. The first is the folder of runs."""
    devices: list[int] | None = None
    """Indices of the job's devices on this machine, one for each rank; `None` for all devices."""
    ops: list[str] | None = None
    """Labels of the native ops that the run needs; `None` if no run is known."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that a launch would set."""
    launching_machine: dict[str, str | None] = field(default_factory=dict)
    """Source and versions on the launching machine, which are expected on this machine too.

    See `read_source_and_versions`.
    """
    is_remote: bool = True
    """Whether the launching machine reaches this one by ssh."""

    def format_command(self, command: str) -> str:
        """Return the line that a user types on the launching machine to run a command on this machine."""
        return f"ssh {HOST} {command}" if self.is_remote else command


@dataclass(frozen=True)
class CheckResult:
    """Result of one check on one machine."""

    ok_text: str
    """Text of the check's row in the table if no machine has a fault."""
    faults: list[Fault]
    """Faults of this machine; empty if it passed."""


def run_tool(*command: str) -> tuple[int | None, str]:
    """Run a program, and return its exit code and its output.

    The exit code is `None` if the program is not installed. The output joins standard output and error.

    Raises:
        subprocess.TimeoutExpired: The program did not end within TOOL_TIMEOUT.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT, check=False)
    except OSError:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def read_source_and_versions() -> dict[str, str | None]:
    """Return the `commit` of this machine, the `digest` of its source files, and its versions by name.

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
    """Return package -> version; `None` if it is not installed, or if torch is built without it."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    torch_version: dict[str, Any] = {}
    spec = util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        # torch/version.py has only assignments. Importing torch would take seconds.
        with contextlib.suppress(OSError):
            torch_version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    for name, key in {"torch": "__version__", "CUDA": "cuda", "ROCm": "hip"}.items():
        versions[name] = torch_version.get(key)
    distributions = {  # names under which pip may have installed a package
        "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "deepspeed": ("deepspeed",),
        "transformers": ("transformers",),
    }
    for name, candidates in distributions.items():
        versions[name] = None
        for distribution in candidates:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(distribution)
                break
    return versions


def format_sync_command() -> str:
    """Return the command that copies the launching machine's project to HOST."""
    return f"rsync -a --delete --exclude runs {PROJECT}/ {HOST}:{PROJECT}/"


def check_project(question: MachineQuestion) -> CheckResult:
    """Compare this machine's source files with those of the launching machine."""
    own = read_source_and_versions()
    commit = own["commit"]
    expected_commit = question.launching_machine["commit"]
    faults = []
    fix = format_sync_command()
    if commit is not None and expected_commit is not None and commit != expected_commit:
        description = f"commit {commit[:10]}, but the launching machine has {expected_commit[:10]}"
        faults.append(Fault("fail", description, fix))
    elif own["digest"] != question.launching_machine["digest"]:
        faults.append(Fault("fail", "source files differ from the launching machine's", fix))
    ok_text = f"commit {expected_commit[:10]}" if expected_commit else "same source files"
    return CheckResult(ok_text, faults)


def check_versions(question: MachineQuestion) -> CheckResult:
    """Compare this machine's packages with those of the launching machine."""
    own = read_versions()
    faults = []
    for name, version in own.items():
        expected = question.launching_machine[name]
        install = question.format_command(f"{sys.executable} -m pip install {name.lower()}=={expected}")
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
            description = f"{name} {version}, but the launching machine has {expected}"
            faults.append(Fault("fail" if is_serious else "warning", description, fix))
    ok_text = ", ".join(f"{name} {version}" for name, version in own.items() if version)
    return CheckResult(ok_text, faults)


def read_gpus() -> list[dict[str, str]]:
    """Return the GPUs that nvidia-smi reports and that CUDA_VISIBLE_DEVICES leaves visible, in its order.

    Returns:
        For each GPU: `index`, `name`, `total` and `used` memory in MiB, `uuid`, and `errors` (number of
        uncorrectable ECC errors since the driver was loaded). A value that the GPU lacks is `[N/A]`.
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
        if not matches:  # CUDA ignores the first invalid entry and all entries after it
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
        description = f"device {max(requested)} is requested, but the machine has {len(gpus)} GPUs"
        faults.append(Fault("fail", description, f"write {HOST} slots={len(gpus)} in the hostfile"))
    positions = range(len(gpus)) if requested is None else requested
    for position in positions:
        if position < len(gpus):
            faults += _find_gpu_faults(question, gpus[position])
    return CheckResult(f"{len(gpus)} x {gpus[0]['name']}", faults)


def _find_gpu_faults(question: MachineQuestion, gpu: dict[str, str]) -> list[Fault]:
    """Return the faults of one GPU: memory in use, and uncorrectable ECC errors.

    Args:
        question: Question of the doctor.
        gpu: Values of the GPU from `read_gpus`.
    """
    faults = []
    # A GPU that shares the processor's memory reports `[N/A]`.
    used, total = (int(gpu[name]) << 20 if gpu[name].isdigit() else 0 for name in ("used", "total"))
    if used > max(GIB, total // 20):
        status: Status = "fail" if used > total // 2 else "warning"
        description = f"GPU {gpu['index']}: {format_bytes(used)} of {format_bytes(total)} is in use"
        fix = question.format_command("nvidia-smi") + " shows the process: end it, or exclude the GPU"
        faults.append(Fault(status, description, fix))
    if gpu["errors"].isdigit() and int(gpu["errors"]):
        description = f"GPU {gpu['index']}: {gpu['errors']} uncorrectable ECC errors"
        reset = question.format_command(f"sudo nvidia-smi --gpu-reset -i {gpu['index']}")
        faults.append(Fault("warning", description, f"{reset}; if errors return, exclude the GPU"))
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
    if code and version is not None and is_gpu_visible(NVIDIA, root):
        fix = f"restart {HOST}, or unload the old kernel module (modprobe -r nvidia)"
        problem = (output.strip().splitlines() or [f"exit code {code}"])[-1].strip()
        faults.append(Fault("fail", f"nvidia-smi fails: {problem[:150]}", fix))
    versions = read_versions()
    if versions["torch"] is not None:  # check_versions reports a missing torch
        build = TorchBuild(versions["torch"], versions["CUDA"], versions["ROCm"])
        fault = find_gpu_fault(build, root, newest_cuda[1] if newest_cuda else None)
        if fault is not None:
            prefix = f"on {HOST}: " if question.is_remote else ""
            faults.append(
                Fault("fail" if fault.is_fatal else "warning", fault.description, prefix + fault.fix)
            )
    _, log = run_tool("dmesg")
    xids = re.findall(r"Xid \(PCI:[\w:.]+\): \d+", log)
    if xids:
        fix = question.format_command("dmesg") + " | grep Xid; exclude the GPU if it has Xid 48, 79, 94 or 95"
        faults.append(Fault("warning", f"the kernel log has GPU errors, the last one {xids[-1]}", fix))
    if version is not None:
        ok_text = f"NVIDIA {version}"
    elif is_gpu_visible(AMD, root):
        ok_text = "AMD"
    else:
        ok_text = "NVIDIA" if code == 0 else "no GPU, no driver"
    if newest_cuda:
        ok_text += f", up to CUDA {newest_cuda[1]}"
    return CheckResult(ok_text, faults)


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
        description = f"{format_bytes(free)} free for {ranks} rank{'s' * (ranks > 1)}"
        fix = question.format_command("ps -eo rss,user,comm --sort=-rss")
        fix += " | head shows the largest processes: end them, or raise the job's memory limit"
        faults.append(Fault(status, description, fix))
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
            fix = question.format_command(f"df -h {path}") + "; make room, or use another folder"
            if path == "/dev/shm":
                fix = (
                    question.format_command("'mount -o remount,size=16G /dev/shm'")
                    + " (docker: --shm-size=16g)"
                )
            status = _judge(free, SMALL_DISK_LIMITS.get(path, DISK_LIMITS))
            if status != "ok":
                faults.append(Fault(status, f"{path}: {format_bytes(free)} free", fix))
            elif state.f_files and state.f_favail < MIN_FREE_FILES:
                fix = question.format_command(f"df -i {path}") + "; delete files, or use another folder"
                faults.append(Fault("fail", f"{path}: room for only {state.f_favail} more files", fix))
    return CheckResult(f"enough free in {', '.join(paths)}", faults)


def format_marker(question: MachineQuestion, host: str) -> str:
    """Return the name of the marker file that a host writes into the folder of runs.

    Another host sees this file if both share the folder.
    """
    return f".doctor-{question.token}-{host}"


def check_folders(question: MachineQuestion) -> CheckResult:
    """Check that the run's folders are writable, by writing a file into each.

    The file in the first folder is this host's marker, which stays there. Probe.close removes it.
    """
    faults = []
    for number, path in enumerate(question.folders):
        name = format_marker(question, question.host)
        if number:
            name += f".{number}"
        try:
            file = find_existing_folder(path) / name
            file.write_text("created by the doctor of deepspeed-pipeline; may be deleted\n")
            if number:
                file.unlink()
        except OSError as error:
            fix = (
                question.format_command(f"ls -ld {path}") + "; give this user write permission, or make room"
            )
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
    # Name, whether it is installed, labels of the ops that need it, and the command that provides it.
    requirements = [
        ("C++ compiler", shutil.which(os.environ.get("CXX", "c++")), NATIVE_OPS, "apt-get install g++"),
        ("ninja", has_ninja, NATIVE_OPS, install_ninja),
        ("libaio", any(map(Path.exists, includes)), [ASYNC_IO.label], "apt-get install libaio-dev"),
        (
            "nvcc",
            has_nvcc,
            [QUANTIZER.label],
            "printenv CUDA_HOME; set it to the folder of a CUDA toolkit of torch's CUDA version",
        ),
    ]
    faults = []
    needed = [CPU_ADAM.label] if question.ops is None else question.ops
    for label in needed:
        if set(NATIVE_OPS[label].folders) <= built:
            continue
        # Without CPU Adam a run uses torch's AdamW. Nothing replaces the other ops.
        status: Status = "warning" if label == CPU_ADAM.label else "fail"
        for name, is_installed, users, fix in requirements:
            if label in users and not is_installed:
                faults.append(Fault(status, f"no {name} for {label}", question.format_command(fix)))
                break
    ok_text = "the run needs none" if question.ops == [] else "built, or can be built when needed"
    return CheckResult(ok_text, faults)


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
"""Name of each check, as in the doctor's table -> its function."""
