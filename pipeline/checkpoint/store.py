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
    PARTIAL,
    REPLACED,
    Pruner,
    Retention,
    SavedCheckpoints,
    discard_later,
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

CHUNK = 1 << 26  # a power of two, because torch rounds pinned memory up to one
# Smaller tensors are copied by one thread. torch's threads wait for each other after every copy; on a busy
# processor this took 17 times as long as the copying.
BY_ONE_THREAD = 1 << 24


def stream_shards(layout: FileLayout, shards: Iterator[Shard]) -> Iterator[list[memoryview]]:
    """Yield the bytes of each shard, copied to the host one at a time.

    Raises:
        LayoutChangedError: A shard differs from the one in the layout, or there are more shards.
    """
    return ([source.cpu().numpy().data] for source, _ in _match_layout(layout, shards))


class Snapshot:
    """Holds a copy of all shards in host memory, in buffers that every save reuses.

    If a rank lacks the memory, all ranks write their shards directly instead, and training pauses meanwhile.
    The save after the last step takes no copy either, since it is waited for anyway.
    A separate thread allocates the memory, since pinning takes seconds for gigabytes. Tensors on a GPU are
    copied on a separate stream, beside the next forward and backward. Only an optimizer's step writes what is
    saved, so the device waits for the copy just before that step, and the host waits only in the thread that
    writes. On a CPU there is nothing to overlap with, so training stands still for the copy.

    Args:
        layout: Shards to copy.
        device: Device of the shards. For CUDA the buffers are pinned, so copies run at the bus's speed.
    """

    def __init__(self, layout: FileLayout, device: torch.device):
        self.layout = layout
        total = sum(shard.num_bytes for shard in layout.shards)
        sizes = [min(CHUNK, total - start) for start in range(0, total, CHUNK)]
        thread = ThreadPoolExecutor(1, "snapshot")
        self._chunks = thread.submit(_take_memory, sizes, device.type == "cuda")
        thread.shutdown(wait=False)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def fill(self, shards: Iterator[Shard]) -> None:
        """Copy all shards, after waiting for the memory.

        After it returns, buffers and values on the host may change. Other values on a GPU may change after
        `hold_device`.

        Raises:
            LayoutChangedError: The shards are not those laid out.
            MemoryError: There is not enough host memory.
        """
        self._chunks.result()
        self._copied = None
        position = 0
        for found, kind in _match_layout(self.layout, shards):
            done = 0
            with self._beside(found, kind) as source:
                for part in self._parts(position, len(source)):
                    piece = source[done : done + len(part)]
                    if piece.device.type == "cpu" and len(piece) < BY_ONE_THREAD:
                        np.copyto(part.numpy(), piece.numpy())
                    else:
                        part.copy_(piece, non_blocking=True)
                    done += len(part)
            position += done
        if self._stream is not None:
            self._copied = self._stream.record_event()

    @contextmanager
    def _beside(self, source: Tensor, kind: str) -> Iterator[Tensor]:
        """Yield the values to copy, on the stream that copies them, once pending work on them is ordered."""
        if source.device.type != "cuda":
            yield source
            return
        if kind == BUFFER:
            source = source.clone()  # a forward changes buffers, and it does not wait for the copy
        self._stream = self._stream or torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            yield source
        source.record_stream(self._stream)  # some are temporary copies that the engine has released

    def hold_device(self) -> None:
        """Make later work of the device wait for the copy. The host does not wait."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def views(self) -> Iterator[list[memoryview]]:
        """Yield the bytes of each shard, in order, after waiting for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        position = 0
        for expected in self.layout.shards:
            yield [part.numpy().data for part in self._parts(position, expected.num_bytes)]
            position += expected.num_bytes

    def _parts(self, position: int, length: int) -> Iterator[Tensor]:
        chunks = self._chunks.result()
        end = position + length
        while position < end:
            index, start = divmod(position, CHUNK)
            stop = min(CHUNK, start + end - position)
            yield chunks[index][start:stop]
            position += stop - start


def _take_memory(sizes: list[int], is_pinned: bool) -> list[Tensor]:
    """Allocate the chunks, and pin them until the system refuses to pin more.

    Chunks pinned so far stay in use: torch would not return them to the system if they were freed.
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
                "copying checkpoints to host memory is slower: %s of it cannot be pinned: %s",
                format_bytes(sum(sizes[len(chunks) :])),
                summarize_error(error),
            )
    return chunks


def _match_layout(layout: FileLayout, shards: Iterator[Shard]) -> Iterator[tuple[Tensor, str]]:
    """Yield the bytes of each shard on its device, and its kind.

    Raises:
        LayoutChangedError: The shards are not those laid out.
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
    """Its path once the checkpoint is published."""
    record: FileRecord
    shards: tuple[Shard, ...]
    """Its shards with checksums, without values."""


@dataclass
class ReusableState:
    """Layout, buffers and frozen file of a save, which the next save reuses."""

    device: torch.device
    """Device of the engine's values."""
    layout: FileLayout | None = None
    snapshot: Snapshot | None = None
    frozen: WrittenFile | None = None
    """File of the frozen parameters in the last checkpoint, to which the next one makes a hard link.

    So retention, verification, export and a copy treat it as any other file."""
    has_warned: bool = False
    """Whether a warning about short memory was logged."""


class CheckpointSave:
    """One save of one step. Methods are in the order of their calls.

    Args:
        folder: Folder of the checkpoints.
        step: Number of optimizer steps completed.
        fields: Fields of the manifest: split, state and scalars.
        peers: Ranks that save together.
        kept: State that saves reuse; changed in place.
        pruner: Removes older checkpoints after the save.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        fields: dict[str, Any],
        peers: Peers,
        kept: ReusableState,
        pruner: Pruner,
    ):
        self.fields = fields | {"global_step": step, "world_size": len(peers.leaders)}
        self.write_seconds = 0.0
        """Seconds from the first byte to the rename."""
        self._folder = folder
        self._peers = peers
        self._kept = kept
        self._pruner = pruner
        self._final = folder / folder_name(step)
        self._partial = folder / f"{self._final.name}{PARTIAL}"
        self._replaced = folder / f"{self._final.name}{REPLACED}"
        self._frozen: WrittenFile | None = None
        self._written: list[WrittenFile] = []
        self._published: Manifest | None = None

    @tag_errors(Phase.SAVING)
    def run(self, engine: EngineState, wait: bool) -> bool:
        """Save while training stands still: completely, or without `wait` only a copy to host memory.

        Returns:
            Whether the save is complete. If not, training may continue, and `finish` does the rest on another
            thread.

        Raises:
            NotSavedError: A rank could not save.
        """
        for _ in range(2):  # the second attempt is for shards that differ from those of the last save
            try:
                if self._open(engine, wait) and self._take_snapshot(engine):
                    return False
                self.finish(engine)
                return True
            except LayoutChangedError:
                self._kept.layout = self._kept.snapshot = None
        raise RuntimeError("the engine's shards are never the same twice")

    @tag_errors(Phase.SAVING)
    def finish(self, engine: EngineState | None = None) -> None:
        """Write and publish the checkpoint, then remove those that the retention rule does not keep.

        Args:
            engine: Engine whose values are written; `None` for those of the snapshot.

        Raises:
            NotSavedError: A rank could not save.
            LayoutChangedError: Some rank's shards differ from the layout.
        """
        began = time.perf_counter()
        try:
            self._write(engine)
            self._publish()
        finally:
            self.write_seconds = time.perf_counter() - began
        self._kept.frozen = self._frozen
        log.info("saved %s", self._final)
        if self._published is not None:
            self._pruner.prune(self._published)

    def _open(self, engine: EngineState, wait: bool) -> bool:
        """Create the folder and check the free space. Return whether to take a snapshot in host memory."""
        if self._kept.layout is None:
            self._kept.layout = FileLayout.of(engine.shards())
        layout = self._kept.layout
        problem = None
        disk = layout.num_bytes + ROW_BYTES * len(layout.shards)
        if self._kept.frozen is not None:
            disk -= self._kept.frozen.record.bytes  # linked; if that fails, a write to a full disk raises
        disk_free = disk  # not known on this rank; a write to a full disk raises
        if self._peers.is_leader:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                remove_partial(self._folder)
                self._partial.mkdir()
                disk_free = shutil.disk_usage(self._folder).free
            except OSError as error:
                problem = self._peers.describe(error)
        memory = 0 if wait or self._kept.snapshot is not None else layout.num_bytes
        own = SpaceReport(self._peers.host, disk, disk_free, memory, available_memory())
        said = self._peers.gather((self.fields, own, problem))
        rooms = [room for _, room, _ in said]
        self.fields = said[0][0]  # rank 0's, so that the manifest is the same on every machine
        self._agree(
            find_first_problem(wrong for *_, wrong in said)
            or self._peers.find_disk_shortage(rooms, self._folder)
        )
        return not wait and self._fits_in_memory(find_memory_shortage(rooms))

    def _take_snapshot(self, engine: EngineState) -> bool:
        """Copy the engine's values to host memory. Return False on all ranks if any rank lacks memory."""
        kept = self._kept
        shards = iter(engine.shards())
        assert kept.layout is not None
        snapshot = kept.snapshot = kept.snapshot or Snapshot(kept.layout, kept.device)
        if self._fits_in_memory(self._attempt(lambda: snapshot.fill(shards), shards)):
            engine.hold_step(snapshot.hold_device)
            return True
        kept.snapshot = None
        return False

    def _fits_in_memory(self, problem: str | None) -> bool:
        if problem is not None and not self._kept.has_warned:
            self._kept.has_warned = True
            log.warning("training pauses while checkpoints are written: %s", problem)
        return problem is None

    def _write(self, engine: EngineState | None) -> None:
        """Write this rank's files, and abort on all ranks if any rank has a problem."""
        layout = self._kept.layout
        snapshot = self._kept.snapshot
        assert layout is not None
        shards = iter(() if engine is None else engine.shards())
        values: Iterator[list[memoryview]] = stream_shards(layout, shards)
        if engine is None:
            assert snapshot is not None
            values = snapshot.views()
        can_repeat = engine is None
        self._agree(self._attempt(lambda: self._write_files(layout.shards, values, can_repeat), shards))

    def _write_files(
        self, shards: tuple[Shard, ...], values: Iterator[list[memoryview]], can_repeat: bool
    ) -> None:
        """Write one file with the frozen shards, or link the last checkpoint's, and one with the others.

        Args:
            shards: Shards of this rank, the frozen ones first.
            values: Bytes of each shard.
            can_repeat: Whether views stay valid after the next ones are requested.

        Raises:
            LayoutChangedError: The shards have changed; or frozen values have changed and `can_repeat` is not
                set, so that the next attempt writes them.
        """
        self._frozen = None
        self._written = []
        frozen = tuple(takewhile(lambda shard: shard.is_frozen, shards))  # engines yield frozen shards first
        stem = f"rank-{self._peers.rank:05d}"
        if frozen:
            name = f"{stem}.frozen.safetensors"
            own: Iterable[list[memoryview]] = islice(values, len(frozen))
            own = list(own) if can_repeat else own
            self._frozen = self._link(name, frozen, own, can_repeat) or self._write_file(name, frozen, own)
            self._written.append(self._frozen)
        if rest := shards[len(frozen) :]:
            self._written.append(self._write_file(f"{stem}.safetensors", rest, values))
        next(values, None)  # raises a LayoutChangedError if there are more shards

    def _link(
        self, name: str, shards: tuple[Shard, ...], values: Iterable[list[memoryview]], can_repeat: bool
    ) -> WrittenFile | None:
        """Link the last checkpoint's file of frozen shards if it has these values; else return `None`."""
        known = self._kept.frozen
        if known is None or known.shards != shards:
            return None
        pairs = zip(values, known.shards, strict=True)
        if all(hash_views(views).hexdigest() == shard.checksum for views, shard in pairs):
            with suppress(OSError):  # no hard links on this file system, or the file was removed
                os.link(known.path, self._partial / name)
                return replace(known, path=self._final / name)
        if not can_repeat:
            self._kept.frozen = None
            raise LayoutChangedError("frozen shards")
        return None

    def _write_file(
        self, name: str, shards: tuple[Shard, ...], values: Iterable[list[memoryview]]
    ) -> WrittenFile:
        layout = FileLayout.of(shards)
        sums = write_file(self._partial / name, layout, values)
        record = FileRecord(
            name=name,
            rank=self._peers.rank,
            host=self._peers.host,
            place=self._peers.leader,
            bytes=layout.num_bytes,
            xxh3_128=sums.xxh3_128,
            shards=len(shards),
        )
        return WrittenFile(self._final / name, record, tuple(map(Shard.without_values, shards, sums.shards)))

    def _publish(self) -> None:
        """Write table and manifest on every machine, and rename the folder to the checkpoint's name.

        The manifest is written last, after all ranks have reported that their files are on the disk. One
        rename then publishes the folder with all its files.
        """
        records = [file.record for file in self._written]
        own = ShardTable.of(shard for file in self._written for shard in file.shards)
        collected = self._peers.collect((records, own))
        files = [record for records, _ in collected for record in records]
        table = ShardTable.concatenate([part for _, part in collected])
        del collected  # a thousand ranks' parts take as much memory again
        self._agree(find_first_problem(self._peers.attempt(lambda: self._rename(files, table))))
        if self._peers.is_leader:
            # Removed only now: if another machine had failed to publish, it would be needed again.
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _rename(self, files: list[FileRecord], table: ShardTable) -> None:
        content = table.encode()
        try:
            fields = self.fields | {"files": tuple(files), "shard_table": make_table_record(content)}
            manifest = Manifest.with_table(table, self._final, **fields)
        except ValueError as error:  # a mistake of the engine is better reported now than on the resume
            raise OSError(errno.EINVAL, f"the ranks' shards do not form whole tensors: {error}") from error
        write_durably(self._partial / TABLE, content)
        write_durably(self._partial / MANIFEST, manifest.encode())
        if os.path.lexists(self._final):  # the run resumed from an earlier step and repeats this one
            self._final.rename(self._replaced)
        publish_folder(self._partial, self._final)
        self._published = manifest

    def _attempt(self, action: Callable[[], None], shards: Iterator[Shard]) -> str | None:
        """Run an action that takes this rank's shards, and return the first problem of any rank.

        Raises:
            LayoutChangedError: Some rank's shards differ from the layout.
        """
        problem = None
        changed = False
        try:
            action()
        except LayoutChangedError:
            changed = True
        except MemoryError as error:
            problem = f"{self._peers.host}: {summarize_error(error)}"
        except OSError as error:
            problem = self._peers.describe(error)
        for _ in shards:  # fetching them may be collective
            pass
        said = self._peers.gather((problem, changed))
        if any(changed for _, changed in said):
            raise LayoutChangedError("on some rank")
        return find_first_problem(problem for problem, _ in said)

    def _agree(self, problem: str | None) -> None:
        """Abort the save on every rank and delete the partial checkpoint if there is a problem."""
        if problem is None:
            return
        if self._peers.is_leader:
            try:
                if self._published is not None:  # another machine failed to, so none may have it
                    remove_checkpoint(self._final)
                shutil.rmtree(self._partial, ignore_errors=True)
                if self._replaced.exists():
                    self._replaced.rename(self._final)
            except OSError as error:
                log.warning("%s cannot be removed: %s", self._partial, error)
        raise NotSavedError(problem)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save. Except for the times, it is the same on every rank."""

    step: int
    problem: str | None
    """One line with the reason of a failure; `None` if the checkpoint is saved or still being written."""
    stall_seconds: float
    """Seconds for which training stood still."""
    write_seconds: float | None
    """Seconds from the first byte to the rename; `None` if it is still being written."""


class CheckpointStore:
    """Saves and restores checkpoints `<run_dir>/checkpoints/step-00000100/` with each rank's files.

    A background thread writes a checkpoint, and it communicates with its peers over a separate gloo group.
    Such threads wait only for each other, never for a main thread. So a save ends whatever collective of
    training the main threads are in.

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
        self._kept = ReusableState(job.device)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The thread adds to it while `poll` empties it. Swapping a list there could lose an outcome.
        self._finished: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._saved: dict[int, bool] = {}  # step -> whether the checkpoint has an evaluation loss
        self._is_closed = False
        self.is_under_way = False
        """Whether `poll` has not yet returned the outcome of a save."""
        self._show: Callable[[SavedCheckpoints], None] | None = None

    def set_listener(self, show: Callable[[SavedCheckpoints], None]) -> None:
        """Call `show` with the checkpoints that count, now and after every change, on any thread."""
        self._show = show
        self._changed()

    def _changed(self) -> None:
        if self._show is not None:
            self._show(self._pruner.list_saved())

    def prepare(self, engine: EngineState) -> None:
        """Allocate pinned memory for later saves in the background, if there is enough. Collective.

        Called after the first step. Without a GPU this does nothing: memory that is not pinned costs nothing
        until the first save writes to it.
        """
        kept = self._kept
        if kept.device.type != "cuda" or kept.snapshot is not None:
            return
        kept.layout = FileLayout.of(engine.shards())
        own = SpaceReport(self._peers.host, 0, 0, kept.layout.num_bytes, available_memory())
        if find_memory_shortage(self._peers.gather(own)) is None:  # else the first save warns
            kept.snapshot = Snapshot(kept.layout, kept.device)

    def hold_device(self) -> None:
        """Make later work of the device wait until the values being saved are copied."""
        if self._kept.snapshot is not None:
            self._kept.snapshot.hold_device()

    def save(self, engine: EngineState, state: dict[str, Any], wait: bool = False) -> SaveOutcome:
        """Save, then remove checkpoints that the retention rule does not keep. Collective.

        Training stands still for a copy to host memory, and a background thread does the rest. A copy from a
        GPU is only started, and the next step waits for it. If memory is short or `wait` is set, training
        stands still until everything is on the disk. A second save waits for the first.

        Args:
            engine: Engine to save.
            state: JSON values with `global_step`, and with `eval_loss` after an evaluation of this step. The
                best checkpoint is judged only by an evaluation of its own step.
            wait: Whether to return only once the checkpoint is on the disk.

        Returns:
            The outcome. A failure, such as a full disk, does not end the run. For a save in the background,
            only the times of its start are known.
        """
        started = time.perf_counter()
        self.wait()
        self.is_under_way = True
        step = int(state["global_step"])
        if self._saved.get(step, False) or (step in self._saved and state.get("eval_loss") is None):
            return SaveOutcome(step, None, time.perf_counter() - started, 0.0)
        fields = {"split": self._split, "state": json.loads(json.dumps(state)), "scalars": engine.scalars()}
        save = CheckpointSave(
            folder=self.folder,
            step=step,
            fields=fields,
            peers=self._peers,
            kept=self._kept,
            pruner=self._pruner,
        )
        problem = None
        try:
            if not save.run(engine, wait):
                outcome = SaveOutcome(step, None, time.perf_counter() - started, None)
                self._finish_beside(save, outcome)
                return outcome
        except NotSavedError as error:
            problem = str(error)
        stall = time.perf_counter() - started
        outcome = self._record_outcome(save, SaveOutcome(step, problem, stall, save.write_seconds))
        if problem is None and not wait:
            self._finished.put(outcome)
        return outcome

    def save_final(self, engine: EngineState, state: dict[str, Any]) -> SaveOutcome:
        """Save with `wait`, for the end of a run.

        Raises:
            CheckpointError: The checkpoint could not be saved.
        """
        outcome = self.save(engine, state, wait=True)
        if outcome.problem is not None:
            raise CheckpointError(outcome.problem)
        return outcome

    def poll(self) -> list[SaveOutcome]:
        """Return the saves without `wait` that ended since the last call. Neither waits nor is collective."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        self.is_under_way = self._thread is not None
        return [self._finished.get() for _ in range(self._finished.qsize())]

    def close(self) -> None:
        """Wait for a save in the background and release the group. Call it before the process group ends."""
        try:
            self.wait()
        finally:
            if not self._is_closed:
                self._peers.close()
            self._is_closed = True

    def wait(self) -> None:
        """Wait for a save in the background, and raise its exception if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def _finish_beside(self, save: CheckpointSave, outcome: SaveOutcome) -> None:
        """Run the rest of a save on a separate thread."""

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
        if outcome.problem is None:
            self._saved[outcome.step] = save.fields["state"].get("eval_loss") is not None
            self._changed()
            return outcome
        line = f"step {outcome.step} is not saved: {outcome.problem}; earlier checkpoints are intact"
        log.warning("%s", line)
        return replace(outcome, problem=line)

    def choose(self) -> Manifest | None:
        """Return the newest checkpoint that is verified on all machines; `None` without any. Collective.

        Each newer checkpoint that is skipped is logged with the reason.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged or incomplete.
        """
        manifest, skipped_steps = find_newest_verified(self.folder, self._peers)
        self._pruner.damaged_steps |= skipped_steps
        if manifest is not None:
            log.info("resuming %s from %s", self.folder.parent, manifest.folder.name)
        return manifest

    @tag_errors(Phase.RESUMING)
    def restore(self, engine: EngineState, manifest: Manifest) -> dict[str, Any]:
        """Fill the engine from a checkpoint of `choose` and return the state of its save. Collective."""
        began = time.perf_counter()
        with CheckpointReader(manifest) as reader:
            engine.restore(reader)
        self._saved[manifest.global_step] = manifest.state.get("eval_loss") is not None
        log.info(
            "%s, saved by %s: %.0f MB read in %.1f s",
            manifest.folder.name,
            manifest.split,
            manifest.num_bytes / 1e6,
            time.perf_counter() - began,
        )
        return manifest.state

    def roll_back(self, engine: EngineState, until: int) -> dict[str, Any] | None:
        """Restore the newest verified checkpoint up to a step, and remove all later ones. Collective.

        Returns:
            The state stored in it. `None` if there is no such checkpoint; then nothing has changed.
        """
        self.wait()
        manifest, _ = find_newest_verified(self.folder, self._peers, until)
        if manifest is None:
            return None
        state = self.restore(engine, manifest)
        self._discard_after(manifest.global_step, remove_checkpoint, "later checkpoints stay")
        self._saved = {step: known for step, known in self._saved.items() if step <= manifest.global_step}
        self._changed()
        return state

    def distrust_after(self, step: int) -> None:
        """Rename checkpoints of later steps, so that they no longer count. Collective."""
        self.wait()
        self._discard_after(
            step, mark_suspect, f"checkpoints after step {step} cannot be trusted, but are not renamed"
        )
        self._changed()

    def _discard_after(self, step: int, discard: Callable[[Path], None], otherwise: str) -> None:
        problems = self._peers.attempt(lambda: discard_later(self.folder, step, discard))
        for problem in filter(None, problems):
            log.warning("%s: %s", otherwise, problem)

    def resume(self, engine: EngineState) -> dict[str, Any] | None:
        """Choose and restore a checkpoint; return `None` if there is none. Collective."""
        manifest = self.choose()
        return None if manifest is None else self.restore(engine, manifest)
