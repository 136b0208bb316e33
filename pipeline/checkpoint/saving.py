"""One save from top to bottom: room, snapshot, the files of this rank, publication, what may go. Collective.

Every step ends in an exchange, so that all ranks know what one rank met: nobody waits for a rank that gave
up. Values reach the disk one at a time, or from a copy in host memory that is written while training goes
on.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.catalog import PARTIAL, REPLACED, Pruner, clear_partial, folder_name, remove
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
from pipeline.checkpoint.peers import Peers, Room, first, lack_of_memory
from pipeline.checkpoint.shard_file import Layout, LayoutChangedError, as_bytes, hash_views, write_file
from pipeline.checkpoint.shards import BUFFER, EngineState, Shard
from pipeline.distributed.machine import available_memory
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import one_line
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


log = logging.getLogger(__name__)

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
