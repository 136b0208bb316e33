"""One save: room looked for, each rank's share written, one manifest, one rename. Collective throughout.

Every step ends in an exchange, so that what one rank met all know: nobody waits for a rank that gave up.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from pipeline.checkpoint.files import LayoutChangedError, hash_views, write_durably, write_file
from pipeline.checkpoint.folders import PARTIAL, REPLACED, clear_partial, folder_name, remove
from pipeline.checkpoint.layout import Layout
from pipeline.checkpoint.manifest import (
    MANIFEST,
    MAX_BYTES,
    MAX_TABLE_BYTES,
    TABLE,
    FileRecord,
    Manifest,
    TableRecord,
)
from pipeline.checkpoint.peers import Peers
from pipeline.checkpoint.table import ROW_BYTES, ShardTable
from pipeline.durable import synchronise
from pipeline.shards import Scalars, Shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """How a rank's part of a save went: what all are told."""

    problem: str | None
    layout_changed: bool = False


@dataclass(frozen=True)
class FrozenFile:
    """What nobody trains, as the last checkpoint has it: the next one has the same file, by a hard link."""

    path: Path
    record: FileRecord
    shards: tuple[Shard, ...]
    """With checksums."""


@dataclass(frozen=True)
class Content:
    """What stands in the manifest besides the files."""

    step: int
    split: str
    state: dict[str, Any]
    scalars: Scalars


@dataclass(frozen=True)
class Opening:
    """What a rank tells the others first: what it asks of its machine, and what it sees there."""

    content: Content
    """Rank 0's counts: every machine's manifest is the same to the last byte."""
    host: str
    disk: int
    disk_free: int
    memory: int
    """Host memory that a snapshot would take."""
    memory_free: int
    problem: str | None


class Saving:
    """One save of one step, under a folder of checkpoints."""

    def __init__(self, folder: Path, content: Content, peers: Peers, frozen: FrozenFile | None = None):
        self.folder = folder
        self.content = content
        self.peers = peers
        self.final = folder / folder_name(content.step)
        self.partial = folder / f"{self.final.name}{PARTIAL}"
        self._replaced = folder / f"{self.final.name}{REPLACED}"
        self.published: Manifest | None = None
        self.frozen = frozen
        self._written: list[tuple[FileRecord, ShardTable]] = []

    def begin(self, layout: Layout, memory: int, memory_free: int) -> tuple[str | None, str | None]:
        """Makes the folder and looks for room, on disk and in memory.

        Args:
            memory: Bytes of host memory that a snapshot would take.

        Returns:
            Why nothing can be written, and why not in the background; None: it can.
        """
        problem, disk = None, layout.num_bytes + ROW_BYTES * len(layout.shards)
        disk_free = disk  # not known: writing will tell
        if self.peers.is_leader:
            try:
                self._make_folder()
                disk_free = shutil.disk_usage(self.folder).free
            except OSError as error:
                problem = self.peers.describe(error)
        openings = self.peers.gather(
            Opening(self.content, self.peers.host, disk, disk_free, memory, memory_free, problem)
        )
        self.content = openings[0].content
        problem = first(opening.problem for opening in openings) or self._room_on_disk(openings)
        if problem is not None and self.peers.is_leader:
            self._withdraw()
        return problem, _room_in_memory(openings)

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        clear_partial(self.folder)
        self.partial.mkdir()

    def _room_on_disk(self, openings: list[Opening]) -> str | None:
        leaders = self.peers.leaders
        for leader in sorted(set(leaders)):
            at = openings[leader]
            needed = sum(
                opening.disk for opening, its in zip(openings, leaders, strict=True) if its == leader
            )
            if needed > at.disk_free:
                return (
                    f"{self.folder} on {at.host} has {at.disk_free / 1e9:.3g} GB free and a checkpoint takes "
                    f"{needed / 1e9:.3g} GB; make room, or lower checkpoint.keep_last"
                )
        return None

    def write(
        self,
        layout: Layout,
        values: Iterable[Iterable[memoryview]],
        rest: Iterator[Shard],
        lasting: bool = False,
    ) -> list[Share]:
        """Writes this rank's share; how it went on every rank.

        Args:
            values: The bytes of each shard.
            lasting: See write_file.
            rest: Gone through to the end even where writing failed: fetching shards may be collective.
        """
        share = Share(None)
        try:
            if layout.shards:
                self._write_share(layout, iter(values), lasting)
            for _ in rest:
                raise LayoutChangedError("more shards than before")
        except LayoutChangedError as error:
            share = Share(f"the engine's shards changed: {error}", layout_changed=True)
        except OSError as error:
            share = Share(self.peers.describe(error))
        for _ in rest:
            pass
        return self.peers.gather(share)

    def _write_share(self, layout: Layout, values: Iterator[Iterable[memoryview]], lasting: bool) -> None:
        frozen = list(takewhile(lambda shard: shard.is_frozen, layout.shards))  # engines give them first
        stem = f"rank-{self.peers.rank:05d}"
        if frozen:
            path, part = self.partial / f"{stem}.frozen.safetensors", Layout.of(frozen)
            own: Iterable[Iterable[memoryview]] = islice(values, len(frozen))
            own = list(own) if lasting else own
            written = self._linked(path, part, own, lasting) or self._write(path, part, own, lasting)
            self.frozen = FrozenFile(self.final / path.name, *written)
        else:
            self.frozen = None
        rest = layout.shards[len(frozen) :]
        if rest:
            self._write(self.partial / f"{stem}.safetensors", Layout.of(rest), values, lasting)

    def _linked(
        self, path: Path, layout: Layout, values: Iterable[Iterable[memoryview]], lasting: bool
    ) -> tuple[FileRecord, tuple[Shard, ...]] | None:
        """The last checkpoint's file, linked, if it has the same values; None: it is to be written.

        Raises:
            LayoutChangedError: it is to be written, and the values have been taken.
        """
        known = self.frozen
        if known is None or known.shards != layout.shards:
            return None
        pairs = zip(values, known.shards, strict=True)
        if all(hash_views(views).hexdigest() == shard.checksum for views, shard in pairs):
            with suppress(OSError):  # a file system without links, or the file is gone
                os.link(known.path, path)
                self._written.append((known.record, ShardTable.of(known.shards)))
                return known.record, known.shards
        if not lasting:
            raise LayoutChangedError("what is frozen")
        return None

    def _write(
        self, path: Path, layout: Layout, values: Iterable[Iterable[memoryview]], lasting: bool
    ) -> tuple[FileRecord, tuple[Shard, ...]]:
        sums = write_file(path, layout, values, lasting)
        record = FileRecord(
            name=path.name,
            rank=self.peers.rank,
            host=self.peers.host,
            place=self.peers.leader,
            bytes=layout.num_bytes,
            xxh3_128=sums.xxh3_128,
            shards=len(layout.shards),
        )
        shards = tuple(map(Shard.described, layout.shards, sums.shards))
        self._written.append((record, ShardTable.of(shards)))
        return record, shards

    def conclude(self, shares: list[Share]) -> str | None:
        """Publishes the checkpoint where every share is good, else removes it.

        Returns:
            Why there is none; None: it counts from now on.
        """
        problem = first([share.problem for share in shares])
        if problem is None:
            written = [each for own in self.peers.collect(self._written) for each in own]
            files, table = [record for record, _ in written], ShardTable.joined([part for _, part in written])
            del written  # a thousand ranks' parts are as much again
            problem = first(self.peers.attempt(lambda: self._publish(files, table)))
        if self.peers.is_leader:
            if problem is not None:
                self._withdraw()
            else:  # only now: where another machine could not publish, it would have had to come back
                shutil.rmtree(self._replaced, ignore_errors=True)
        return problem

    def _publish(self, files: list[FileRecord], table: ShardTable) -> None:
        content = table.encode()
        try:
            manifest = Manifest.with_table(
                table,
                self.final,
                global_step=self.content.step,
                world_size=len(self.peers.leaders),
                split=self.content.split,
                state=self.content.state,
                scalars=self.content.scalars,
                files=tuple(files),
                shard_table=TableRecord.of(content),
            )
        except ValueError as error:  # an engine's mistake: better told now than when it is to be read
            raise OSError(errno.EINVAL, f"the shares do not add up: {error}") from error
        sealed = manifest.encode()
        if sum(map(len, content)) > MAX_TABLE_BYTES or len(sealed) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{len(table)} shards of {len(files)} ranks are too many to be read")
        write_durably(self.partial / TABLE, *content)
        write_durably(self.partial / MANIFEST, sealed)
        synchronise(self.partial)
        if os.path.lexists(self.final):  # of a step that this run, gone on from an earlier one, now repeats
            self.final.rename(self._replaced)
        self.partial.rename(self.final)
        self.published = manifest
        synchronise(self.folder)

    def _withdraw(self) -> None:
        try:
            if self.published is not None:  # another machine could not: no machine has it
                remove(self.final)
            shutil.rmtree(self.partial, ignore_errors=True)
            if self._replaced.exists():
                self._replaced.rename(self.final)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self.partial, error)


def first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _room_in_memory(openings: list[Opening]) -> str | None:
    for host in dict.fromkeys(opening.host for opening in openings):
        there = [opening for opening in openings if opening.host == host]
        needed = sum(opening.memory for opening in there)
        free = min(opening.memory_free for opening in there)
        if needed > 0.9 * free:  # what else runs on the machine needs some too
            return f"{host} has {free / 1e9:.3g} GB of memory free, a copy takes {needed / 1e9:.3g} GB"
    return None
