"""DeepSpeed's native ops, compiled before the model is made, and the folder that ZeRO-3 swaps to.

Handles locks that a killed build left behind, and ops that cannot be compiled. DeepSpeed and torch compile.
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

_TELL_AFTER = 3.0  # seconds; loading an op that is already built takes less than one
_DEAD_AFTER = 600.0  # seconds without a change; the build may be on another machine, or of another user


def prepare_native_ops(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Build and load what the configuration needs. Collective.

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
        if has_16bit_master_weights(config):
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
    """Load the op, compiled first where it is not yet. Return what went wrong, or `None`.

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
        # The system takes this lock back from a process that ends; the file beside it stays if it is killed.
        under_way = folders[-1].with_suffix(".pipeline-state")
        with FileLock(folders[-1].with_suffix(".pipeline-lock")), ExitStack() as stack:
            was_killed = under_way.exists()
            under_way.touch()
            stack.callback(under_way.unlink)
            for folder in folders:
                _wait_for_torch(op, folder, was_killed)
            with (
                contextlib.redirect_stdout(io.StringIO()),
                warnings.catch_warnings(),
                _quoted_library_path(),
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
        return summarize_error(cause, 120)
    finally:
        told.cancel()
    if (seconds := time.monotonic() - started) > _TELL_AFTER:
        log.info("built in %.0f s", seconds)
    return None


def _cuda_fault() -> str | None:
    """Return why no CUDA source can be compiled for this torch, or `None` if one can.

    An nvcc of another major version compiles, and links with a runtime that torch has not loaded.
    """
    if torch.version.cuda is None:
        return None if torch.version.hip else "this torch is built without CUDA"
    try:
        major, minor = installed_cuda_version()
    except MissingCUDAException as error:
        return summarize_error(error, 120)
    if major != int(torch.version.cuda.split(".")[0]):
        return f"nvcc is of CUDA {major}.{minor}, torch of {torch.version.cuda}"
    return None


def _wait_for_torch(op: NativeOp, folder: Path, was_killed: bool) -> None:
    """Wait for another program's build in this folder, and remove the lock of a build that was killed.

    torch itself waits for such a lock without an end and without a word.

    Args:
        was_killed: Whether the lock may be that of a killed run of this project.
    """
    lock = folder / "lock"
    tell_at = time.monotonic() + _TELL_AFTER
    while lock.exists():
        worker = _process_in(folder)
        with contextlib.suppress(FileNotFoundError):  # released, or a temporary file gone
            unchanged = time.time() - max(path.stat().st_mtime for path in (lock, folder, *folder.iterdir()))
            if worker is None and (was_killed or unchanged > _DEAD_AFTER):
                lock.unlink()
                log.warning("an earlier build of %s was killed and left %s; removed it", op.label, lock)
                return
            if time.monotonic() > tell_at:
                doing = f"{worker} builds it; if it hangs, end it and remove {lock}"
                if worker is None:
                    doing = (
                        f"{lock} is there, and no process is seen that builds it; it is removed in "
                        f"{_DEAD_AFTER - unchanged:.0f} s; if nothing builds it, remove it now"
                    )
                log.info("waiting for %s: %s", op.label, doing)
                tell_at = math.inf
        time.sleep(0.5)


def _process_in(folder: Path) -> str | None:
    """Return a process that works in a folder. ninja and its compilers do, and outlive who started them."""
    place = str(folder.resolve())
    for process in psutil.process_iter(["cwd", "name"]):
        if process.info["cwd"] == place:
            return f"process {process.pid} ({process.info['name']})"
    return None


@contextlib.contextmanager
def _quoted_library_path() -> Iterator[None]:
    """Quote the one path that torch leaves unquoted when it links."""
    before = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(before)
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = before


_SECTIONS = ("offload_optimizer", "offload_param")
_NAME = "pipeline-swap-"
# fp32 weights, two Adam states and, between backward and step, the gradient.
_OPTIMIZER_BYTES = 16


class SwapFolder:
    """This rank's folder below each `nvme_path`; none where nothing is swapped. `close` removes them.

    They also go when the process ends in any other way: a small shell waits for the end of a pipe that only
    this process holds, and then removes them. What a crash of the machine leaves is removed by the next run.
    """

    def __init__(self, config: dict[str, Any], job: Job):
        """Make the folders.

        Args:
            config: The resolved DeepSpeed configuration; it is not changed.

        Raises:
            ConfigError: no nvme_path, or one that cannot be made or written to.
        """
        self.config = copy.deepcopy(config)
        """The configuration to hand on: its paths are the folders."""
        self._job = job
        self._closing = ExitStack()
        self._folders: dict[Path, Path] = {}
        with self._closing:
            for section in _SECTIONS:
                part = self.config["zero_optimization"].get(section, {})
                if part.get("device") == "nvme":
                    self._place(part, section)
            self._closing = self._closing.pop_all()

    def _place(self, part: dict[str, Any], section: str) -> None:
        where = f"zero_optimization.{section}.nvme_path"
        if not part.get("nvme_path"):
            raise ConfigError(f"{where}: device nvme needs a folder on a fast disk; none is given")
        path = Path(part["nvme_path"]).absolute()
        if path not in self._folders:
            try:
                path.mkdir(parents=True, exist_ok=True)
                _remove_dead(path)
                self._folders[path] = self._make(path)
            except OSError as error:
                raise ConfigError(
                    f"{where}: {path}: {error.strerror}; give a folder that can be written to"
                ) from None
        part["nvme_path"] = str(self._folders[path])

    def _make(self, path: Path) -> Path:
        folder = path / f"{_NAME}{secrets.token_hex(6)}"
        lock = FileLock(_lock_of(folder))
        lock.acquire()  # before the folder exists: another run must never see it without its lock
        self._closing.callback(lock.release)
        folder.mkdir()
        script = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$0" "$1"'
        command = ["/bin/sh", "-c", script, str(folder), str(_lock_of(folder))]
        remover = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._closing.callback(remover.communicate)  # ends its pipe, and waits for it
        return folder

    def check_space(self, num_parameters: int) -> None:
        """Log the free space and what the run needs, before DeepSpeed's engine is made.

        Args:
            num_parameters: Of the whole model.

        Raises:
            ConfigError: less is free than the ranks of this machine need.
        """
        ranks, zero = self._job.ranks, self.config["zero_optimization"]
        share = num_parameters * ranks.local_world_size / ranks.world_size
        half = any(self.config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        per_parameter = {"offload_optimizer": _OPTIMIZER_BYTES, "offload_param": 2 if half else 4}
        for path, folder in self._folders.items():
            inside = [s for s in _SECTIONS if zero.get(s, {}).get("nvme_path") == str(folder)]
            needed = share * sum(per_parameter[section] for section in inside)
            # Parameters were swapped out while the model was made.
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


def _remove_dead(path: Path) -> None:
    """Remove the folders of processes that are gone: the system took their locks back."""
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
            log.info("removed %s, which a run that was killed left behind", folder)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
