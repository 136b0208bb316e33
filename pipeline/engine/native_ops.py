"""Compilation of DeepSpeed's native ops before the model is made, and the folder that ZeRO-3 swaps to.

DeepSpeed and torch compile the ops. This module handles ops that cannot be compiled, and locks that a killed
build left. torch itself would wait for such a lock without a limit or a message. When the lock is gone, torch
would assume that the op is built.
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

_LOG_AFTER_SECONDS = 3.0  # loading an op that is already built takes less than 1 s
# A build folder without a change for so long counts as abandoned. Another machine or user may build there.
_ABANDONED_AFTER_SECONDS = 600.0


def prepare_native_ops(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Build and load the native ops that the configuration needs. Collective.

    Returns:
        The configuration, or a changed copy that selects torch's AdamW if a rank cannot build CPU Adam.

    Raises:
        ConfigError: a rank cannot build an op that a feature requires: NVMe offload, quantized ZeRO++, or
            offloaded master weights in half precision.
    """
    for op in needed_ops(config):
        failure = _build_op(op)
        num_failures = job.all_reduce_sum(torch.tensor(float(failure is not None), device=job.device))
        if not num_failures:
            continue
        reason = failure or "the build failed on another rank"
        if op is ASYNC_IO:
            raise ConfigError(
                f"zero_optimization: device nvme: {op.label} cannot be built ({reason}); it needs a C++ "
                "compiler and libaio (Debian and Ubuntu: apt-get install g++ libaio-dev), or use device cpu"
            )
        if op is QUANTIZER:
            version = f" {torch.version.cuda}" if torch.version.cuda else ""
            raise ConfigError(
                f"zero_optimization: zero_quantized_weights, zero_quantized_gradients: {op.label} cannot be "
                f"built ({reason}); install CUDA{version} with nvcc and set CUDA_HOME to "
                "its folder, or use zero_hpz_partition_size alone"
            )
        if has_16bit_master_weights(config):
            raise ConfigError(
                f"{op.label} cannot be built ({reason}), and only it can step master weights in half "
                "precision in host memory; install a C++ compiler, or remove "
                "bf16_master_weights_and_grads or fp16_master_weights_and_grads"
            )
        log.warning("%s cannot be built (%s); using torch's fused AdamW, which is slower", op.label, reason)
        config = config | {"zero_force_ds_cpu_optimizer": False}
    return config


def _build_op(op: NativeOp) -> str | None:
    """Compile the op if necessary, and load it. Return the reason of a failure, or `None`.

    The ranks of a machine acquire a file lock one after the other: the first rank compiles the op, the others
    load it. They wait for the lock and not in a collective, which would time out.
    """
    started = time.monotonic()
    message = f"building {op.label}: {op.duration}, once per machine"
    message_timer = threading.Timer(_LOG_AFTER_SECONDS, log.info, (message,))
    message_timer.daemon = True
    message_timer.start()
    try:
        folders = [Path(cpp_extension._get_build_directory(name, verbose=False)) for name in op.folders]
        # The system releases a FileLock when its process ends. The marker file remains if a build is killed.
        marker = folders[-1].with_suffix(".pipeline-state")
        with FileLock(folders[-1].with_suffix(".pipeline-lock")), ExitStack() as stack:
            was_killed = marker.exists()
            marker.touch()
            stack.callback(marker.unlink)
            for folder in folders:
                _wait_for_other_build(op, folder, was_killed)
            with (
                contextlib.redirect_stdout(io.StringIO()),
                warnings.catch_warnings(),
                _quote_library_path(),
            ):
                warnings.simplefilter("ignore")
                builder = getattr(deepspeed.ops.op_builder, op.builder)()
                # Without this check, DeepSpeed notices the missing library only after compiling.
                if not builder.is_compatible(verbose=False):
                    return "a library that it links with is missing"
                if op.needs_nvcc and not installed_ops.get(builder.name):
                    reason = _find_cuda_fault()
                    if reason is not None:
                        return reason
                builder.load(verbose=False)
    except Exception as error:  # DeepSpeed, torch, ninja and the linker raise various types
        cause = error.__cause__ or error
        return summarize_error(cause, 120)
    finally:
        message_timer.cancel()
    seconds = time.monotonic() - started
    if seconds > _LOG_AFTER_SECONDS:
        log.info("built %s in %.0f s", op.label, seconds)
    return None


def _find_cuda_fault() -> str | None:
    """Return why CUDA sources cannot be compiled for this torch, or `None` if they can.

    An nvcc of another major version compiles, but its output needs a CUDA runtime that torch has not loaded.
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


def _wait_for_other_build(op: NativeOp, folder: Path, was_killed: bool) -> None:
    """Wait for another program's build in this folder, and remove the lock of a killed build.

    torch itself would wait for such a lock forever, without a message. A build counts as killed if no process
    on this machine works in its folder, and either `was_killed` is true or nothing has changed there for
    _ABANDONED_AFTER_SECONDS.

    Args:
        op: Op to build, for messages.
        folder: torch's build folder of the op.
        was_killed: Whether a killed run of this trainer may have left the lock.
    """
    lock = folder / "lock"
    log_at = time.monotonic() + _LOG_AFTER_SECONDS
    while lock.exists():
        worker = _find_process_in(folder)
        # FileNotFoundError: the lock was released, or a temporary file was removed, after it was listed.
        with contextlib.suppress(FileNotFoundError):
            last_change = max(path.stat().st_mtime for path in (lock, folder, *folder.iterdir()))
            seconds_unchanged = time.time() - last_change
            is_abandoned = was_killed or seconds_unchanged > _ABANDONED_AFTER_SECONDS
            if worker is None and is_abandoned:
                lock.unlink()
                log.warning("an earlier build of %s was killed and left %s; removed it", op.label, lock)
                return
            if time.monotonic() > log_at:
                detail = f"{worker} builds it; if that process hangs, end it and remove {lock}"
                if worker is None:
                    seconds_left = _ABANDONED_AFTER_SECONDS - seconds_unchanged
                    detail = (
                        f"{lock} exists, but no process on this machine builds the op; the file will be "
                        f"removed in {seconds_left:.0f} s; if no other machine builds the op, remove it now"
                    )
                log.info("waiting for %s: %s", op.label, detail)
                log_at = math.inf  # once
        time.sleep(0.5)


def _find_process_in(folder: Path) -> str | None:
    """Return a description of a process that works in a folder, or `None`.

    ninja and its compilers work in the build folder, and may outlive the process that started them.
    """
    path = str(folder.resolve())
    for process in psutil.process_iter(["cwd", "name"]):
        if process.info["cwd"] == path:
            return f"process {process.pid} ({process.info['name']})"
    return None


@contextlib.contextmanager
def _quote_library_path() -> Iterator[None]:
    """Quote torch's library path inside the context, since torch puts it into a shell command as it is."""
    path = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(path)
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = path


_OFFLOAD_SECTIONS = ("offload_optimizer", "offload_param")
_FOLDER_PREFIX = "pipeline-swap-"
_OPTIMIZER_BYTES_PER_PARAMETER = 16  # fp32: weight, two Adam states, and the gradient until the step


class SwapFolder:
    """Makes a folder for this rank below each `nvme_path`. `close` removes the folders.

    They are also removed if the process is killed. For that a shell process waits for the end of a pipe that
    only this process has open. The next run removes folders that a crash of the machine left.
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
        """Copy of the configuration for DeepSpeed, whose `nvme_path`s are this rank's folders."""
        self._job = job
        self._cleanup = ExitStack()
        self._folders: dict[Path, Path] = {}  # this rank's folder, by `nvme_path`
        with self._cleanup:
            for section in _OFFLOAD_SECTIONS:
                options = self.config["zero_optimization"].get(section, {})
                if options.get("device") == "nvme":
                    self._set_folder(options, section)
            self._cleanup = self._cleanup.pop_all()

    def _set_folder(self, options: dict[str, Any], section: str) -> None:
        """Make this rank's folder, and set it as the section's `nvme_path`.

        Args:
            options: Section offload_optimizer or offload_param. It is changed.
            section: Name of the section.
        """
        key = f"zero_optimization.{section}.nvme_path"
        if not options.get("nvme_path"):
            raise ConfigError(f"{key} is missing; device nvme needs a folder on a fast disk: set it")
        path = Path(options["nvme_path"]).absolute()
        if path not in self._folders:
            try:
                path.mkdir(parents=True, exist_ok=True)
                _remove_abandoned_folders(path)
                self._folders[path] = self._make_folder(path)
            except OSError as error:
                raise ConfigError(
                    f"{key}: {path}: {error.strerror}; set a folder that can be written to"
                ) from None
        options["nvme_path"] = str(self._folders[path])

    def _make_folder(self, path: Path) -> Path:
        """Make a folder with a random name in `path`, its lock, and the process that removes both."""
        folder = path / f"{_FOLDER_PREFIX}{secrets.token_hex(6)}"
        lock = FileLock(_get_lock_path(folder))
        lock.acquire()  # before the folder exists, so that no other run sees it without its lock
        self._cleanup.callback(lock.release)
        folder.mkdir()
        script = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$0" "$1"'
        command = ["/bin/sh", "-c", script, str(folder), str(_get_lock_path(folder))]
        remover = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._cleanup.callback(remover.communicate)  # closes the pipe and waits for the shell
        return folder

    def check_space(self, num_parameters: int) -> None:
        """Compare the free disk space with the need, and log both. Call it before making DeepSpeed's engine.

        Args:
            num_parameters: Number of parameters of the whole model.

        Raises:
            ConfigError: the ranks of this machine need more space than is free.
        """
        ranks = self._job.ranks
        zero = self.config["zero_optimization"]
        machine_parameters = num_parameters * ranks.local_world_size / ranks.world_size
        is_half = any(self.config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        bytes_per_parameter = {
            "offload_optimizer": _OPTIMIZER_BYTES_PER_PARAMETER,
            "offload_param": 2 if is_half else 4,
        }
        for path, folder in self._folders.items():
            sections = [s for s in _OFFLOAD_SECTIONS if zero.get(s, {}).get("nvme_path") == str(folder)]
            needed = machine_parameters * sum(bytes_per_parameter[section] for section in sections)
            # Parameters that were swapped while the model was made already occupy a part of the needed space.
            free = shutil.disk_usage(path).free + _measure_size(folder) * ranks.local_world_size
            if free < needed:
                raise ConfigError(
                    f"zero_optimization.{sections[0]}.nvme_path: {path} has {format_bytes(free)} free and "
                    f"the run needs {format_bytes(needed)}; use another disk, more machines, or device cpu"
                )
            if ranks.local_rank == 0:
                log.info("nvme_path %s: %s free, %s needed", path, format_bytes(free), format_bytes(needed))

    def close(self) -> None:
        """Remove the folders. A second call does nothing."""
        self._cleanup.close()


def _get_lock_path(folder: Path) -> Path:
    """Return the lock file beside a swap folder."""
    return folder.with_name(f"{folder.name}.lock")


def _remove_abandoned_folders(path: Path) -> None:
    """Remove swap folders in `path` whose processes have ended, so that their locks are free."""
    for folder in path.glob(f"{_FOLDER_PREFIX}*"):
        if folder.is_dir():
            lock = FileLock(_get_lock_path(folder))
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            _get_lock_path(folder).unlink(missing_ok=True)
            lock.release()
            log.info("removed %s, which a killed run left", folder)


def _measure_size(folder: Path) -> int:
    """Return the bytes of all files in a folder and its subfolders."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
