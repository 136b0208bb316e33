"""Compilation of DeepSpeed's native ops before the model is made, and the folder that ZeRO-3 swaps to.

DeepSpeed and torch compile. This module handles ops that cannot be compiled, and locks left by a killed
build. torch checks once whether its lock file exists, waits for it without a limit or a message, and then
assumes that the op is built.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import secrets
import shlex
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed.ops.op_builder
import psutil
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version
from filelock import FileLock, Timeout
from torch.utils import cpp_extension

from pipeline.config.deepspeed_check import has_16bit_master_weights
from pipeline.distributed.op_builds import ASYNC_IO, QUANTIZER, NativeOp, needed_ops
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, summarize_error
from pipeline.files import format_bytes

log = logging.getLogger(__name__)

_LOG_AFTER = 3.0  # seconds; loading an op that is already built takes less than one
_DEAD_AFTER = 600.0  # seconds without a change; the build may be another machine's or user's


def prepare_native_ops(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Build and load the native ops that the configuration needs. Collective.

    Returns:
        The configuration to continue with. If a rank cannot build CPU Adam, it selects torch's AdamW.

    Raises:
        ConfigError: an op cannot be built that a feature requires: NVMe offload, quantised ZeRO++, or
            offloaded master weights in half precision.
    """
    for op in needed_ops(config):
        failure = _build(op)
        num_failures = job.all_reduce_sum(torch.tensor(float(failure is not None), device=job.device))
        if not num_failures:
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
        if has_16bit_master_weights(config):
            raise ConfigError(
                f"{op.label} cannot be built ({reason}), and only it can step master weights in half "
                "precision in host memory; install a C++ compiler, or remove *_master_weights_and_grads"
            )
        log.warning(
            "%s cannot be built here (%s); using torch's fused AdamW, which is slower", op.label, reason
        )
        config = config | {"zero_force_ds_cpu_optimizer": False}
    return config


def _build(op: NativeOp) -> str | None:
    """Compile the op if necessary, and load it. Return the reason of a failure, or `None`.

    The ranks of a machine take its lock in turn: the first one compiles, the others find the op built. They
    wait for a lock and not in a collective, which would time out.
    """
    started = time.monotonic()
    line = f"building {op.label}: {op.duration}, once per machine"
    message_timer = threading.Timer(_LOG_AFTER, log.info, (line,))
    message_timer.daemon = True
    message_timer.start()
    try:
        folders = [Path(cpp_extension._get_build_directory(name, verbose=False)) for name in op.folders]
        # The system releases this lock when its process ends. The marker file remains if a build is killed.
        marker = folders[-1].with_suffix(".pipeline-state")
        with FileLock(folders[-1].with_suffix(".pipeline-lock")), ExitStack() as stack:
            was_killed = marker.exists()
            marker.touch()
            stack.callback(marker.unlink)
            for folder in folders:
                _wait_for_torch(op, folder, was_killed)
            with (
                contextlib.redirect_stdout(io.StringIO()),
                warnings.catch_warnings(),
                _quoted_library_path(),
            ):
                warnings.simplefilter("ignore")
                builder = getattr(deepspeed.ops.op_builder, op.builder)()
                if not builder.is_compatible(
                    verbose=False
                ):  # otherwise DeepSpeed notices only after compiling
                    return "a library that it links with is missing"
                if op.needs_nvcc and not installed_ops.get(builder.name):
                    fault = _find_cuda_fault()
                    if fault:
                        return fault
                builder.load(verbose=False)
    except Exception as error:  # DeepSpeed, torch, ninja and the linker raise various types
        cause = error.__cause__ or error
        return summarize_error(cause, 120)
    finally:
        message_timer.cancel()
    seconds = time.monotonic() - started
    if seconds > _LOG_AFTER:
        log.info("built in %.0f s", seconds)
    return None


def _find_cuda_fault() -> str | None:
    """Return why CUDA sources cannot be compiled for this torch, or `None` if they can.

    An nvcc of another major version compiles, but links with a CUDA runtime that torch has not loaded.
    """
    if torch.version.cuda is None:
        return None if torch.version.hip else "this torch is built without CUDA"
    try:
        major, minor = installed_cuda_version()
    except MissingCUDAException as error:
        return summarize_error(error, 120)
    if major != int(torch.version.cuda.split(".")[0]):
        return f"nvcc is from CUDA {major}.{minor}, torch was built with {torch.version.cuda}"
    return None


def _wait_for_torch(op: NativeOp, folder: Path, was_killed: bool) -> None:
    """Wait for another program's build in this folder, and remove the lock of a killed build.

    torch itself would wait for such a lock forever, without a message. A build counts as killed if no process
    works in its folder and either this project's marker is there or nothing changed for 10 minutes.

    Args:
        op: Op to build, for messages.
        folder: torch's build folder of the op.
        was_killed: Whether a killed run of this project may have left the lock.
    """
    lock = folder / "lock"
    log_at = time.monotonic() + _LOG_AFTER
    while lock.exists():
        worker = _find_process_in(folder)
        with contextlib.suppress(FileNotFoundError):  # the lock was released, or a temporary file removed
            unchanged = time.time() - max(path.stat().st_mtime for path in (lock, folder, *folder.iterdir()))
            if worker is None and (was_killed or unchanged > _DEAD_AFTER):
                lock.unlink()
                log.warning("an earlier build of %s was killed and left %s; removed it", op.label, lock)
                return
            if time.monotonic() > log_at:
                detail = f"{worker} builds it; if it hangs, end it and remove {lock}"
                if worker is None:
                    detail = (
                        f"{lock} exists, but no process on this machine builds it; it will be removed in "
                        f"{_DEAD_AFTER - unchanged:.0f} s; if no other machine builds it, remove it now"
                    )
                log.info("waiting for %s: %s", op.label, detail)
                log_at = math.inf
        time.sleep(0.5)


def _find_process_in(folder: Path) -> str | None:
    """Return a description of a process that works in a folder, or `None`.

    ninja and its compilers work in the build folder, and outlive the process that started them.
    """
    path = str(folder.resolve())
    for process in psutil.process_iter(["cwd", "name"]):
        if process.info["cwd"] == path:
            return f"process {process.pid} ({process.info['name']})"
    return None


@contextlib.contextmanager
def _quoted_library_path() -> Iterator[None]:
    """Quote the library path, which torch leaves unquoted in its linker command."""
    before = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(before)
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = before


_SECTIONS = ("offload_optimizer", "offload_param")
_NAME = "pipeline-swap-"
_OPTIMIZER_BYTES = 16  # per parameter, fp32: weight, two Adam states and, until the step, the gradient


class SwapFolder:
    """Makes this rank's folder below each `nvme_path`. `close` removes the folders.

    They are also removed if the process is killed: a small shell waits for the end of a pipe that only this
    process has open, and then removes them. The next run removes folders left by a crash of the machine.
    """

    def __init__(self, config: dict[str, Any], job: Job):
        """Make the folders.

        Args:
            config: Resolved DeepSpeed JSON. It is not changed.
            job: Ranks of the run.

        Raises:
            ConfigError: an `nvme_path` is missing, or cannot be created or written to.
        """
        self.config = copy.deepcopy(config)
        """Configuration to continue with, whose `nvme_path`s are the folders."""
        self._job = job
        self._closing = ExitStack()
        self._folders: dict[Path, Path] = {}
        with self._closing:
            for section in _SECTIONS:
                part = self.config["zero_optimization"].get(section, {})
                if part.get("device") == "nvme":
                    self._set_folder(part, section)
            self._closing = self._closing.pop_all()

    def _set_folder(self, part: dict[str, Any], section: str) -> None:
        where = f"zero_optimization.{section}.nvme_path"
        if not part.get("nvme_path"):
            raise ConfigError(f"{where} is missing; device nvme needs a folder on a fast disk: set it")
        path = Path(part["nvme_path"]).absolute()
        if path not in self._folders:
            try:
                path.mkdir(parents=True, exist_ok=True)
                _remove_abandoned(path)
                self._folders[path] = self._make_folder(path)
            except OSError as error:
                raise ConfigError(
                    f"{where}: {path}: {error.strerror}; set a folder that can be written to"
                ) from None
        part["nvme_path"] = str(self._folders[path])

    def _make_folder(self, path: Path) -> Path:
        folder = path / f"{_NAME}{secrets.token_hex(6)}"
        lock = FileLock(_lock_of(folder))
        lock.acquire()  # before the folder exists, so that no other run sees it without its lock
        self._closing.callback(lock.release)
        folder.mkdir()
        script = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$0" "$1"'
        command = ["/bin/sh", "-c", script, str(folder), str(_lock_of(folder))]
        remover = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._closing.callback(remover.communicate)  # closes the pipe and waits for the shell
        return folder

    def check_space(self, num_parameters: int) -> None:
        """Check and log the free disk space, before DeepSpeed's engine is made.

        Args:
            num_parameters: Number of parameters of the whole model.

        Raises:
            ConfigError: the ranks of this machine need more space than is free.
        """
        ranks = self._job.ranks
        zero = self.config["zero_optimization"]
        share = num_parameters * ranks.local_world_size / ranks.world_size
        half = any(self.config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        per_parameter = {"offload_optimizer": _OPTIMIZER_BYTES, "offload_param": 2 if half else 4}
        for path, folder in self._folders.items():
            inside = [s for s in _SECTIONS if zero.get(s, {}).get("nvme_path") == str(folder)]
            needed = share * sum(per_parameter[section] for section in inside)
            # Parameters that were swapped while the model was made already take a part of the needed space.
            free = shutil.disk_usage(path).free + _size(folder) * ranks.local_world_size
            if free < needed:
                raise ConfigError(
                    f"zero_optimization.{inside[0]}.nvme_path: {path} has {format_bytes(free)} free and the "
                    f"run needs {format_bytes(needed)}; use another disk, more machines, or device cpu"
                )
            if ranks.local_rank == 0:
                log.info("nvme_path %s: %s free, %s needed", path, format_bytes(free), format_bytes(needed))

    def close(self) -> None:
        """Remove the folders. A second call does nothing."""
        self._closing.close()


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_abandoned(path: Path) -> None:
    """Remove the folders of ended processes, whose locks the system has released."""
    for folder in path.glob(f"{_NAME}*"):
        if folder.is_dir():
            lock = FileLock(_lock_of(folder))
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            _lock_of(folder).unlink(missing_ok=True)
            lock.release()
            log.info("removed %s, which a killed run left", folder)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
