"""What a rank notes of its saves and of the steps around them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from processes import Gate, wait_for_device


@dataclass(frozen=True)
class Save:
    """One save in the middle of training, as one rank saw it. Seconds."""

    step: int
    """Index of the step that it followed."""
    stall: float
    """How long the loop stood still for the call."""
    total: float
    """Until the checkpoint counts: published, or the call has returned."""
    sync: float
    """To force it to the disk after that; 0: it is there already."""
    num_bytes: int
    """Of the whole checkpoint; 0 on other ranks than the first."""


@dataclass(frozen=True)
class Durable:
    """One save with no training beside it, and the disk's own speed. Seconds."""

    save: float
    """From the first byte to the rename."""
    checksums: float
    """How long writing stood still for the checksums in it."""
    disk: float
    """To write as many bytes to a plain file, and fsync: before or after, the shorter."""


@dataclass
class Diary:
    """What one rank notes; given to the parent at the end."""

    steps: list[float] = field(default_factory=list)
    """Seconds of each step, saves left out."""
    saves: list[Save] = field(default_factory=list)
    durable: list[Durable] = field(default_factory=list)


class Watch:
    """The gate, with the time of every step, and a call where a burst ends."""

    def __init__(self, gate: Gate, diary: Diary, at_rest: Callable[[], None] = lambda: None):
        self._gate = gate
        self._diary = diary
        self._at_rest = at_rest
        self._began: float | None = None
        self._paused = 0.0

    def __call__(self) -> None:
        wait_for_device()
        if self._began is not None:
            self._diary.steps.append(time.perf_counter() - self._began - self._paused)
        if self._gate.ends_burst:
            self._at_rest()
        self._gate()
        self._began, self._paused = time.perf_counter(), 0.0

    def time(self, call: Callable[[], object]) -> float:
        """Seconds that a call takes, the ranks having met and the device idle; no part of the step."""
        wait_for_device()
        began = time.perf_counter()
        meet()
        start = time.perf_counter()
        call()
        wait_for_device()
        end = time.perf_counter()
        self._paused += end - began
        return end - start


def meet() -> None:
    """Waits for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def synchronise(folder: Path) -> None:
    """Forces all files of a folder, and their names, to the disk."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def note_save(watch: Watch, diary: Diary, folder: Path, call: Callable[[], object]) -> None:
    """A peer's save into `folder`: the call, the sync after it, and away with the one before."""
    is_first = int(os.environ.get("RANK", "0")) == 0
    stall = watch.time(call)
    sync = watch.time(lambda: (synchronise(folder) if is_first else None, meet()))
    num_bytes = tree_bytes(folder) if is_first else 0
    diary.saves.append(Save(len(diary.steps), stall, stall, sync, num_bytes))
    older = [path for path in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*") if path != folder]
    watch.time(lambda: [shutil.rmtree(path) for path in older if is_first])
