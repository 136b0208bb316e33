"""Saves a run's checkpoints in the background of training, publishes each by one rename, and restores them.

Every byte of a checkpoint is verified before it is loaded.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.catalog import (
    LOGGED_BYTES,
    PARTIAL,
    REPLACED,
    Pruner,
    Retention,
    SavedCheckpoints,
    discard_after,
    find_newest_verified,
    folder_name,
    mark_suspect,
    remove_checkpoint,
    remove_partial,
)
from pipeline.checkpoint.manifest import (
    MANIFEST,
    ROW_BYTES,
    TABLE,
    FileRecord,
    Manifest,
    ShardTable,
    has_evaluation,
    make_table_record,
)
from pipeline.checkpoint.peers import Peers, SpaceReport, find_first_problem, find_memory_shortage, find_peers
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.shard_file import FileLayout, LayoutChangedError, as_bytes, hash_views, write_file
from pipeline.checkpoint.shards import BUFFER, EngineState, Shard
from pipeline.distributed.machine import available_memory
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import CheckpointError, summarize_error
from pipeline.files import format_bytes, publish_folder, write_durably

CHUNK_BYTES = 1 << 26  # a power of two, because torch rounds pinned memory up to one
# Bytes up to which one thread copies a tensor. torch's threads wait for each other after every copy; on a
# busy CPU this took 17 times as long as the copying.
ONE_THREAD_BYTES = 1 << 24
log = logging.getLogger(__name__)


def stream_shards(layout: FileLayout, shards: Iterator[Shard]) -> Iterator[list[memoryview]]:
    """Yield the bytes of each shard, copied to the host one at a time.

    Raises:
        LayoutChangedError: A shard differs from the one in the layout, or there are more shards.
    """
    return ([source.cpu().numpy().data] for source, _ in _match_layout(layout, shards))


class Snapshot:
    """Copy of all shards of this rank in host memory, in buffers that every save reuses.

    A separate thread allocates the memory, since pinning takes seconds for gigabytes.

    Tensors on a GPU are copied on a separate stream, while the next forward and backward run. Only an
    optimizer's step changes the saved values, so the device waits for the copy just before that step. The
    host waits only in the thread that writes the files. On a CPU, training pauses for the copy.

    Args:
        layout: Shards to copy.
        device: Device of the shards. For CUDA the buffers are pinned, so copies run at the bus's speed.
    """

    def __init__(self, layout: FileLayout, device: torch.device):
        self.layout = layout
        total = sum(shard.num_bytes for shard in layout.shards)
        sizes = [min(CHUNK_BYTES, total - start) for start in range(0, total, CHUNK_BYTES)]
        thread = ThreadPoolExecutor(1, "snapshot")
        self._chunks = thread.submit(_allocate_chunks, sizes, device.type == "cuda")
        thread.shutdown(wait=False)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def fill(self, shards: Iterator[Shard]) -> None:
        """Copy all shards, after waiting for the memory to be allocated.

        When this returns, a copy from a GPU may still be running. The caller may change buffers and values on
        the host immediately, and other values on a GPU after a call of `hold_device`.

        Raises:
            LayoutChangedError: The shards differ from those of the layout.
            MemoryError: There is not enough host memory.
        """
        self._chunks.result()
        self._copied = None
        position = 0
        for values, kind in _match_layout(self.layout, shards):
            with self._use_copy_stream(values, kind) as source:
                begin = 0
                for target in self._slice_chunks(position, len(source)):
                    piece = source[begin : begin + len(target)]
                    if piece.device.type == "cpu" and len(piece) < ONE_THREAD_BYTES:
                        np.copyto(target.numpy(), piece.numpy())
                    else:
                        target.copy_(piece, non_blocking=True)
                    begin += len(target)
            position += begin
        if self._stream is not None:
            self._copied = self._stream.record_event()

    @contextmanager
    def _use_copy_stream(self, source: Tensor, kind: str) -> Iterator[Tensor]:
        """Yield the values to copy, and run the `with` block on the copy stream if they are on a GPU.

        The copy stream waits for work on the values that is still pending.
        """
        if source.device.type != "cuda":
            yield source
            return
        if kind == BUFFER:
            source = source.clone()  # the next forward changes buffers, and it does not wait for the copy
        self._stream = self._stream or torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            yield source
        # Some values are temporary copies: their memory may be reused only after the copy.
        source.record_stream(self._stream)

    def hold_device(self) -> None:
        """Make later work of the device wait for a running copy. The host does not wait."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def views(self) -> Iterator[list[memoryview]]:
        """Yield the bytes of each shard, in order, after waiting for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        position = 0
        for expected in self.layout.shards:
            yield [part.numpy().data for part in self._slice_chunks(position, expected.num_bytes)]
            position += expected.num_bytes

    def _slice_chunks(self, position: int, length: int) -> Iterator[Tensor]:
        """Yield the slices of the chunks that have the bytes from `position` to `position + length`."""
        chunks = self._chunks.result()
        end = position + length
        while position < end:
            index, start = divmod(position, CHUNK_BYTES)
            stop = min(CHUNK_BYTES, start + end - position)
            yield chunks[index][start:stop]
            position += stop - start


def _allocate_chunks(sizes: list[int], is_pinned: bool) -> list[Tensor]:
    """Allocate chunks of these sizes in bytes.

    If the system refuses to pin more memory, the remaining chunks are not pinned, with a warning. Chunks
    pinned so far stay in use: torch would not return them to the system if they were freed.

    Raises:
        MemoryError: There is not enough host memory.
    """
    chunks: list[Tensor] = []
    while len(chunks) < len(sizes):
        try:
            chunks.append(torch.empty(sizes[len(chunks)], dtype=torch.uint8, pin_memory=is_pinned))
        except RuntimeError as error:
            if not is_pinned:
                raise MemoryError(str(error)) from None
            is_pinned = False
            log.warning(
                "copying checkpoints to host memory takes longer: %s of this memory cannot be pinned: %s",
                format_bytes(sum(sizes[len(chunks) :])),
                summarize_error(error),
            )
    return chunks


def _match_layout(layout: FileLayout, shards: Iterator[Shard]) -> Iterator[tuple[Tensor, str]]:
    """Yield the bytes of each shard on its device, and its kind.

    Raises:
        LayoutChangedError: The shards differ from those of the layout.
    """
    for expected in layout.shards:
        shard = next(shards, None)
        if shard is None or shard.values is None or shard != expected:
            raise LayoutChangedError(expected.title)
        yield as_bytes(shard.values), shard.kind
    if next(shards, None) is not None:
        raise LayoutChangedError("more shards than before")


class NotSavedError(Exception):
    """Raised on every rank if a save fails, with one line that says why."""


@dataclass(frozen=True)
class WrittenFile:
    """A file of this rank that is on the disk."""

    path: Path
    """Path that the file has once the checkpoint is published."""
    record: FileRecord
    """Record of the file for the manifest."""
    shards: tuple[Shard, ...]
    """Shards of the file, with checksums and without values."""


@dataclass
class ReusableState:
    """State of a save that the next save reuses."""

    device: torch.device
    """Device of the engine's values."""
    layout: FileLayout | None = None
    """Layout of all shards of this rank, as if they were one file; `None` until it is first needed."""
    snapshot: Snapshot | None = None
    """Snapshot with its memory; `None` before the first one, and if the memory is too short for it."""
    frozen: WrittenFile | None = None
    """File of the frozen parameters in the last checkpoint; `None` if there is none.

    The next checkpoint gets a hard link to it, so that each checkpoint is complete without the others."""
    has_warned: bool = False
    """Whether a warning about short memory was logged."""


class CheckpointSave:
    """One save of one step. Methods are in the order of their calls.

    Args:
        folder: Folder of the checkpoints.
        step: Number of optimizer steps completed.
        fields: Fields of the manifest: split, state and scalars.
        peers: Ranks that save together.
        reusable: State that saves reuse; changed in place.
        pruner: Removes older checkpoints after the save.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        fields: dict[str, Any],
        peers: Peers,
        reusable: ReusableState,
        pruner: Pruner,
    ):
        self.fields = fields | {"global_step": step, "world_size": len(peers.leaders)}
        """Fields of the manifest, without the records of files and table."""
        self.write_seconds = 0.0
        """Seconds from the first byte to the rename."""
        self._folder = folder
        self._peers = peers
        self._reusable = reusable
        self._pruner = pruner
        self._final = folder / folder_name(step)
        self._partial = folder / f"{self._final.name}{PARTIAL}"
        self._replaced = folder / f"{self._final.name}{REPLACED}"
        self._frozen: WrittenFile | None = None
        self._written: list[WrittenFile] = []
        self._published: Manifest | None = None

    @tag_errors(Phase.SAVING)
    def run(self, engine: EngineState, wait: bool) -> bool:
        """Do the part of the save for which training pauses. Collective.

        This is a copy to host memory. If `wait` is set, or a rank lacks the memory for its copy, it is the
        complete save.

        Returns:
            Whether the save is complete. If not, training may continue, and another thread has to call
            `finish`.

        Raises:
            NotSavedError: A rank could not save.
        """
        for _ in range(2):  # the second attempt is for shards that differ from those of the last save
            try:
                if self._prepare(engine, wait) and self._take_snapshot(engine):
                    return False
                self.finish(engine)
                return True
            except LayoutChangedError:
                self._reusable.layout = None
                self._reusable.snapshot = None
        raise RuntimeError("the engine yields other shards at each call of shards()")

    @tag_errors(Phase.SAVING)
    def finish(self, engine: EngineState | None = None) -> None:
        """Write and publish the checkpoint, then remove old ones by the retention rule. Collective.

        Args:
            engine: Engine whose values are written; `None` to write those of the snapshot.

        Raises:
            NotSavedError: A rank could not save.
            LayoutChangedError: The shards of a rank differ from the layout.
        """
        began = time.perf_counter()
        try:
            self._write(engine)
            self._publish()
        finally:
            self.write_seconds = time.perf_counter() - began
        self._reusable.frozen = self._frozen
        log.info("saved %s", self._final)
        if self._published is not None:
            self._pruner.prune(self._published)

    def _prepare(self, engine: EngineState, wait: bool) -> bool:
        """Create the partial folder, and check the free space on disks and in host memory. Collective.

        Returns:
            Whether to take a snapshot in host memory.

        Raises:
            NotSavedError: A disk has too little space, or the folder cannot be created.
        """
        if self._reusable.layout is None:
            self._reusable.layout = FileLayout.of(engine.shards())
        layout = self._reusable.layout
        problem = None
        disk = layout.num_bytes + ROW_BYTES * len(layout.shards)
        if self._reusable.frozen is not None:
            disk -= self._reusable.frozen.record.bytes  # linked; if that fails, a write to a full disk raises
        disk_free = disk  # a leader replaces it; the values of other ranks are not used
        if self._peers.is_leader:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                remove_partial(self._folder)
                self._partial.mkdir()
                disk_free = shutil.disk_usage(self._folder).free
            except OSError as error:
                problem = self._peers.describe(error)
        needs_memory = not wait and self._reusable.snapshot is None
        own_report = SpaceReport(
            host=self._peers.host,
            disk=disk,
            disk_free=disk_free,
            memory=layout.num_bytes if needs_memory else 0,
            memory_free=available_memory(),
        )
        gathered = self._peers.gather((self.fields, own_report, problem))
        self.fields = gathered[0][0]  # rank 0's, so that the manifest is the same on every machine
        reports = [report for _, report, _ in gathered]
        problem = find_first_problem(problem_of_rank for *_, problem_of_rank in gathered)
        self._abort_on(problem or self._peers.find_disk_shortage(reports, self._folder))
        return not wait and self._warn_of_memory(find_memory_shortage(reports))

    def _take_snapshot(self, engine: EngineState) -> bool:
        """Copy the engine's values to host memory. Return False on all ranks if any rank lacks memory."""
        reusable = self._reusable
        shards = iter(engine.shards())
        assert reusable.layout is not None
        snapshot = reusable.snapshot or Snapshot(reusable.layout, reusable.device)
        reusable.snapshot = snapshot
        if self._warn_of_memory(self._attempt(lambda: snapshot.fill(shards), shards)):
            engine.hold_step(snapshot.hold_device)
            return True
        reusable.snapshot = None
        return False

    def _warn_of_memory(self, problem: str | None) -> bool:
        """Warn once if there is a problem, and return whether there is none."""
        if problem is not None and not self._reusable.has_warned:
            self._reusable.has_warned = True
            log.warning("training pauses while checkpoints are written: %s", problem)
        return problem is None

    def _write(self, engine: EngineState | None) -> None:
        """Write this rank's files, and abort on all ranks if any rank has a problem.

        Args:
            engine: Engine whose values are written; `None` to write those of the snapshot.
        """
        layout = self._reusable.layout
        assert layout is not None
        shards: Iterator[Shard]
        if engine is None:
            assert self._reusable.snapshot is not None
            shards = iter(())
            values = self._reusable.snapshot.views()
        else:
            shards = iter(engine.shards())
            values = stream_shards(layout, shards)
        can_repeat = engine is None
        self._abort_on(self._attempt(lambda: self._write_files(layout.shards, values, can_repeat), shards))

    def _write_files(
        self, shards: tuple[Shard, ...], values: Iterator[list[memoryview]], can_repeat: bool
    ) -> None:
        """Write one file with the frozen shards and one with the others.

        The file with the frozen shards is a link to the last checkpoint's if their values are the same.

        Args:
            shards: Shards of this rank, the frozen ones first.
            values: Bytes of each shard.
            can_repeat: Whether views stay valid after the next ones are requested, so that they can be hashed
                and then written.

        Raises:
            LayoutChangedError: The shards differ from the layout; or `can_repeat` is not set and frozen
                values have changed: the next attempt writes them.
        """
        self._frozen = None
        self._written = []
        frozen = tuple(takewhile(lambda shard: shard.is_frozen, shards))  # engines yield frozen shards first
        stem = f"rank-{self._peers.rank:05d}"
        if frozen:
            name = f"{stem}.frozen.safetensors"
            frozen_values: Iterable[list[memoryview]] = islice(values, len(frozen))
            if can_repeat:
                frozen_values = list(frozen_values)
            linked = self._link_frozen(name, frozen, frozen_values, can_repeat)
            self._frozen = linked or self._write_file(name, frozen, frozen_values)
            self._written.append(self._frozen)
        trained = shards[len(frozen) :]
        if trained:
            self._written.append(self._write_file(f"{stem}.safetensors", trained, values))
        next(values, None)  # raises a LayoutChangedError if there are more shards

    def _link_frozen(
        self, name: str, shards: tuple[Shard, ...], values: Iterable[list[memoryview]], can_repeat: bool
    ) -> WrittenFile | None:
        """Link the last checkpoint's file of frozen shards if it has these values; else return `None`.

        Raises:
            LayoutChangedError: The file cannot be linked, and `can_repeat` is not set: hashing has used up
                the values.
        """
        last = self._reusable.frozen
        if last is None or last.shards != shards:
            return None
        pairs = zip(values, last.shards, strict=True)
        if all(hash_views(views).hexdigest() == shard.checksum for views, shard in pairs):
            with suppress(OSError):  # no hard links on this file system, or the file was removed
                os.link(last.path, self._partial / name)
                return replace(last, path=self._final / name)
        if not can_repeat:
            self._reusable.frozen = None
            raise LayoutChangedError("frozen shards")
        return None

    def _write_file(
        self, name: str, shards: tuple[Shard, ...], values: Iterable[list[memoryview]]
    ) -> WrittenFile:
        """Write a file of the partial checkpoint.

        Raises:
            OSError: The file cannot be written.
            LayoutChangedError: The values of a shard have another length.
        """
        layout = FileLayout.of(shards)
        checksums = write_file(self._partial / name, layout, values)
        record = FileRecord(
            name=name,
            rank=self._peers.rank,
            host=self._peers.host,
            place=self._peers.leader,
            bytes=layout.num_bytes,
            xxh3_128=checksums.xxh3_128,
            shards=len(shards),
        )
        written = tuple(map(Shard.without_values, shards, checksums.shards))
        return WrittenFile(self._final / name, record, written)

    def _publish(self) -> None:
        """Write table and manifest on every file system, and rename the folder to the checkpoint's name.

        The manifest is written last, after all ranks have reported that their files are on the disk. One
        rename then publishes the folder with all its files.
        """
        own_records = [file.record for file in self._written]
        own_table = ShardTable.of(shard for file in self._written for shard in file.shards)
        collected = self._peers.collect((own_records, own_table))
        files = [record for records, _ in collected for record in records]
        table = ShardTable.concatenate([table_of_rank for _, table_of_rank in collected])
        del collected  # the tables of a thousand ranks take as much memory again
        problems = self._peers.attempt(lambda: self._write_manifest_and_rename(files, table))
        self._abort_on(find_first_problem(problems))
        if self._peers.is_leader:
            # Not removed earlier: if another machine had failed to publish, it would have got its name back.
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _write_manifest_and_rename(self, files: list[FileRecord], table: ShardTable) -> None:
        """Publish the partial folder of this file system.

        Raises:
            OSError: A file cannot be written, a folder cannot be renamed, or the table is inconsistent.
        """
        content = table.encode()
        try:
            fields = self.fields | {"files": tuple(files), "shard_table": make_table_record(content)}
            manifest = Manifest.with_table(table, self._final, **fields)
        except ValueError as error:  # a bug of the engine: without this, the error would come on the resume
            raise OSError(errno.EINVAL, f"the ranks' shards do not form whole tensors: {error}") from error
        write_durably(self._partial / TABLE, content)
        write_durably(self._partial / MANIFEST, manifest.encode())
        if os.path.lexists(self._final):  # the run resumed from an earlier step and repeats this one
            self._final.rename(self._replaced)
        publish_folder(self._partial, self._final)
        self._published = manifest

    def _attempt(self, action: Callable[[], None], shards: Iterator[Shard]) -> str | None:
        """Run an action that takes this rank's shards, and return the first problem of any rank. Collective.

        Args:
            action: Action that takes shards from the iterator.
            shards: Iterator over this rank's shards. Those that the action leaves are taken here, since
                taking them may be collective.

        Raises:
            LayoutChangedError: The shards of a rank differ from the layout.
        """
        problem = None
        has_changed = False
        try:
            action()
        except LayoutChangedError:
            has_changed = True
        except MemoryError as error:
            problem = f"{self._peers.host}: {summarize_error(error)}"
        except OSError as error:
            problem = self._peers.describe(error)
        for _ in shards:
            pass
        problems, have_changed = zip(*self._peers.gather((problem, has_changed)), strict=True)
        if any(have_changed):
            raise LayoutChangedError("on some rank")
        return find_first_problem(problems)

    def _abort_on(self, problem: str | None) -> None:
        """Abort the save and delete the partial checkpoint if there is a problem.

        A checkpoint that was to be replaced gets its name back.

        Args:
            problem: First problem of any rank, the same on all ranks; `None` if there is none.

        Raises:
            NotSavedError: There is a problem.
        """
        if problem is None:
            return
        if self._peers.is_leader:
            try:
                if self._published is not None:  # another machine failed to publish, so none may keep it
                    remove_checkpoint(self._final)
                shutil.rmtree(self._partial, ignore_errors=True)
                if self._replaced.exists():
                    self._replaced.rename(self._final)
            except OSError as error:
                log.warning(
                    "the failed save of %s is not cleaned up: %s; a resume skips what is incomplete",
                    self._final,
                    error,
                )
        raise NotSavedError(problem)


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save. Except for the times, it is the same on every rank."""

    step: int
    problem: str | None
    """One line with the reason of a failure; `None` if the checkpoint is saved or still being written."""
    stall_seconds: float
    """Seconds for which training paused."""
    write_seconds: float | None
    """Seconds from the first byte to the rename; `None` if the checkpoint is still being written."""


class CheckpointStore:
    """Saves and restores checkpoints `<run_dir>/checkpoints/step-00000100/` with each rank's files.

    A background thread writes a checkpoint, and communicates with the threads of other ranks over a separate
    gloo group. These threads never wait for a main thread. So a save ends even if the main threads wait in a
    collective of training.

    Args:
        folder: Folder of the checkpoints; created if missing.
        retention: Rule for the checkpoints that stay.
        job: Ranks of the job. Collective: every rank creates its store at the same point.
        split: Description of the split for the manifest.
        host: Name of this machine for messages.

    Raises:
        CheckpointError: The folder cannot be written.
    """

    def __init__(self, folder: Path, retention: Retention, job: Job, split: str, host: str = platform.node()):
        self.folder = folder
        self._pruner = Pruner(folder, retention)
        self._split = split
        try:
            self._peers = find_peers(job, folder, host)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written: {error}; choose another run_dir") from None
        self._reusable = ReusableState(job.device)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # A queue, because the thread adds outcomes while `poll` takes them.
        self._finished: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._saved: dict[int, bool] = {}  # step -> whether the checkpoint has an evaluation
        self._is_closed = False
        self.is_under_way = False
        """Whether a save has started whose end `poll` has not seen yet."""
        self._listener: Callable[[SavedCheckpoints], None] | None = None

    def set_listener(self, listener: Callable[[SavedCheckpoints], None]) -> None:
        """Call `listener` with the checkpoints that count, now and after every change.

        Later calls may come from the thread that saves.
        """
        self._listener = listener
        self._notify_listener()

    def _notify_listener(self) -> None:
        if self._listener is not None:
            self._listener(self._pruner.list_saved())

    def prepare(self, engine: EngineState) -> None:
        """Allocate pinned memory for later saves in the background, if there is enough. Collective.

        Call it after the first step, once the optimizer has its state. Without a GPU this does nothing:
        memory that is not pinned takes no time until the first save writes to it.
        """
        reusable = self._reusable
        if reusable.device.type != "cuda" or reusable.snapshot is not None:
            return
        reusable.layout = FileLayout.of(engine.shards())
        own_report = SpaceReport(
            host=self._peers.host,
            disk=0,
            disk_free=0,
            memory=reusable.layout.num_bytes,
            memory_free=available_memory(),
        )
        if find_memory_shortage(self._peers.gather(own_report)) is None:  # else the first save warns
            reusable.snapshot = Snapshot(reusable.layout, reusable.device)

    def hold_device(self) -> None:
        """Make later work of the device wait until the values being saved are copied.

        The host does not wait.
        """
        if self._reusable.snapshot is not None:
            self._reusable.snapshot.hold_device()

    def save(self, engine: EngineState, state: dict[str, Any], wait: bool = False) -> SaveOutcome:
        """Save, then remove checkpoints that the retention rule does not keep. Collective.

        Training pauses for a copy to host memory, and a background thread does the rest. A copy from a GPU is
        only started, and the next step waits for it. If memory is short or `wait` is set, training pauses
        until everything is on the disk. A second save waits for the first.

        A step that is saved already is saved again only if it had no evaluation and `state` has one.

        Args:
            engine: Engine to save.
            state: JSON values with `global_step`, and after an evaluation of this step with its results; see
                has_evaluation.
            wait: Whether to return only once the checkpoint is on the disk.

        Returns:
            The outcome. A failure, such as a full disk, does not end the run. For a save in the background,
            `poll` returns the complete outcome later.
        """
        started = time.perf_counter()
        self.wait()
        self.is_under_way = True
        step = int(state["global_step"])
        adds_evaluation = has_evaluation(state) and not self._saved.get(step, False)
        if step in self._saved and not adds_evaluation:
            return SaveOutcome(step, None, time.perf_counter() - started, 0.0)
        fields = {"split": self._split, "state": json.loads(json.dumps(state)), "scalars": engine.scalars()}
        save = CheckpointSave(
            folder=self.folder,
            step=step,
            fields=fields,
            peers=self._peers,
            reusable=self._reusable,
            pruner=self._pruner,
        )
        problem = None
        try:
            if not save.run(engine, wait):
                outcome = SaveOutcome(step, None, time.perf_counter() - started, None)
                self._finish_in_background(save, outcome)
                return outcome
        except NotSavedError as error:
            problem = str(error)
        stall = time.perf_counter() - started
        outcome = self._record_outcome(save, SaveOutcome(step, problem, stall, save.write_seconds))
        if problem is None and not wait:
            self._finished.put(outcome)
        return outcome

    def save_final(self, engine: EngineState, state: dict[str, Any]) -> SaveOutcome:
        """Save at the end of a run, and return once the checkpoint is on the disk. Collective.

        Raises:
            CheckpointError: The checkpoint could not be saved.
        """
        outcome = self.save(engine, state, wait=True)
        if outcome.problem is not None:
            raise CheckpointError(outcome.problem)
        return outcome

    def poll(self) -> list[SaveOutcome]:
        """Return the outcomes of saves without `wait` that ended since the last call.

        This neither waits nor is collective. An unexpected exception of the thread that saves is raised here.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        self.is_under_way = self._thread is not None
        return [self._finished.get() for _ in range(self._finished.qsize())]

    def close(self) -> None:
        """Wait for a save in the background, and release the group of the ranks that save.

        Call it before the process group of the job is destroyed.
        """
        try:
            self.wait()
        finally:
            if not self._is_closed:
                self._peers.close()
            self._is_closed = True

    def wait(self) -> None:
        """Wait for a save in the background. An unexpected exception of its thread is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def _finish_in_background(self, save: CheckpointSave, outcome: SaveOutcome) -> None:
        """Run the rest of a save on a separate thread.

        Args:
            save: Save whose snapshot is taken.
            outcome: Outcome so far, to which the thread adds its own.
        """

        def finish() -> None:
            problem = None
            try:
                save.finish()
            except NotSavedError as error:
                problem = str(error)
            except BaseException as error:
                self._failure = error
                return
            ended = replace(outcome, problem=problem, write_seconds=save.write_seconds)
            self._finished.put(self._record_outcome(save, ended))

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()

    def _record_outcome(self, save: CheckpointSave, outcome: SaveOutcome) -> SaveOutcome:
        """Notify the listener of a checkpoint, or log a failure. Return the outcome with the logged line."""
        if outcome.problem is None:
            self._saved[outcome.step] = has_evaluation(save.fields["state"])
            self._notify_listener()
            return outcome
        line = f"step {outcome.step} is not saved: {outcome.problem}; earlier checkpoints are intact"
        log.warning("%s", line)
        return replace(outcome, problem=line)

    def choose(self) -> Manifest | None:
        """Return the manifest of the newest checkpoint that is intact on all machines. Collective.

        Every byte of it is verified. Damaged and incomplete checkpoints are skipped and logged with a reason.

        Returns:
            The manifest; `None` if there is no checkpoint.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged or incomplete.
        """
        manifest, skipped_steps = find_newest_verified(self.folder, self._peers)
        self._pruner.damaged_steps |= skipped_steps
        if manifest is not None:
            log.info(
                "resuming %s from %s, saved by %s", self.folder.parent, manifest.folder.name, manifest.split
            )
        return manifest

    @tag_errors(Phase.RESUMING)
    def restore(self, engine: EngineState, manifest: Manifest) -> dict[str, Any]:
        """Fill the engine from a checkpoint, and return the `state` that `save` got. Collective.

        Args:
            engine: Engine to fill.
            manifest: Result of `choose`.

        Raises:
            CheckpointError: The checkpoint belongs to another model, or cannot be read.
        """
        began = time.perf_counter()
        with CheckpointReader(manifest) as reader:
            engine.restore(reader)
        self._saved[manifest.global_step] = has_evaluation(manifest.state)
        seconds = time.perf_counter() - began
        level = logging.INFO if manifest.num_bytes > LOGGED_BYTES else logging.DEBUG
        log.log(level, "%s: %.0f MB read in %.1f s", manifest.folder.name, manifest.num_bytes / 1e6, seconds)
        return manifest.state

    def roll_back(self, engine: EngineState, until: int) -> dict[str, Any] | None:
        """Restore the newest verified checkpoint up to a step, and remove all later ones. Collective.

        Returns:
            The `state` that `save` got. `None` if there is no such checkpoint; then nothing has changed.
        """
        self.wait()
        manifest, _ = find_newest_verified(self.folder, self._peers, until)
        if manifest is None:
            return None
        state = self.restore(engine, manifest)
        last = manifest.global_step
        self._discard_after(last, remove_checkpoint, "later checkpoints are not removed")
        self._saved = {step: has_loss for step, has_loss in self._saved.items() if step <= last}
        self._notify_listener()
        return state

    def distrust_after(self, step: int) -> None:
        """Rename checkpoints of later steps, so that they no longer count. Collective."""
        self.wait()
        self._discard_after(
            step, mark_suspect, f"checkpoints after step {step} cannot be trusted, but are not renamed"
        )
        self._notify_listener()

    def _discard_after(self, step: int, discard: Callable[[Path], None], failure: str) -> None:
        """Call `discard` with each checkpoint of a later step, and log problems after the text `failure`."""
        problems = self._peers.attempt(lambda: discard_after(self.folder, step, discard))
        for problem in problems:
            if problem is not None:
                log.warning("%s: %s", failure, problem)

    def resume(self, engine: EngineState) -> dict[str, Any] | None:
        """Choose and restore a checkpoint; return `None` if there is none. Collective."""
        manifest = self.choose()
        return None if manifest is None else self.restore(engine, manifest)
