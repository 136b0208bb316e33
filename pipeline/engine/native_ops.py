"""DeepSpeed's native ops, compiled before the model is made: once per machine, with a line that says so.

Answers for whose build is waited for, for locks that a killed build left behind, and for what happens where
an op cannot be compiled. How they are compiled is DeepSpeed's and torch's own affair.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import shlex
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.ops.op_builder
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version
from filelock import FileLock, Timeout
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from pipeline.config.deepspeed_check import has_half_masters
from pipeline.distributed.op_builds import (
    ALIVE,
    ASYNC_IO,
    OUT_OF_SIGHT,
    QUANTIZER,
    Holder,
    NativeOp,
    find_holder,
    needed_ops,
    signature,
)
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, one_line

log = logging.getLogger(__name__)

_TELL_AFTER = 3.0  # seconds; loading an op that is already built takes less than one
_TELL_AGAIN = 60.0


def prepare_native_ops(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Builds and loads what the configuration needs. Collective.

    Returns:
        The configuration to hand on: where some rank has no CPU Adam, one that asks for torch's.

    Raises:
        ConfigError: what is asked for cannot do without an op that cannot be built: NVMe, quantised ZeRO++,
            master weights in half precision in host memory.
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
        if op is QUANTIZER:
            raise ConfigError(
                f"zero_optimization: zero_quantized_weights, zero_quantized_gradients: {op.label} cannot be "
                f"built ({reason}); install CUDA {torch.version.cuda or ''} with nvcc and set CUDA_HOME to "
                "its folder, or use zero_hpz_partition_size alone"
            )
        if has_half_masters(config):
            raise ConfigError(
                f"{op.label} cannot be built ({reason}), and nothing else steps master weights in half "
                "precision in host memory; install a C++ compiler, or drop *_master_weights_and_grads"
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
        folders = [Path(cpp_extension._get_build_directory(name, verbose=False)) for name in op.folders]
        with _turn(op, folders[-1]) as waiting:
            for folder in folders:
                waiting.until_free(folder / "lock")
            with (
                contextlib.redirect_stdout(io.StringIO()),
                warnings.catch_warnings(),
                _changes_in_torch(waiting),
            ):
                warnings.simplefilter("ignore")
                builder = getattr(deepspeed.ops.op_builder, op.builder)()
                if not builder.is_compatible(verbose=False):  # else found only after pin_memory is built
                    return "something it links with is missing"
                if op.needs_nvcc and not installed_ops.get(builder.name) and (fault := _cuda_fault()):
                    return fault
                builder.load(verbose=False)
    except Exception as error:  # DeepSpeed, torch, ninja and the linker each raise their own
        cause = error.__cause__ or error
        return one_line(cause, 120)
    finally:
        told.cancel()
    if (seconds := time.monotonic() - started) > _TELL_AFTER:
        log.info("built in %.0f s", seconds)
    return None


def _cuda_fault() -> str | None:
    """Why no CUDA source can be compiled for this torch, which looks only when it installs; None: it can.

    An nvcc of another major version compiles, and links with a runtime that torch has not loaded.
    """
    if torch.version.cuda is None:
        return None if torch.version.hip else "this torch is built without CUDA"
    try:
        major, minor = installed_cuda_version()
    except MissingCUDAException as error:
        return one_line(error, 120)
    if major != int(torch.version.cuda.split(".")[0]):
        return f"nvcc is of CUDA {major}.{minor}, torch of {torch.version.cuda}"
    return None


@contextlib.contextmanager
def _turn(op: NativeOp, folder: Path) -> Iterator[_Waiting]:
    """This project's own lock on the op, which a process that ends lets go of; who has it is told.

    Beside it lies a line on what its holder does, for those that wait.
    """
    lock, state = FileLock(folder.with_suffix(".pipeline-lock")), folder.with_suffix(".pipeline-state")
    patience = _TELL_AFTER
    while not lock.is_locked:
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=patience)
            break
        doing = "another run holds its lock"
        with contextlib.suppress(FileNotFoundError):  # let go meanwhile
            doing = state.read_text()
        log.info("waiting for %s: %s; if it hangs, end that process", op.label, doing)
        patience = _TELL_AGAIN
    try:
        yield _Waiting(op, state)
        state.unlink()
    finally:
        lock.release()


class _Waiting:
    """Waits for the locks of builds that other programs started, one op's, and removes those of dead ones."""

    def __init__(self, op: NativeOp, state: Path):
        self._op, self._state = op, state
        started = f"{datetime.now():%H:%M:%S}"
        self._own = f"process {os.getpid()} on {platform.node()} builds it since {started}"
        state.write_text(self._own)

    def until_free(self, lock: Path) -> None:
        """Returns once nobody holds the lock.

        A lock that is left behind would be waited for by torch for ever, without a word.
        """
        tell_at = time.monotonic() + _TELL_AFTER
        seen_at, last = time.monotonic(), 0.0
        while (holder := find_holder(lock)) is not None:
            if holder.changed != last:
                seen_at, last = time.monotonic(), holder.changed
            # A file server's clock may be ahead of ours: what we have seen ourselves counts as well.
            still = time.monotonic() - seen_at
            if holder.dead_in == 0 or (holder.dead_in != ALIVE and still > OUT_OF_SIGHT):
                lock.unlink(missing_ok=True)
                log.warning("an earlier build of %s was killed and left %s; removed it", self._op.label, lock)
                continue
            if time.monotonic() > tell_at:
                words = _told(lock, holder)
                log.info("waiting for %s: %s", self._op.label, words)
                self._state.write_text(f"{self._own}, and waits itself: {words}")
                tell_at = time.monotonic() + _TELL_AGAIN
            time.sleep(0.5)
        self._state.write_text(self._own)


def _told(lock: Path, holder: Holder) -> str:
    """For whom, since when, what to do."""
    since = f"{datetime.fromtimestamp(holder.since):%H:%M:%S}"
    if holder.dead_in == ALIVE:
        return f"{holder.name} builds it since {since}; if it hangs, end it and remove {lock}"
    name = holder.name or "nobody who is seen from here"
    return (
        f"{lock} is there since {since}, made by {name}; without a change it is removed in "
        f"{holder.dead_in:.0f} s; if nobody builds there, remove it now"
    )


class _Baton(FileBaton):
    """torch's lock of a build folder, which tells whom it waits for and outlives nobody.

    torch looks once: what another program holds then, it waits for without an end, and then takes for built.
    """

    def __init__(self, waiting: _Waiting, lock: str, *rest: Any, **more: Any):
        super().__init__(lock, *rest, **more)
        self._waiting, self._lock = waiting, Path(lock)

    def try_acquire(self) -> bool:
        """Comes back with the lock."""
        while not super().try_acquire():
            self._waiting.until_free(self._lock)
        self._lock.write_text(signature())
        return True

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # someone was told that it may be removed
            super().release()


@contextlib.contextmanager
def _changes_in_torch(waiting: _Waiting) -> Iterator[None]:
    """torch has no other way in: it names its lock itself, and quotes all paths but the one it links with."""
    names = vars(cpp_extension)
    own = {
        "FileBaton": partial(_Baton, waiting),
        "TORCH_LIB_PATH": shlex.quote(cpp_extension.TORCH_LIB_PATH),
    }
    before = {name: names[name] for name in own}
    names.update(own)
    try:
        yield
    finally:
        names.update(before)
