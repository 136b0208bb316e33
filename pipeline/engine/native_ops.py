"""DeepSpeed's native ops, compiled before the model is made: once per machine, with a line that says so.

Answers for which ops a configuration needs, for locks that a killed build left behind, and for what happens
where an op cannot be compiled. How they are compiled is DeepSpeed's and torch's own affair.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.ops.op_builder
import psutil
import torch
from filelock import FileLock
from torch.utils.cpp_extension import _get_build_directory

from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError

log = logging.getLogger(__name__)

_TELL_AFTER = 3.0  # seconds; loading an op that is already built takes less than one
# Seconds without a change after which a torch lock nobody works under is stale. Its owner holds it for a
# moment before ninja starts and for a moment after it ends; while ninja runs, it is seen.
_QUIET = 10.0


@dataclass(frozen=True)
class NativeOp:
    """One extension that DeepSpeed compiles at its first use."""

    label: str
    builder: str
    """The class in deepspeed.ops.op_builder."""
    folders: tuple[str, ...]
    """Below torch's extensions directory, in the order they are built."""
    duration: str


CPU_ADAM = NativeOp("DeepSpeed's CPU Adam", "CPUAdamBuilder", ("cpu_adam",), "one or two minutes")
ASYNC_IO = NativeOp(
    "DeepSpeed's async_io", "AsyncIOBuilder", ("pin_memory", "async_io"), "three to five minutes"
)


def needed_ops(config: dict[str, Any]) -> list[NativeOp]:
    """The ops a resolved configuration uses, in the order in which they are needed."""
    zero = config.get("zero_optimization", {})
    optimizer = zero.get("offload_optimizer", {}).get("device", "none")
    parameters = zero.get("offload_param", {}).get("device", "none")
    ops = []
    if optimizer in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        ops.append(CPU_ADAM)
    if "nvme" in (optimizer, parameters):
        ops.append(ASYNC_IO)
    return ops


def prepare_native_ops(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Builds and loads what the configuration needs. Collective.

    Returns:
        The configuration to hand on: where some rank has no CPU Adam, one that asks for torch's.

    Raises:
        ConfigError: NVMe is asked for and async_io cannot be built.
    """
    for op in needed_ops(config):
        failure = _build(op)
        anywhere = job.all_reduce_sum(torch.tensor(float(failure is not None), device=job.device))
        if not anywhere:
            continue
        reason = failure or "on another rank"
        if op is ASYNC_IO:
            raise ConfigError(
                f"zero_optimization: device nvme: {op.label} cannot be built ({reason}); it needs a C++ "
                "compiler and libaio (Debian and Ubuntu: apt-get install g++ libaio-dev), or use device cpu"
            )
        log.warning(
            "%s cannot be built here (%s); torch's fused AdamW does its work, slower", op.label, reason
        )
        config = config | {"zero_force_ds_cpu_optimizer": False}
    return config


def _build(op: NativeOp) -> str | None:
    """Loads the op, compiled first where it is not yet; what went wrong, or None.

    Every rank takes the machine's lock in its turn: the first one builds, the others find it built. They
    wait for a lock, not in a collective, which would time out.
    """
    started = time.monotonic()
    line = f"building {op.label}: {op.duration}, once per machine"
    told = threading.Timer(_TELL_AFTER, log.info, (line,))
    told.daemon = True
    told.start()
    try:
        folders = [Path(_get_build_directory(name, verbose=False)) for name in op.folders]
        with FileLock(folders[-1].with_suffix(".pipeline-lock")):
            for folder in folders:
                _remove_stale_lock(op, folder)
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                builder = getattr(deepspeed.ops.op_builder, op.builder)()
                if not builder.is_compatible(verbose=False):  # else found only after pin_memory is built
                    return "something it links with is missing"
                builder.load(verbose=False)
    except Exception as error:  # DeepSpeed, torch, ninja and the linker each raise their own
        cause = error.__cause__ or error
        return " ".join(str(cause).split())[:120]
    finally:
        told.cancel()
    if (seconds := time.monotonic() - started) > _TELL_AFTER:
        log.info("built in %.0f s", seconds)
    return None


def _remove_stale_lock(op: NativeOp, folder: Path) -> None:
    """Removes the lock of a build that was killed: torch would wait for it for ever, without a word.

    The caller holds this project's own lock, so whoever holds torch's is another program, or dead. Another
    program's build is waited for. One on another machine that shares the directory is not seen.
    """
    lock = folder / "lock"
    while lock.exists():
        with contextlib.suppress(FileNotFoundError):  # released, or a temporary file gone, meanwhile
            newest = max(path.stat().st_mtime for path in (lock, folder, *folder.iterdir()))
            if time.time() - newest > _QUIET and not _someone_works_in(folder):
                lock.unlink()
                log.warning("an earlier build of %s was killed and left %s; removed it", op.label, lock)
        if lock.exists():
            time.sleep(1.0)


def _someone_works_in(folder: Path) -> bool:
    """ninja and the compilers it starts have the build folder as their working directory."""
    return any(process.info["cwd"] == str(folder) for process in psutil.process_iter(["cwd"]))
