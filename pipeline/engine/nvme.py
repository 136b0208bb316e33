"""The folder on a fast disk that ZeRO-3 swaps to: made for one run, measured, and gone with it.

DeepSpeed writes below `nvme_path` under names that every run shares, deletes what lies there, and leaves its
files behind. Here every rank of every run has a folder of its own.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError
from pipeline.files import format_bytes

log = logging.getLogger(__name__)

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
