"""DeepSpeed's native ops: which ones a split needs, and who holds the lock of a build. Imports no torch.

Shared by the engine, which builds, and the doctor, which looks at machines.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

QUIET = 10.0
"""Seconds without a change after which a lock is dead where no process works in its folder. Its owner holds
it for a moment before ninja starts and for a moment after it ends; while ninja runs, it is seen."""
OUT_OF_SIGHT = 600.0
"""The same where the owner may be on another machine, in another container or of another user."""
ALIVE = float("inf")
# Shared with no other machine. An unknown file system may be.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"}
# Those of a container that no other has.
_PRIVATE = {"overlay", "tmpfs", "ramfs"}
_FIRST_NAMESPACE = "pid:[4026531836]"  # fixed in Linux: processes of all containers are seen from it


@dataclass(frozen=True)
class NativeOp:
    """One extension that DeepSpeed compiles at its first use."""

    label: str
    builder: str
    """The class in deepspeed.ops.op_builder."""
    folders: tuple[str, ...]
    """Below torch's extensions directory, in the order they are built."""
    duration: str
    needs_nvcc: bool = False


CPU_ADAM = NativeOp("DeepSpeed's CPU Adam", "CPUAdamBuilder", ("cpu_adam",), "one or two minutes")
ASYNC_IO = NativeOp(
    "DeepSpeed's async_io", "AsyncIOBuilder", ("pin_memory", "async_io"), "three to five minutes"
)
QUANTIZER = NativeOp(
    "DeepSpeed's quantiser (ZeRO++)",
    "QuantizerBuilder",
    ("quantizer",),
    "one or two minutes",
    needs_nvcc=True,
)


def needed_ops(config: Mapping[str, Any]) -> list[NativeOp]:
    """The ops that a DeepSpeed JSON uses, in the order in which they are needed."""
    zero = config.get("zero_optimization", {})
    optimizer = zero.get("offload_optimizer", {}).get("device", "none")
    parameters = zero.get("offload_param", {}).get("device", "none")
    ops = []
    if optimizer in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        ops.append(CPU_ADAM)
    if "nvme" in (optimizer, parameters):
        ops.append(ASYNC_IO)
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        ops.append(QUANTIZER)
    return ops


def signature() -> str:
    """What a run of ours writes into the lock it takes; torch's own is empty."""
    own = psutil.Process()
    return f"{own.pid} {own.create_time()} {_place()}"


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as far as can be seen from here."""

    name: str | None
    """"process 12 (ninja)"; None: nobody that works there is seen."""
    since: float
    """Seconds since the epoch: of the lock."""
    changed: float
    """The same of the last change in its folder."""
    dead_in: float
    """Seconds without a change until it counts as dead; 0: it is; ALIVE: its owner is seen."""


def find_holder(lock: Path) -> Holder | None:
    """The holder of a build's lock; None: it is released."""
    with contextlib.suppress(FileNotFoundError):  # released, or a temporary file gone, meanwhile
        state = lock.stat()
        newest = max(path.stat().st_mtime for path in (lock, lock.parent, *lock.parent.iterdir()))
        # ninja outlives the process that started it.
        if (worker := _worker(lock.parent)) is not None:
            return Holder(worker, state.st_mtime, newest, ALIVE)
        still = time.time() - newest
        words = lock.read_text(errors="replace").split()
        if len(words) != 3:
            patience = QUIET if _sees_owner(lock, state.st_uid) else OUT_OF_SIGHT
            return Holder(None, state.st_mtime, newest, max(0.0, patience - still))
        pid, started, place = words
        if place != _place():
            name = f"process {pid} on {place.partition('/')[0]}"
            return Holder(name, state.st_mtime, newest, max(0.0, OUT_OF_SIGHT - still))
        dead_in = ALIVE if _runs(pid, started) else 0.0
        return Holder(f"process {pid}", state.st_mtime, newest, dead_in)
    return None


def _place() -> str:
    """Where this process's number means something: the machine, and the container on it."""
    return f"{platform.node()}/{_namespace()}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return _FIRST_NAMESPACE


def _runs(pid: str, started: str) -> bool:
    with contextlib.suppress(ValueError, psutil.Error):
        return abs(psutil.Process(int(pid)).create_time() - float(started)) < 2.0
    return False


def _worker(folder: Path) -> str | None:
    """ninja and the compilers it starts have the build folder as their working directory."""
    place = str(folder.resolve())
    for process in psutil.process_iter(["cwd", "name"]):
        if process.info["cwd"] == place:
            return f"process {process.pid} ({process.info['name']})"
    return None


def _sees_owner(lock: Path, uid: int) -> bool:
    """Whether a living owner's compiler would be seen from here."""
    path, kind = lock.resolve(), ""
    mounts = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    for parent in path.parents:
        if parent in mounts:
            kind = mounts[parent]
            break
    sees_all = _namespace() == _FIRST_NAMESPACE or kind in _PRIVATE
    return kind in _LOCAL and sees_all and os.geteuid() in (0, uid)
