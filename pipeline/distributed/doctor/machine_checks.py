"""Checks that a machine makes of itself: CHECKS is the table of them. Imports no torch.

Each check looks and judges, on the machine itself, and returns what is well and what is wrong.
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
    find_card_fault,
    is_reachable,
)
from pipeline.distributed.op_builds import ASYNC_IO, CPU_ADAM, QUANTIZER
from pipeline.files import GIB, format_bytes

PROJECT = Path(__file__).parents[3]
SOURCES = {"pipeline": {".py"}, "launch": {".py", ".sh", ".yaml"}, "ds_configs": {".json"}}
MUST_AGREE = ("torch", "CUDA", "ROCm", "NCCL", "deepspeed")
TOOL_LIMIT = 60
"""Seconds for nvidia-smi and others: without persistence mode a machine of eight cards takes ten."""
MEMORY_A_RANK = (1 * GIB, 2 * GIB)
"""Bytes below which a check fails, or warns: torch and DeepSpeed alone take about one GiB."""
DISK = (1 * GIB, 10 * GIB)
SMALL_DISK = {"/tmp": (GIB // 4, GIB), "/dev/shm": (GIB // 16, GIB)}
"""NCCL and the loader's workers exchange through /dev/shm; containers often get 64 MiB of it."""
OPS = {op.label: op for op in (CPU_ADAM, ASYNC_IO, QUANTIZER)}


@dataclass(frozen=True)
class MachineQuestion:
    """The doctor's question to one machine."""

    token: str
    """Secret of this examination, which no other program knows."""
    name: str
    names: list[str]
    """All hosts of the job."""
    folders: list[str]
    """Folders that the run writes to; the first is that of its runs."""
    devices: list[int] | None = None
    """Devices of the job on this machine; None for all."""
    ops: list[str] | None = None
    """Labels of the native ops that the run needs; None if no run is known."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that a launch would set."""
    here: dict[str, str | None] = field(default_factory=dict)
    """Source and versions of the machine that the job is started on: see `read_here`."""
    is_remote: bool = True

    def on_host(self, command: str) -> str:
        """Return the command on this host, for the shell that the doctor was started in."""
        return f"ssh {HOST} {command}" if self.is_remote else command


@dataclass(frozen=True)
class CheckResult:
    """Result of one check on this machine."""

    fine: str
    """Text of the row if there is no fault."""
    faults: list[Fault]


def run_tool(*command: str) -> tuple[int | None, str]:
    """Return the exit code of a program and what it said; the code is None if it is not installed.

    Raises:
        subprocess.TimeoutExpired: It did not answer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT, check=False)
    except OSError:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def read_here() -> dict[str, str | None]:
    """Return the commit, a digest of the source files, and the version of each package; None if it lacks."""
    digest = hashlib.sha256()
    for folder, endings in SOURCES.items():
        for path in sorted((PROJECT / folder).rglob("*")):
            if path.suffix in endings and path.is_file():
                digest.update(f"{path.relative_to(PROJECT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    code, commit = run_tool("git", "-C", str(PROJECT), "rev-parse", "HEAD")
    own = {"commit": None if code else commit.strip(), "digest": digest.hexdigest()}
    return own | read_versions()


def read_versions() -> dict[str, str | None]:
    """Return the version of each package; None if it is not installed, or built without it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    stated: dict[str, Any] = {}
    spec = util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        # torch/version.py is assignments only; importing torch takes seconds.
        with contextlib.suppress(OSError):
            stated = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    for name, key in {"torch": "__version__", "CUDA": "cuda", "ROCm": "hip"}.items():
        found[name] = stated.get(key)
    packages = {
        "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "deepspeed": ("deepspeed",),
        "transformers": ("transformers",),
    }
    for name, candidates in packages.items():
        found[name] = None
        for package in candidates:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(package)
                break
    return found


def check_project(question: MachineQuestion) -> CheckResult:
    """Compare this machine's source with that of the machine that the job is started on."""
    own, here = read_here(), question.here
    commit, wanted = own["commit"], here["commit"]
    faults = []
    fix = f"rsync -a --delete --exclude runs {PROJECT}/ {HOST}:{PROJECT}/"
    if commit != wanted and None not in (commit, wanted):
        faults.append(Fault("fail", f"commit {str(commit)[:10]}, here {str(wanted)[:10]}", fix))
    elif own["digest"] != here["digest"]:
        faults.append(Fault("fail", "other source files than here, at the same commit", fix))
    return CheckResult(f"commit {wanted[:10]}" if wanted else "the same files", faults)


def check_versions(question: MachineQuestion) -> CheckResult:
    """Compare the packages with those of the machine that the job is started on."""
    own = read_versions()
    faults = []
    for name, version in own.items():
        wanted = question.here[name]
        install = question.on_host(f"{sys.executable} -m pip install {name.lower()}=={wanted}")
        if version is None and name in ("torch", "deepspeed"):
            faults.append(Fault("fail", f"no {name}", install))
        elif version != wanted:
            minor = [str(each).rpartition(".")[0] for each in (version, wanted)]
            is_serious = name in MUST_AGREE or (name == "python" and minor[0] != minor[1])
            fix = install
            if name == "python":
                fix = f"make the environment on {HOST} with Python {wanted}"
            elif name in ("CUDA", "ROCm", "NCCL"):
                fix = f"install the same torch on {HOST}, with what it depends on"
            faults.append(Fault("fail" if is_serious else "warning", f"{name} {version}, here {wanted}", fix))
    return CheckResult(", ".join(f"{name} {version}" for name, version in own.items() if version), faults)


def read_gpus() -> list[dict[str, str]]:
    """Return what nvidia-smi says of each GPU that CUDA_VISIBLE_DEVICES leaves. Sizes in MiB."""
    fields = {
        "index": "index",
        "name": "name",
        "total": "memory.total",
        "used": "memory.used",
        "uuid": "uuid",
        "errors": "ecc.errors.uncorrected.volatile.total",
    }
    query = f"--query-gpu={','.join(fields.values())}"
    code, said = run_tool("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = list(csv.reader(said.splitlines(), skipinitialspace=True))
    gpus = [dict(zip(fields, row, strict=True)) for row in rows if code == 0 and len(row) == len(fields)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    found = []
    for word in map(str.strip, visible.split(",")):
        match = [gpu for gpu in gpus if word and (gpu["index"] == word or gpu["uuid"].startswith(word))]
        if not match:  # CUDA stops at the first that is none
            break
        found += match[:1]
    return found


def check_devices(question: MachineQuestion) -> CheckResult:
    """Check that the devices of the job are there, healthy and not in use."""
    gpus, wanted = read_gpus(), question.devices
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not gpus:
        faults = []
        if wanted and len(wanted) > cores:
            fix = f"write {HOST} slots={cores} in the hostfile"
            faults.append(Fault("warning", f"{len(wanted)} slots on {cores} cores: they share", fix))
        return CheckResult(f"{cores} cores", faults)
    faults = []
    if wanted and max(wanted) >= len(gpus):
        found = f"device {max(wanted)} is asked for and there are {len(gpus)} GPUs"
        faults.append(Fault("fail", found, f"write {HOST} slots={len(gpus)} in the hostfile"))
    for position in range(len(gpus)) if wanted is None else wanted:
        if position < len(gpus):
            faults += _faults_of_gpu(question, gpus[position])
    return CheckResult(f"{len(gpus)} x {gpus[0]['name']}", faults)


def _faults_of_gpu(question: MachineQuestion, gpu: dict[str, str]) -> list[Fault]:
    faults = []
    # A GPU that shares the processor's memory has `[N/A]`.
    used, total = (int(gpu[name]) << 20 if gpu[name].isdigit() else 0 for name in ("used", "total"))
    if used > max(GIB, total // 20):
        status: Status = "fail" if used > total // 2 else "warning"
        found = f"GPU {gpu['index']}: {format_bytes(used)} of {format_bytes(total)} is in use"
        fix = question.on_host("nvidia-smi") + " names the process: end it, or leave the GPU out"
        faults.append(Fault(status, found, fix))
    if gpu["errors"].isdigit() and int(gpu["errors"]):
        found = f"GPU {gpu['index']}: {gpu['errors']} uncorrectable ECC errors"
        reset = question.on_host(f"sudo nvidia-smi --gpu-reset -i {gpu['index']}")
        faults.append(Fault("warning", found, f"{reset}; where they come back, leave it out"))
    return faults


def check_driver(question: MachineQuestion, root: Path = ROOT) -> CheckResult:
    """Check that torch can use the cards of this machine, and that the kernel has not logged their faults."""
    code, said = run_tool("nvidia-smi")
    newest = re.search(r"CUDA Version\s*:\s*([\d.]+)", said)
    version = driver_version(root)
    faults = []
    if code and version is not None and is_reachable(NVIDIA, root):
        fix = f"restart {HOST}, or load the module of the installed version (modprobe -r nvidia)"
        problem = (said.strip().splitlines() or [f"code {code}"])[-1].strip()
        faults.append(Fault("fail", f"nvidia-smi fails: {problem[:150]}", fix))
    versions = read_versions()
    if versions["torch"] is not None:  # else check_versions has said so
        torch = TorchBuild(versions["torch"], versions["CUDA"], versions["ROCm"])
        fault = find_card_fault(torch, root, newest[1] if newest else None)
        if fault is not None:
            where = f"on {HOST}: " if question.is_remote else ""
            faults.append(Fault("fail" if fault.is_fatal else "warning", fault.found, where + fault.fix))
    _, log = run_tool("dmesg")
    if xids := re.findall(r"Xid \(PCI:[\w:.]+\): \d+", log):
        fix = question.on_host("dmesg") + " | grep Xid; 48, 79, 94, 95: leave it out"
        faults.append(Fault("warning", f"the kernel's log has faults of cards, last {xids[-1]}", fix))
    if version is None:
        fine = "AMD" if is_reachable(AMD, root) else "NVIDIA" if code == 0 else "no card, no driver"
    else:
        fine = f"NVIDIA {version}"
    return CheckResult(f"{fine}, up to CUDA {newest[1]}" if newest else fine, faults)


def _judge(value: float, limits: tuple[float, float]) -> Status:
    return "fail" if value < limits[0] else "warning" if value < limits[1] else "ok"


def check_memory(question: MachineQuestion) -> CheckResult:
    """Check that each rank of this machine has enough memory."""
    free = available_memory()
    ranks = len(question.devices) if question.devices is not None else count_gpus(os.environ) or 1
    faults = []
    if (status := _judge(free / ranks, MEMORY_A_RANK)) != "ok":
        found = f"{format_bytes(free)} free for {ranks} rank{'s' * (ranks > 1)}"
        fix = question.on_host("ps -eo rss,user,comm --sort=-rss") + " | head; or raise the job's limit"
        faults.append(Fault(status, found, fix))
    return CheckResult(f"at least {format_bytes(MEMORY_A_RANK[1])} free for each rank", faults)


def find_existing_folder(folder: str) -> Path:
    """Return the folder, or the one above it that is there: where it would be made."""
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
            fix = question.on_host(f"df -h {path}") + "; make room, or name another folder"
            if path == "/dev/shm":
                fix = question.on_host("'mount -o remount,size=16G /dev/shm'") + " (docker: --shm-size=16g)"
            if (status := _judge(free, SMALL_DISK.get(path, DISK))) != "ok":
                faults.append(Fault(status, f"{path}: {format_bytes(free)} free", fix))
            elif state.f_files and state.f_favail < 1000:
                faults.append(Fault("fail", f"{path}: room for {state.f_favail} more files", fix))
    return CheckResult(f"enough free in {', '.join(paths)}", faults)


def format_marker(question: MachineQuestion, name: str) -> str:
    """Return the name of the file that a host leaves in the folder of runs, for the others to see."""
    return f".doctor-{question.token}-{name}"


def check_folders(question: MachineQuestion) -> CheckResult:
    """Check that the run's folders can be written. The marker stays in the first one."""
    faults = []
    for number, path in enumerate(question.folders):
        name = format_marker(question, question.name) + (f".{number}" if number else "")
        try:
            file = find_existing_folder(path) / name
            file.write_text("made by deepspeed-pipeline, doctor; may be deleted\n")
            if number:
                file.unlink()
        except OSError as error:
            fix = question.on_host(f"ls -ld {path}") + "; give this user the right to write, or free the disk"
            faults.append(Fault("fail", f"{path} cannot be written: {error.strerror or error}", fix))
    return CheckResult("can be written", faults)


def check_native_ops(question: MachineQuestion) -> CheckResult:
    """Check what compiles the native ops that the run needs; of no known run, what compiles CPU Adam."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"
    roots = [Path(given)] if given else sorted(cache.glob("*"))
    built = {library.stem for root in roots for library in root.glob("*/*.so")}
    cuda = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    includes = [Path(prefix) / "include/libaio.h" for prefix in ("/usr", "/usr/local", sys.prefix)]
    has_nvcc = shutil.which("nvcc", path=str(cuda / "bin")) or shutil.which("nvcc")
    has_ninja = shutil.which("ninja") or Path(sys.executable).with_name("ninja").exists()
    pip = f"{sys.executable} -m pip install ninja"
    requirements = [
        ("C++ compiler", shutil.which(os.environ.get("CXX", "c++")), OPS, "apt-get install g++"),
        ("ninja", has_ninja, OPS, pip),
        ("libaio", any(map(Path.exists, includes)), [ASYNC_IO.label], "apt-get install libaio-dev"),
        ("nvcc", has_nvcc, [QUANTIZER.label], "printenv CUDA_HOME; it needs CUDA of torch's version"),
    ]
    faults = []
    for label in [CPU_ADAM.label] if question.ops is None else question.ops:
        if set(OPS[label].folders) <= built:
            continue
        # torch's AdamW takes the place of CPU Adam; nothing that of the others.
        status: Status = "warning" if label == CPU_ADAM.label else "fail"
        missing = [(what, fix) for what, has_it, users, fix in requirements if label in users and not has_it]
        faults += [
            Fault(status, f"no {what} for {label}", question.on_host(fix)) for what, fix in missing[:1]
        ]
    return CheckResult("the run needs none" if question.ops == [] else "built, or built when needed", faults)


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
"""Every check of one machine by its name in the table."""
