"""Writes checkpoints without a store, damages them, and plants malicious pickles in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.checkpoint.manifest import (
    MANIFEST,
    TABLE,
    FileRecord,
    Manifest,
    ShardTable,
    make_table_record,
    read_manifest,
)
from pipeline.checkpoint.reader import Damage, check_content, check_file_sizes
from pipeline.checkpoint.shard_file import FileLayout, write_file
from pipeline.checkpoint.shards import Shard
from pipeline.checkpoint.store import stream_shards
from pipeline.errors import CheckpointError


def write_checkpoint(folder: Path, engines: Sequence[Any], **changes: Any) -> Manifest:
    """Write a checkpoint of one file per engine (plain_engine.PlainEngine), and return its manifest.

    Args:
        changes: Fields of the manifest with other values.
    """
    files = []
    shards: list[Shard] = []
    for engine in engines:
        layout = FileLayout.of(engine.shards())
        path = folder / f"rank-{engine.rank:05d}.safetensors"
        sums = write_file(path, layout, stream_shards(layout, iter(engine.shards())))
        shards += map(Shard.without_values, layout.shards, sums.shards)
        files.append(
            FileRecord(
                name=path.name,
                rank=engine.rank,
                host=f"node{engine.rank}",
                place=0,
                bytes=layout.num_bytes,
                xxh3_128=sums.xxh3_128,
                shards=len(layout.shards),
            )
        )
    scalars = engines[0].scalars()
    fields = {"global_step": 1, "world_size": len(engines), "split": "plain", "state": {"samples_seen": 3}}
    table = ShardTable.of(shards)
    content = table.encode()
    fields |= {"scalars": scalars, "files": tuple(files), "shard_table": make_table_record(content)}
    manifest = Manifest.with_table(table, folder, **fields | changes)
    (folder / TABLE).write_bytes(content)
    (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest


def verify(folder: Path) -> list[Damage]:
    """Read every byte of a checkpoint, and return the damages found."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    return check_file_sizes(manifest) or check_content(manifest)


def flip_last_bit(path: Path) -> None:
    """Flip the lowest bit of the file's last byte; in a checkpoint's file it belongs to the last tensor."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class MaliciousPickle:
    """Runs a shell command when it is unpickled: it creates the file `target`."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.target}",)
