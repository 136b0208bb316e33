"""One save from top to bottom: room, snapshot, files, publication, what may go. Collective throughout.

Every step ends in an exchange, so that what one rank met all know: nobody waits for a rank that gave up.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from pipeline.checkpoint.rank_files import RankFiles, WrittenFile
from pipeline.checkpoint.shard_file import Layout, LayoutChangedError
from pipeline.checkpoint.snapshot import Snapshot, streamed
from pipeline.distributed.machine import available_memory
from pipeline.durable import synchronise, write_durably
from pipeline.shards import EngineState

log = logging.getLogger(__name__)


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
        synchronise(self._partial)
        if os.path.lexists(self._final):  # of a step that this run, gone on from an earlier one, now repeats
            self._final.rename(self._replaced)
        self._partial.rename(self._final)
        self._published = manifest
        synchronise(self._folder)

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
