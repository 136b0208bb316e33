"""Who takes part in checkpoint.py: our loop and store here, the peers' in saver_peers.py.

In every burst of steps one checkpoint is saved half-way. Peers have their files forced to the disk after
that, on a clock of its own: nothing of theirs is still being written while the next participant steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from participants import GatedLoader
from processes import FinishedError, Gate, Task
from saver_diary import Diary, Durable, Save, Watch, meet, tree_bytes
from saver_peers import bare_deepspeed, bare_pytorch, hugging_face_trainer

from pipeline.checkpoint import shard_file
from pipeline.config.settings import Settings, load_settings
from pipeline.data import prepare_data
from pipeline.distributed.process_group import describe_device, start_job
from pipeline.distributed.ranks import read_ranks
from pipeline.files import synchronise
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

BLOCK = 1 << 24  # bytes of one write of the plain file
SETTLE = 0.3


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """Trains and saves until the gate has enough."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    overrides = [f"ds.bf16.enabled={str(task.precision == 'bf16').lower()}", "ds.fp16.enabled=false"]
    settings = load_settings(task.recipe, task.json, overrides if task.json else [])
    diary = Diary()
    with suppress(FinishedError):
        LOOPS[task.peer](task, settings, gate, diary)
    return asdict(diary)


class TimedChecksums:
    """Stands in for xxhash where files are written: adds up how long writing stands still for it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def executor(self, threads: int, name: str) -> ThreadPoolExecutor:
        return TimedExecutor(self, threads, name)

    def xxh3_64(self) -> TimedChecksum:
        return TimedChecksum(xxhash.xxh3_64(), self)

    def xxh3_128(self, data: bytes = b"") -> TimedChecksum:
        return TimedChecksum(xxhash.xxh3_128(data), self)


class TimedChecksum:
    def __init__(self, checksum: Any, all_of_them: TimedChecksums):
        self._checksum = checksum
        self._all = all_of_them
        self.digest, self.hexdigest = checksum.digest, checksum.hexdigest

    def update(self, data: Any) -> None:
        start = time.perf_counter()
        self._checksum.update(data)
        if not threading.current_thread().name.startswith("checksums"):
            self._all.seconds += time.perf_counter() - start


class TimedExecutor(ThreadPoolExecutor):
    """What is hashed beside the write costs what its writer waits for it."""

    def __init__(self, checksums: TimedChecksums, threads: int, name: str):
        super().__init__(threads, name)
        self._checksums = checksums

    def submit(self, *arguments: Any) -> Any:  # type: ignore[override]
        start = time.perf_counter()
        future = super().submit(*arguments)
        take = future.result

        def result() -> Any:
            start = time.perf_counter()
            answer = take()
            self._checksums.seconds += time.perf_counter() - start
            return answer

        future.result = result  # type: ignore[method-assign,assignment]
        self._checksums.seconds += time.perf_counter() - start
        return future


def ours(task: Task, settings: Settings, gate: Gate, diary: Diary) -> None:
    """The pipeline's own loop and store."""
    job = start_job(read_ranks(os.environ), distributed=settings.deepspeed is not None)
    resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
    data = prepare_data(settings.config.data)
    run = assemble(settings.config, resolved, job, data, task.folder)
    checksums = TimedChecksums()
    shard_file.xxhash = checksums  # type: ignore[assignment]
    shard_file.ThreadPoolExecutor = checksums.executor  # type: ignore[assignment,misc]
    store, folder = run.checkpoints, run.checkpoints.folder
    save, poll = store.save, store.poll
    begun: list[tuple[int, float]] = []

    def timed_save(*arguments: Any) -> None:
        outcomes: list[Any] = []
        stall = watch.time(lambda: outcomes.append(save(*arguments)))
        if outcomes[0].write_seconds is None:
            begun.append((len(diary.steps), stall))
        else:  # memory is short: it was not written in the background
            diary.saves.append(Save(len(diary.steps), stall, stall, 0.0, newest_bytes()))

    def noted_poll() -> list[Any]:
        outcomes = poll()
        for outcome in outcomes if begun else []:
            step, stall = begun.pop(0)
            diary.saves.append(Save(step, stall, stall + written(outcome), 0.0, newest_bytes()))
        return outcomes

    def written(outcome: Any) -> float:
        if outcome.problem is not None:
            raise RuntimeError(outcome.problem)
        return float(outcome.write_seconds)

    def newest_bytes() -> int:
        return tree_bytes(max(folder.glob("step-*[0-9]"))) if job.ranks.is_main_process else 0

    def at_rest() -> None:
        store.wait()
        noted_poll()
        own = max(folder.glob("step-*[0-9]")) / f"rank-{job.ranks.rank:05d}.safetensors"
        num_bytes = own.stat().st_size
        before, disk = checksums.seconds, settled_write(folder, job.ranks.rank, num_bytes)
        settle(folder)
        outcome = save(run.engine, {"global_step": len(diary.steps)})
        store.wait()
        seconds = written((poll() or [outcome])[0])
        hashing = checksums.seconds - before
        disk = min(disk, settled_write(folder, job.ranks.rank, num_bytes))
        diary.durable.append(Durable(seconds, hashing, disk))
        settle(folder)

    store.save, store.poll = timed_save, noted_poll  # type: ignore[assignment,method-assign]
    watch = Watch(gate, diary, at_rest)
    gated = replace(run, eval_loader=None, loader=GatedLoader(run.loader, watch))  # type: ignore[arg-type]
    with run.trackers, TrainLoop(gated) as loop:
        while loop.step() is not None:
            pass


def settle(folder: Path) -> None:
    """Has what was removed before given back to the disk: the next fsync would wait for that."""
    synchronise(folder)
    time.sleep(SETTLE)
    meet()


def settled_write(folder: Path, rank: int, num_bytes: int) -> float:
    settle(folder)
    return plain_write(folder, rank, num_bytes)


def plain_write(folder: Path, rank: int, num_bytes: int) -> float:
    """Seconds for a plain file of so many bytes, and fsync. The disk is given work early, as ours does it."""
    block = memoryview(os.urandom(BLOCK))
    path = folder / f"plain-{rank}"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        done = flushed = 0
        while done < num_bytes:
            done += file.write(block[: num_bytes - done])
            if done - flushed >= shard_file.FLUSH_EVERY and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), flushed, done - flushed, os.POSIX_FADV_DONTNEED)
                flushed = done
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    path.unlink()
    return seconds


LOOPS: dict[str, Callable[[Task, Settings, Gate, Diary], None]] = {
    "ours": ours,
    "torch.save": bare_pytorch,
    "deepspeed": bare_deepspeed,
    "trainer": hugging_face_trainer,
}
