"""Checkpoints of one run: saved beside training, published by one rename, verified before they are loaded."""

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
from functools import partial
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
    clear_partial,
    folder_name,
    newest_whole,
    remove,
    remove_after,
    set_aside_after,
)
from pipeline.checkpoint.manifest import (
    MANIFEST,
    MAX_BYTES,
    MAX_TABLE_BYTES,
    ROW_BYTES,
    TABLE,
    FileRecord,
    Manifest,
    ShardTable,
    TableRecord,
)
from pipeline.checkpoint.peers import Peers, Room, find_peers, first, lack_of_memory
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.shard_file import Layout, LayoutChangedError, as_bytes, hash_views, write_file
from pipeline.checkpoint.shards import BUFFER, EngineState, Shard
from pipeline.distributed.machine import available_memory
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import CheckpointError, one_line
from pipeline.files import publish_folder, write_durably

Values = Iterable[Iterable[memoryview]]


@dataclass(frozen=True)
class WrittenFile:
    """One of them."""

    path: Path
    """Once it is published."""
    record: FileRecord
    shards: tuple[Shard, ...]
    """With checksums."""


class RankFiles:
    """Those of one checkpoint.

    Args:
        partial: Its folder while it is written.
        final: Its folder once it is published.
        frozen: What nobody trains, in the checkpoint before.
    """

    def __init__(self, partial: Path, final: Path, peers: Peers, frozen: WrittenFile | None):
        self.written: list[WrittenFile] = []
        self.frozen: WrittenFile | None = None
        self._partial, self._final, self._peers, self._known = partial, final, peers, frozen

    def write(self, layout: Layout, values: Iterator[Iterable[memoryview]], lasting: bool) -> None:
        """Writes them, and returns once they are on the disk.

        Args:
            values: The bytes of each shard.
            lasting: See write_file.

        Raises:
            OSError: as write_file.
            LayoutChangedError: as write_file; or the file of what nobody trains was thought to be the one
                before, and when that was seen not to be so, the values had been taken.
        """
        frozen = list(takewhile(lambda shard: shard.is_frozen, layout.shards))  # engines give them first
        stem = f"rank-{self._peers.rank:05d}"
        if frozen:
            name, part = f"{stem}.frozen.safetensors", Layout.of(frozen)
            own: Values = islice(values, len(frozen))
            own = list(own) if lasting else own
            self.frozen = self._link(name, part, own, lasting) or self._write(name, part, own, lasting)
            self.written.append(self.frozen)
        if rest := layout.shards[len(frozen) :]:
            self.written.append(self._write(f"{stem}.safetensors", Layout.of(rest), values, lasting))

    def _link(self, name: str, layout: Layout, values: Values, lasting: bool) -> WrittenFile | None:
        """The file before under this name, if it has the same values; None: it is to be written."""
        known = self._known
        if known is None or known.shards != layout.shards:
            return None
        pairs = zip(values, known.shards, strict=True)
        if all(hash_views(views).hexdigest() == shard.checksum for views, shard in pairs):
            with suppress(OSError):  # a file system without links, or the file is gone
                os.link(known.path, self._partial / name)
                return WrittenFile(self._final / name, known.record, known.shards)
        if not lasting:
            raise LayoutChangedError("what is frozen")
        return None

    def _write(self, name: str, layout: Layout, values: Values, lasting: bool) -> WrittenFile:
        sums = write_file(self._partial / name, layout, values, lasting)
        record = FileRecord(
            name=name,
            rank=self._peers.rank,
            host=self._peers.host,
            place=self._peers.leader,
            bytes=layout.num_bytes,
            xxh3_128=sums.xxh3_128,
            shards=len(layout.shards),
        )
        shards = tuple(map(Shard.described, layout.shards, sums.shards))
        return WrittenFile(self._final / name, record, shards)


CHUNK = 1 << 26  # a power of two: torch rounds pinned memory up to one
# torch's threads meet after every copy: on a busy processor the waiting took 17 times as long as the copying.
BY_ONE_THREAD = 1 << 24


def streamed(layout: Layout, shards: Iterator[Shard]) -> Iterator[list[memoryview]]:
    """The bytes of each shard, fetched to the host one at a time.

    Raises:
        LayoutChangedError: a shard is not the one laid out at its place, or there are more of them.
    """
    return ([source.cpu().numpy().data] for source, _ in _matched(layout, shards))


class Snapshot:
    """Buffers for one layout, filled at every save and kept between them.

    Memory is taken on a thread of its own: pinning takes seconds for gigabytes. What lies on a GPU is copied
    on a stream beside the main one: the host, a forward and a backward do not wait for it.

    Args:
        layout: What will be copied.
        device: Where it comes from; for CUDA the buffers are pinned, and a copy runs at the bus's speed.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self.layout = layout
        total = sum(shard.num_bytes for shard in layout.shards)
        sizes = [min(CHUNK, total - start) for start in range(0, total, CHUNK)]
        thread = ThreadPoolExecutor(1, "snapshot")
        self._chunks = thread.submit(_take_memory, sizes, device.type == "cuda")
        thread.shutdown(wait=False)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def fill(self, shards: Iterator[Shard]) -> None:
        """Copies all shards, once there is memory.

        When it returns, buffers may change, and the host's values; a GPU's others after `hold_device`.

        Raises:
            LayoutChangedError: they are not those laid out.
            MemoryError: there is not enough host memory.
        """
        self._chunks.result()
        self._copied = None
        position = 0
        for found, kind in _matched(self.layout, shards):
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
        """The values to copy, on the stream that copies them: not before what is at work on them is done."""
        if source.device.type != "cuda":
            yield source
            return
        if kind == BUFFER:
            source = source.clone()  # a forward changes these
        self._stream = self._stream or torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            yield source
        source.record_stream(self._stream)  # of some the engine made a copy, which nobody holds any longer

    def hold_device(self) -> None:
        """What the device is given from here on waits for the copy; the host does not."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def views(self) -> Iterator[list[memoryview]]:
        """The bytes of each shard, in order, once they are copied."""
        if self._copied is not None:
            self._copied.synchronize()
        position = 0
        for expected in self.layout.shards:
            yield [part.numpy().data for part in self._parts(position, expected.num_bytes)]
            position += expected.num_bytes

    def _parts(self, position: int, length: int) -> Iterator[Tensor]:
        chunks, end = self._chunks.result(), position + length
        while position < end:
            index, start = divmod(position, CHUNK)
            stop = min(CHUNK, start + end - position)
            yield chunks[index][start:stop]
            position += stop - start


def _take_memory(sizes: list[int], is_pinned: bool) -> list[Tensor]:
    """Pinned for as long as the system gives any."""
    chunks: list[Tensor] = []
    for size in sizes:
        if is_pinned:
            try:
                chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
                continue
            except RuntimeError as error:
                is_pinned, got = False, sum(map(len, chunks)) >> 20
                log.warning(
                    "the copy of a checkpoint is slower than it could be: %d of %d MiB of host memory are "
                    "pinned, then: %s",
                    got,
                    sum(sizes) >> 20,
                    one_line(error),
                )
        try:
            chunks.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
    return chunks


def _matched(layout: Layout, shards: Iterator[Shard]) -> Iterator[tuple[Tensor, str]]:
    """The bytes of each shard, where they are, and its kind, while they are those laid out."""
    for expected in layout.shards:
        shard = next(shards, None)
        if shard is None or shard.values is None or shard != expected:
            raise LayoutChangedError(expected.title)
        yield as_bytes(shard.values), shard.kind
    if next(shards, None) is not None:
        raise LayoutChangedError("more shards than before")


class NotSavedError(Exception):
    """Why there is no checkpoint, in one line; raised on every rank."""


@dataclass
class Kept:
    """What a save leaves to the next, which then costs one copy, and writes what nobody trains as a link."""

    device: torch.device
    """Of the engine's values."""
    layout: Layout | None = None
    snapshot: Snapshot | None = None
    frozen: WrittenFile | None = None
    """What nobody trains, in the last checkpoint."""
    has_warned: bool = False
    """That memory is short."""


def prepare(engine: EngineState, peers: Peers, kept: Kept) -> None:
    """Has pinned memory for the copies of later saves taken beside training, if there is enough. Collective.

    Other memory costs nothing until it is written to, and is taken by the first save.
    """
    if kept.device.type != "cuda" or kept.snapshot is not None:
        return
    kept.layout = Layout.of(engine.shards())
    own = Room(peers.host, 0, 0, kept.layout.num_bytes, available_memory())
    if lack_of_memory(peers.gather(own)) is None:  # else the first save tells of it
        kept.snapshot = Snapshot(kept.layout, kept.device)


class Save:
    """One save of one step. Its methods stand in the order in which they are called.

    Args:
        folder: Of the checkpoints.
        fields: Of the manifest: split, state and scalars.
        kept: By the save before; changed in place.
    """

    def __init__(
        self, folder: Path, step: int, fields: dict[str, Any], peers: Peers, kept: Kept, pruner: Pruner
    ):
        self.fields = fields | {"global_step": step, "world_size": len(peers.leaders)}
        self.write_seconds = 0.0
        """From the first byte to the rename."""
        self._folder, self._peers, self._kept, self._pruner = folder, peers, kept, pruner
        self._final = folder / folder_name(step)
        self._partial = folder / f"{self._final.name}{PARTIAL}"
        self._replaced = folder / f"{self._final.name}{REPLACED}"
        self._published: Manifest | None = None

    @phase(Phase.SAVING)
    def run(self, engine: EngineState, wait: bool) -> bool:
        """Saves while training stands still: all of it, or with `wait` unset only a copy to host memory.

        Returns:
            Whether all is done. If not, training may go on, and `finish` does the rest on another thread.

        Raises:
            NotSavedError: what a rank met.
        """
        for _ in range(2):  # shards that are not those of the last save are laid out anew
            try:
                if self._open(engine, wait) and self._take_snapshot(engine):
                    return False
                self.finish(engine)
                return True
            except LayoutChangedError:
                self._kept.layout = self._kept.snapshot = None
        raise RuntimeError("the engine's shards are never the same twice")

    @phase(Phase.SAVING)
    def finish(self, engine: EngineState | None = None) -> None:
        """Writes and publishes; then removes what is not to stay.

        Args:
            engine: Its values are written; None: those of the snapshot.

        Raises:
            NotSavedError: what a rank met.
            LayoutChangedError: the engine's shards are not those laid out, on some rank.
        """
        began = time.perf_counter()
        try:
            self._write(engine)
            self._publish()
        finally:
            self.write_seconds = time.perf_counter() - began
        self._kept.frozen = self._files.frozen
        log.info("saved %s", self._final)
        if self._published is not None:
            self._pruner.prune(self._published)

    def _open(self, engine: EngineState, wait: bool) -> bool:
        """Makes the folder and looks for room; whether a snapshot is wanted and finds some in memory."""
        if self._kept.layout is None:
            self._kept.layout = Layout.of(engine.shards())
        layout = self._kept.layout
        problem, disk = None, layout.num_bytes + ROW_BYTES * len(layout.shards)
        if self._kept.frozen is not None:
            disk -= self._kept.frozen.record.bytes  # it will be a link; where it cannot be, writing will tell
        disk_free = disk  # not known: writing will tell
        if self._peers.is_leader:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                clear_partial(self._folder)
                self._partial.mkdir()
                disk_free = shutil.disk_usage(self._folder).free
            except OSError as error:
                problem = self._peers.describe(error)
        memory = 0 if wait or self._kept.snapshot is not None else layout.num_bytes
        own = Room(self._peers.host, disk, disk_free, memory, available_memory())
        said = self._peers.gather((self.fields, own, problem))
        rooms = [room for _, room, _ in said]
        self.fields = said[0][0]  # every machine's manifest is the same to the last byte
        self._agree(first(wrong for *_, wrong in said) or self._peers.lack_of_disk(rooms, self._folder))
        return not wait and self._fits_in_memory(lack_of_memory(rooms))

    def _take_snapshot(self, engine: EngineState) -> bool:
        """Copies the values of the engine; False: some rank has no memory for it, so none keeps a copy."""
        kept, problem, changed = self._kept, None, False
        assert kept.layout is not None
        shards = iter(engine.shards())
        try:
            if kept.snapshot is None:
                kept.snapshot = Snapshot(kept.layout, kept.device)
            kept.snapshot.fill(shards)
        except LayoutChangedError:
            changed = True
        except MemoryError as error:
            reason, _, _ = str(error).partition("\n")
            problem = f"{self._peers.host}: {reason}"
        finally:
            for _ in shards:  # fetching them may be collective
                pass
        if self._fits_in_memory(self._exchange(problem, changed)):
            assert kept.snapshot is not None
            engine.hold_step(kept.snapshot.hold_device)
            return True
        kept.snapshot = None
        return False

    def _fits_in_memory(self, problem: str | None) -> bool:
        if problem is not None and not self._kept.has_warned:
            self._kept.has_warned = True
            log.warning("training stands still while checkpoints are written: %s", problem)
        return problem is None

    def _write(self, engine: EngineState | None) -> None:
        """Writes this rank's files, and hears how it went on the others."""
        layout, snapshot = self._kept.layout, self._kept.snapshot
        assert layout is not None
        self._files = RankFiles(self._partial, self._final, self._peers, self._kept.frozen)
        shards = iter(() if engine is None else engine.shards())
        problem, changed = None, False
        try:
            if engine is None:
                assert snapshot is not None
                self._files.write(layout, snapshot.views(), lasting=True)
            else:
                self._files.write(layout, streamed(layout, shards), lasting=False)
            for _ in shards:
                raise LayoutChangedError("more shards than before")
        except LayoutChangedError:
            changed, self._kept.frozen = True, None
        except OSError as error:
            problem = self._peers.describe(error)
        for _ in shards:  # fetching them may be collective
            pass
        self._agree(self._exchange(problem, changed))

    def _publish(self) -> None:
        """Every machine gets table and manifest, and the checkpoint its name."""
        records = [file.record for file in self._files.written]
        own = ShardTable.of(shard for file in self._files.written for shard in file.shards)
        collected = self._peers.collect((records, own))
        files = [record for records, _ in collected for record in records]
        table = ShardTable.joined([part for _, part in collected])
        del collected  # a thousand ranks' parts are as much again
        self._agree(first(self._peers.attempt(lambda: self._rename(files, table))))
        if self._peers.is_leader:
            # Only now: where another machine could not publish, it would have had to come back.
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _rename(self, files: list[FileRecord], table: ShardTable) -> None:
        content = table.encode()
        try:
            fields = self.fields | {"files": tuple(files), "shard_table": TableRecord.of(content)}
            manifest = Manifest.with_table(table, self._final, **fields)
        except ValueError as error:  # an engine's mistake: better told now than when it is to be read
            raise OSError(errno.EINVAL, f"the shares do not add up: {error}") from error
        sealed = manifest.encode()
        if sum(map(len, content)) > MAX_TABLE_BYTES or len(sealed) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{len(table)} shards of {len(files)} files are too many to be read")
        write_durably(self._partial / TABLE, *content)
        write_durably(self._partial / MANIFEST, sealed)
        if os.path.lexists(self._final):  # of a step that this run, gone on from an earlier one, now repeats
            self._final.rename(self._replaced)
        publish_folder(self._partial, self._final)
        self._published = manifest

    def _exchange(self, problem: str | None, changed: bool) -> str | None:
        """The first problem of any rank.

        Args:
            changed: The shards are not those laid out.

        Raises:
            LayoutChangedError: so it is on some rank.
        """
        said = self._peers.gather((problem, changed))
        if any(changed for _, changed in said):
            raise LayoutChangedError("on some rank")
        return first(problem for problem, _ in said)

    def _agree(self, problem: str | None) -> None:
        """Ends the save, and leaves nothing of it, where all have heard of a problem."""
        if problem is None:
            return
        if self._peers.is_leader:
            try:
                if self._published is not None:  # another machine could not: no machine has it
                    remove(self._final)
                shutil.rmtree(self._partial, ignore_errors=True)
                if self._replaced.exists():
                    self._replaced.rename(self._final)
            except OSError as error:
                log.warning("%s cannot be removed: %s", self._partial, error)
        raise NotSavedError(problem)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save went; the same on every rank but for the times, which are this rank's."""

    step: int
    problem: str | None
    """One line; None: it is saved, or on its way."""
    stall_seconds: float
    """How long training stood still."""
    write_seconds: float | None
    """From the first byte to the rename; None: it is still being written."""


class CheckpointStore:
    """`<run_dir>/checkpoints/step-00000100/`: a file a rank, and `manifest.json`.

    While a checkpoint is written in the background, the thread that does it talks to its peers over their
    own gloo group. Such threads wait only for each other, never for a main thread, so they come to an end
    whatever collective training is in.

    Args:
        folder: Of the checkpoints; made if missing.
        retention: Which of them stay.
        job: The ranks. Collective: every rank makes its store at the same point.
        split: How the work is split, in words, for the manifest.
        host: This machine's name, for messages.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, retention: Retention, job: Job, split: str, host: str = platform.node()):
        self.folder = folder
        self._pruner = Pruner(folder, retention)
        self._split = split
        try:
            self._peers = find_peers(job, folder, host)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written: {error}; choose another run_dir") from None
        self._kept = Kept(job.device)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Filled by the thread while `poll` empties it: a list that is swapped there would lose what comes.
        self._finished: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._saved: dict[int, bool] = {}  # step -> whether its evaluation loss stands in it
        self._is_closed = False
        self.is_under_way = False
        """Whether a save is under way whose outcome `poll` has not returned."""
        self._show: Callable[[SavedCheckpoints], None] | None = None

    def shown_to(self, show: Callable[[SavedCheckpoints], None]) -> None:
        """Has this rank show the checkpoints that count now, and whenever they change: on any thread."""
        self._show = show
        self._changed()

    def _changed(self) -> None:
        if self._show is not None:
            self._show(self._pruner.saved())

    def prepare(self, engine: EngineState) -> None:
        """After a first step, where saves in the background will come: takes their memory. Collective."""
        prepare(engine, self._peers, self._kept)

    def hold_device(self) -> None:
        """The device goes on once it has copied what is being saved, whoever changes it next."""
        if self._kept.snapshot is not None:
            self._kept.snapshot.hold_device()

    def save(self, engine: EngineState, state: dict[str, Any], wait: bool = False) -> SaveOutcome:
        """Saves, and removes what the policy does not keep. Collective. One save is under way at a time.

        Training stands still for a copy to host memory, from a GPU for the start of one that the next step
        waits for; a background thread does the rest. Where memory is short or `wait` is set, it stands still
        until all is on the disk.

        Args:
            state: JSON values; `global_step`, and `eval_loss` where there is one to choose the best by.

        Returns:
            How it went: what the system refuses (a full disk) does not end the run. Of a save in the
            background only the start is known.
        """
        started = time.perf_counter()
        self.wait()
        self.is_under_way = True
        step = int(state["global_step"])
        if self._saved.get(step, False) or (step in self._saved and state.get("eval_loss") is None):
            return SaveOutcome(step, None, time.perf_counter() - started, 0.0)
        fields = {"split": self._split, "state": json.loads(json.dumps(state)), "scalars": engine.scalars()}
        save = Save(
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
        outcome = self._ended(save, SaveOutcome(step, problem, stall, save.write_seconds))
        if problem is None and not wait:
            self._finished.put(outcome)
        return outcome

    def save_final(self, engine: EngineState, state: dict[str, Any]) -> SaveOutcome:
        """As save with `wait`, for the end of a run.

        Raises:
            CheckpointError: it is not saved.
        """
        outcome = self.save(engine, state, wait=True)
        if outcome.problem is not None:
            raise CheckpointError(outcome.problem)
        return outcome

    def poll(self) -> list[SaveOutcome]:
        """Saves without `wait` that ended since the last call. Does not wait; not collective."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        self.is_under_way = self._thread is not None
        return [self._finished.get() for _ in range(self._finished.qsize())]

    def close(self) -> None:
        """Waits for the save under way, and gives back what a store holds. Before the process group ends."""
        try:
            self.wait()
        finally:
            if not self._is_closed:
                self._peers.close()
            self._is_closed = True

    def wait(self) -> None:
        """For the save under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _finish_beside(self, save: Save, outcome: SaveOutcome) -> None:
        """The rest of a save, on a thread of its own."""

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
            self._finished.put(self._ended(save, ended))

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()

    def _ended(self, save: Save, outcome: SaveOutcome) -> SaveOutcome:
        if outcome.problem is None:
            self._saved[outcome.step] = save.fields["state"].get("eval_loss") is not None
            self._changed()
            return outcome
        line = f"step {outcome.step} is not saved: {outcome.problem}; the checkpoints before it are intact"
        log.warning("%s", line)
        return replace(outcome, problem=line)

    def choose(self) -> Manifest | None:
        """The newest checkpoint that verifies on all machines; says what it passes over, and why. Collective.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        manifest, bad = newest_whole(self.folder, self._peers)
        self._pruner.bad |= bad
        if manifest is not None:
            log.info("going on with %s from %s", self.folder.parent, manifest.folder.name)
        return manifest

    @phase(Phase.RESUMING)
    def restore(self, engine: EngineState, manifest: Manifest) -> dict[str, Any]:
        """Fills the engine from what `choose` gave; what `save` was given. Collective."""
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

    def go_back(self, engine: EngineState, until: int) -> dict[str, Any] | None:
        """The newest whole checkpoint of a step up to `until`, and none after it from now on. Collective.

        Returns:
            What `save` was given; None: there is no such checkpoint, and nothing was changed.
        """
        self.wait()
        manifest, _ = newest_whole(self.folder, self._peers, until)
        if manifest is None:
            return None
        state = self.restore(engine, manifest)
        for problem in filter(
            None, self._peers.attempt(partial(remove_after, self.folder, manifest.global_step))
        ):
            log.warning("later checkpoints stay: %s", problem)
        self._saved = {step: known for step, known in self._saved.items() if step <= manifest.global_step}
        self._changed()
        return state

    def distrust_after(self, step: int) -> None:
        """Sets checkpoints of later steps aside. Collective."""
        self.wait()
        for problem in filter(None, self._peers.attempt(partial(set_aside_after, self.folder, step))):
            log.warning("checkpoints after step %d are not to be trusted, and stay: %s", step, problem)
        self._changed()

    def resume(self, engine: EngineState) -> dict[str, Any] | None:
        """`choose` and `restore`; None: there is no checkpoint. Collective."""
        manifest = self.choose()
        return None if manifest is None else self.restore(engine, manifest)
