"""DeepSpeed's native ops, compiled before the model is made, and the folder that ZeRO-3 swaps to.

Answers for whose build is waited for, for locks that a killed build left behind, and for what happens where
an op cannot be compiled. How they are compiled is DeepSpeed's and torch's own affair.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
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
from pipeline.files import format_bytes

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


_SECTIONS = ("offload_optimizer", "offload_param")
_NAME = "pipeline-swap-"
_BLOCK = 8 * 2**20  # bytes
_PROBE_BLOCKS = 8
_PROBE_SECONDS = 0.7
_SLOW = 1e9  # bytes a second
# fp32 weights, two Adam states and, between backward and step, the gradient.
_OPTIMIZER_BYTES = 16


class SwapFolder:
    """This rank's folder below each `nvme_path`; none where nothing is swapped. `close` removes them.

    They also go when the process ends in any other way: a small shell waits for the end of a pipe that only
    this process holds, and then removes them. What a crash of the machine leaves is removed by the next run.
    """

    def __init__(self, config: dict[str, Any], job: Job):
        """Makes the folders, and measures the disk on one rank of each machine.

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
        self._speeds: dict[Path, tuple[float, float]] = {}
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
                if self._job.ranks.local_rank == 0:
                    self._speeds[path] = _measure(self._folders[path] / "probe")
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
        """Says how fast the disk is, what is free and what the run needs. Before DeepSpeed's engine is made.

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
            if path in self._speeds:
                write, read = self._speeds[path]
                log.info(
                    "nvme_path %s: %s/s write, %s/s read; %s free, %s needed",
                    path,
                    *map(format_bytes, (write, read, free, needed)),
                )
                if min(write, read) < _SLOW:
                    log.warning(
                        "nvme_path %s is slow: each step reads and writes about %s; device cpu, or a "
                        "faster disk, would help",
                        path,
                        format_bytes(needed),
                    )

    def close(self) -> None:
        """Removes the folders. A second call does nothing."""
        self._closing.close()


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_dead(path: Path) -> None:
    """Removes the folders of processes that are gone: the system took their locks back."""
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


def _measure(file: Path) -> tuple[float, float]:
    """Bytes a second, written and read past the page cache; at most two seconds."""
    block = secrets.token_bytes(_BLOCK)
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    try:

        def write_block(_: int) -> None:
            os.write(descriptor, block)
            os.fsync(descriptor)

        written, write = _timed(write_block, _PROBE_BLOCKS)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        _, read = _timed(lambda i: os.pread(descriptor, _BLOCK, i * _BLOCK), written)
    finally:
        os.close(descriptor)
        file.unlink()
    return write, read


def _timed(step: Any, blocks: int) -> tuple[int, float]:
    """How many blocks were done in the time there is, and at how many bytes a second."""
    started = time.perf_counter()
    done = 0
    while done < blocks and (done == 0 or time.perf_counter() - started < _PROBE_SECONDS):
        step(done)
        done += 1
    return done, done * _BLOCK / (time.perf_counter() - started)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
