"""The files that one rank writes: what nobody trains in one of its own, written once, and the rest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from pipeline.checkpoint.manifest import FileRecord
from pipeline.checkpoint.peers import Peers
from pipeline.checkpoint.shard_file import Layout, LayoutChangedError, hash_views, write_file
from pipeline.shards import Shard

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
