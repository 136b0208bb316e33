"""What a machine says of itself: project, versions, devices, memory, disks, folders, native ops.

Runs on the machine itself. Imports no torch: its versions are read from its files. What the machine knows of
the network stands in network_facts.py.
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
from importlib import metadata, util
from pathlib import Path
from typing import TypedDict

from pipeline.distributed.machine import AMD, NVIDIA, ROOT, count_cards, driver_version, is_reachable, is_wsl
from pipeline.distributed.op_builds import find_holder

PROJECT = Path(__file__).parents[3]
SOURCES = {"pipeline": {".py"}, "launch": {".py", ".sh", ".yaml"}, "ds_configs": {".json"}}
FIELDS = "index,persistence_mode,ecc.errors.uncorrected.volatile.total,retired_pages.pending"


class Health(TypedDict):
    """Of one GPU, as nvidia-smi tells it; `[N/A]` where the card has no such thing."""

    index: str
    persistence: str
    uncorrected: str
    """Errors of its memory since the driver was loaded."""
    pending: str
    """Whether pages wait for a reset to be retired."""


class Driver(TypedDict):
    """What stands between torch and the cards."""

    nvidia: str | None
    """Version of the kernel module, or of Windows' driver under WSL2; None: there is none."""
    cuda: str | None
    """The newest CUDA that it knows."""
    problem: str | None
    """Why nvidia-smi ends with an error, where there is a driver."""
    given: bool
    """This machine or container has a device of NVIDIA's."""
    cards: int
    """NVIDIA's on the PCI bus."""
    amd_cards: int
    amd_problem: str | None
    """Why /dev/kfd cannot be opened; None: it can, or is not there."""
    wsl: bool
    health: list[Health]
    xids: list[str]
    """The last faults of cards in the kernel's log, where this user may read it."""


def read_driver(root: Path = ROOT) -> Driver:
    """Of this machine."""
    code, said = _run(["nvidia-smi"])
    newest = re.search(r"CUDA Version\s*:\s*([\d.]+)", said)
    own = re.search(r"Driver Version\s*:\s*([\d.]+)", said)
    nvidia = driver_version(root) or (own[1] if own else None)
    lines = said.strip().splitlines()
    problem = (lines[-1].strip() if lines else f"code {code}") if code and nvidia is not None else None
    health = []
    if code == 0:
        _, answer = _run(["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"])
        rows = [row for row in csv.reader(answer.splitlines(), skipinitialspace=True) if len(row) == 4]
        health = [Health(index=a, persistence=b, uncorrected=c, pending=d) for a, b, c, d in rows]
    _, log = _run(["dmesg"])
    kfd, amd_problem = root / "dev/kfd", None
    if kfd.exists() and not os.access(kfd, os.R_OK | os.W_OK):
        amd_problem = "Permission denied"
    return Driver(
        nvidia=nvidia,
        cuda=newest[1] if newest else None,
        problem=problem,
        given=is_reachable(NVIDIA, root),
        cards=count_cards(NVIDIA, root),
        amd_cards=count_cards(AMD, root),
        amd_problem=amd_problem,
        wsl=is_wsl(root),
        health=health,
        xids=re.findall(r"Xid \(PCI:[\w:.]+\): \d+", log)[-3:],
    )


def _run(command: list[str]) -> tuple[int | None, str]:
    """(exit code, what it said); None: there is no such program, or it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=6, check=False)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return done.returncode, done.stdout + done.stderr


class Project(TypedDict):
    """The source that would run."""

    commit: str | None
    """None: not a repository, or no git."""
    digest: str
    """Of the files themselves, committed or not."""


class Gpu(TypedDict):
    """A GPU as the driver knows it. Bytes."""

    index: int
    name: str
    total: int
    used: int


class Devices(TypedDict):
    """What a slot can be."""

    cores: int
    gpus: list[Gpu]


class Disk(TypedDict):
    """The file system a folder lies on, or will. Bytes."""

    path: str
    free: int
    files_left: int | None
    """None: without a limit."""


class Folder(TypedDict):
    """A folder that the run writes to."""

    path: str
    problem: str | None


class Lock(TypedDict):
    """The lock of a native op's build."""

    path: str
    is_held: bool


class Ops(TypedDict):
    """What compiles DeepSpeed's native ops, and what is compiled."""

    compiler: str | None
    ninja: str | None
    libaio: bool
    nvcc: str | None
    built: list[str]
    locks: list[Lock]


def read_project() -> Project:
    """The commit, and a digest of what the commit may not hold."""
    digest = hashlib.sha256()
    for folder, endings in SOURCES.items():
        for path in sorted((PROJECT / folder).rglob("*")):
            if path.suffix in endings and path.is_file():
                digest.update(f"{path.relative_to(PROJECT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(PROJECT), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        commit = answer.stdout.strip()
    return Project(commit=commit, digest=digest.hexdigest())


def read_versions() -> dict[str, str | None]:
    """By name; None: not installed, or a build without it."""
    found: dict[str, str | None] = dict.fromkeys(("python", "torch", "CUDA", "ROCm"))
    found["python"] = platform.python_version()
    spec = util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        # torch/version.py is assignments only; importing torch takes seconds.
        with contextlib.suppress(OSError):
            stated = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
            found |= {
                "torch": stated.get("__version__"),
                "CUDA": stated.get("cuda"),
                "ROCm": stated.get("hip"),
            }
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


def read_devices() -> Devices:
    """GPUs that CUDA_VISIBLE_DEVICES leaves, and cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Devices(cores=cores, gpus=_visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def _gpus() -> list[tuple[Gpu, str]]:
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.used,uuid",
        "--format=csv,noheader,nounits",
    ]
    found = []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        for index, name, total, used, uuid in csv.reader(answer.splitlines(), skipinitialspace=True):
            gpu = Gpu(index=int(index), name=name, total=int(total) << 20, used=int(used) << 20)
            found.append((gpu, uuid))
    return found


def _visible(gpus: list[tuple[Gpu, str]], chosen: str | None) -> list[Gpu]:
    if chosen is None:
        return [gpu for gpu, _ in gpus]
    found = []
    for word in map(str.strip, chosen.split(",")):
        match = [gpu for gpu, uuid in gpus if word and (str(gpu["index"]) == word or uuid.startswith(word))]
        if not match:  # CUDA stops at the first that is none
            break
        found += match[:1]
    return found


def existing(path: Path) -> Path:
    """The folder, or the one above it that is there: where it would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def read_disks(folders: list[str]) -> list[Disk]:
    """The file systems of the folders, of /tmp and of /dev/shm."""
    found = []
    for path in [*folders, "/tmp", "/dev/shm"]:
        with contextlib.suppress(OSError):
            state = os.statvfs(existing(Path(path).expanduser().absolute()))
            files_left = state.f_favail if state.f_files else None
            found.append(Disk(path=path, free=state.f_bavail * state.f_frsize, files_left=files_left))
    return found


def read_folders(folders: list[str], marker: str) -> list[Folder]:
    """Whether each can be written; the marker stays in the first, for other machines to look for."""
    found = []
    for number, path in enumerate(folders):
        problem = None
        try:
            # Several may be missing in the same folder.
            name = marker if not number else f"{marker}.{number}"
            file = existing(Path(path).expanduser().absolute()) / name
            with file.open("x") as stream:
                stream.write("made by deepspeed-pipeline, doctor; may be deleted\n")
            if number:
                file.unlink()
        except OSError as error:
            problem = error.strerror or str(error)
        found.append(Folder(path=path, problem=problem))
    return found


def read_ops() -> Ops:
    """The compiler, and torch's extensions directory."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"
    roots = [Path(given)] if given else sorted(cache.glob("*"))
    beside_python = Path(sys.executable).parent / "ninja"
    cuda = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    prefixes = [Path("/usr"), Path("/usr/local"), Path(sys.prefix)]
    return Ops(
        compiler=shutil.which(os.environ.get("CXX", "c++")),
        ninja=shutil.which("ninja") or (str(beside_python) if beside_python.exists() else None),
        nvcc=shutil.which("nvcc", path=str(cuda / "bin")) or shutil.which("nvcc"),
        libaio=any((prefix / "include/libaio.h").exists() for prefix in prefixes),
        built=sorted({library.stem for root in roots for library in root.glob("*/*.so")}),
        locks=[
            Lock(path=str(lock), is_held=holder.dead_in > 0)
            for root in roots
            for lock in sorted(root.glob("*/lock"))
            if (holder := find_holder(lock)) is not None
        ],
    )
