"""`manifest.json`: what a checkpoint says of itself, and beside it the table of its shards.

Both are checked in full before anything that they point to is opened. The manifest has its own checksum and
the table's, and is closed: an unknown key, a path that is more than a file name are refused. Its presence
under the checkpoint's final name is what makes a checkpoint count.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from pipeline.checkpoint.shard_file import DTYPES, Layout, opened, read_exactly
from pipeline.checkpoint.table import ShardTable
from pipeline.errors import CheckpointError
from pipeline.shards import Box, Region, Shard

MANIFEST, TABLE = "manifest.json", "shards.safetensors"
FORMAT = 2
MAX_BYTES = 1 << 30
MAX_TABLE_BYTES = 1 << 33  # of 250 million shards

Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(Closed):
    """One file, and the machine that wrote it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$")
    rank: Count
    host: str
    place: Count
    """The lowest rank on the file system that it was written to: files of one place lie side by side."""
    bytes: Count
    xxh3_128: Checksum
    shards: Count
    """So many rows of the table, in the order of files."""


class TableRecord(Closed):
    """The file with the table of all shards."""

    bytes: Count
    xxh3_128: Checksum

    @staticmethod
    def of(content: list[memoryview]) -> TableRecord:
        """Of the parts of an encoded table."""
        checksum = xxhash.xxh3_128()
        for part in content:
            checksum.update(part)
        return TableRecord(bytes=sum(map(len, content)), xxh3_128=checksum.hexdigest())


class Summary(Closed):
    """What a checkpoint says of itself besides its files."""

    global_step: Count
    world_size: Count
    split: str
    state: dict[str, Any]
    """What the training loop remembers; JSON values."""
    scalars: dict[str, bool | int | float]
    """Of the engine: the same on all ranks."""


@dataclass(frozen=True)
class BestBy:
    """The metric of an evaluation that chooses the best checkpoint."""

    metric: str
    """Its name without `eval/`."""
    value: float
    is_lowest: bool
    """Whether the lowest value is the best."""

    @property
    def rank(self) -> float:
        """Order of checkpoints by this metric. The lowest is the best."""
        return self.value if self.is_lowest else -self.value


class Manifest(Summary):
    """Everything a checkpoint says of itself."""

    files: tuple[FileRecord, ...]
    shard_table: TableRecord | None
    """None: of format 1, where the manifest has the shards."""

    _folder: Path = PrivateAttr()
    _table: ShardTable | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _has_each_once(self) -> Manifest:
        names = [file.name for file in self.files]
        if len({*names, TABLE}) <= len(names):
            raise ValueError("a file is listed twice")
        return self

    @staticmethod
    def with_table(table: ShardTable, folder: Path, **fields: Any) -> Manifest:
        """A manifest whose table is known.

        Raises:
            ValueError: the table does not hold together, or not with the files.
        """
        manifest = Manifest(**fields)
        manifest._folder, manifest._table = folder, manifest._checked(table)
        return manifest

    @property
    def folder(self) -> Path:
        """The checkpoint's, with its other files."""
        return self._folder

    def _checked(self, table: ShardTable) -> ShardTable:
        table.check()
        if sum(file.shards for file in self.files) != len(table):
            raise ValueError("the table has other shards than the files")
        return table

    @property
    def table(self) -> ShardTable:
        """All shards, in the order of files. Read when it is first asked for.

        Raises:
            CheckpointError: the table is not there, damaged, or does not hold together.
        """
        if self._table is None:
            assert self.shard_table is not None
            path, record = self._folder / TABLE, self.shard_table
            raw = _content(path, min(record.bytes + 1, MAX_TABLE_BYTES))  # another file may have no end
            if len(raw) != record.bytes or xxhash.xxh3_128_hexdigest(raw) != record.xxh3_128:
                raise CheckpointError(
                    f"{path} is damaged: it is not what was written; go on from another checkpoint"
                )
            try:
                self._table = self._checked(ShardTable.decode(raw))
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}"[:500]) from None
        return self._table

    @cached_property
    def first_rows(self) -> list[int]:
        """Of each file, and the end, in the table."""
        return [0, *np.cumsum([file.shards for file in self.files], dtype=np.int64).tolist()]

    def shards_of(self, file: FileRecord) -> list[Shard]:
        """What a file holds, in its order."""
        first = self.first_rows[self.files.index(file)]
        return [self.table.shard(row) for row in range(first, first + file.shards)]

    def layout_of(self, file: FileRecord) -> Layout:
        """The header and offsets of a file, which follow from its shards.

        Raises:
            CheckpointError: it cannot be so long as the manifest says.
        """
        layout = Layout.of(self.shards_of(file))
        if layout.num_bytes != file.bytes:
            raise CheckpointError(
                f"{self._folder}: {file.name}: {file.bytes} bytes for shards of {layout.num_bytes}"
            )
        return layout

    @property
    def eval_loss(self) -> float | None:
        """Of the evaluation after its step; None: there was none, or its loss is infinite or NaN."""
        loss = self.state.get("eval_loss")
        return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None

    @property
    def best_by(self) -> BestBy | None:
        """What chooses the best checkpoint, measured after its step. `None`: it was not, or is not finite."""
        known = self.state.get("best_by")
        if not isinstance(known, dict):  # a checkpoint from before there was a choice
            return None if self.eval_loss is None else BestBy("loss", self.eval_loss, is_lowest=True)
        value = known.get("value")
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return BestBy(str(known.get("metric")), float(value), is_lowest=known.get("mode") == "min")

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def encode(self) -> bytes:
        """The file's content. Deterministic."""
        content = json.dumps(self.model_dump(), separators=(",", ":")).encode()
        return _wrap(FORMAT, content)


def _wrap(version: int, content: bytes) -> bytes:
    checksum = xxhash.xxh3_128_hexdigest(content)
    return f'{{"format":{version},"xxh3_128":"{checksum}","manifest":'.encode() + content + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, of another format, or does not hold together.
    """
    return decode(_content(folder / MANIFEST, MAX_BYTES), folder / MANIFEST)


def _content(path: Path, at_most: int) -> bytearray:
    try:
        with opened(path) as descriptor:
            raw = bytearray(min(path.stat().st_size, at_most))
            read_exactly(descriptor, 0, memoryview(raw))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is not complete") from None
    return raw


def decode(raw: bytes | bytearray, path: Path) -> Manifest:
    """As read_manifest, from the file's content; `path` is where it lies."""
    damaged = f"{path} is damaged: its checksum does not match; go on from another checkpoint"
    try:
        tree = json.loads(raw)
        found = tree["format"]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise CheckpointError(damaged) from None
    if found not in (1, FORMAT) or type(found) is not int:
        raise CheckpointError(
            f"{path} is in checkpoint format {str(found)[:20]}, this version reads 1 to {FORMAT}; "
            "use the version that wrote it"
        )
    del tree
    content = bytes(raw[len(_wrap(found, b"")) - 2 : -2])
    # To the last byte: a flipped bit outside the content is found too.
    if _wrap(found, content) != raw:
        raise CheckpointError(damaged)
    try:
        if found == 1:
            return _of_format_1(content, path.parent)
        manifest = Manifest.model_validate_json(content)
        if manifest.shard_table is None:
            raise ValueError("it names no table")
        manifest._folder = path.parent
        return manifest
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {place or 'manifest'}: {first['msg']}"[:500]) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: manifest: {error}"[:500]) from None


class Fragment1(Closed):
    """A shard, as format 1 has it in the manifest."""

    name: str
    kind: str
    dtype: str
    shape: tuple[Count, ...]
    box: Box | None
    start: Count
    length: Count
    xxh3_64: str = Field(pattern="^[0-9a-f]{16}$")

    def shard(self) -> Shard:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.kind} of {self.name}: dtype {self.dtype:.20} is not known")
        region = Region(self.shape, self.box, self.start, self.length)
        return Shard(self.name, self.kind, region, DTYPES[self.dtype], checksum=self.xxh3_64)


class File1(FileRecord):
    """A file of format 1."""

    shards: Count = 0
    fragments: tuple[Fragment1, ...]


class Manifest1(Summary):
    """What manifest.json was in format 1."""

    files: tuple[File1, ...]


def _of_format_1(content: bytes, folder: Path) -> Manifest:
    """In the words of this version."""
    old = Manifest1.model_validate_json(content)
    fields = {name: getattr(old, name) for name in Summary.model_fields}
    files = tuple(
        FileRecord(**file.model_dump(exclude={"fragments", "shards"}), shards=len(file.fragments))
        for file in old.files
    )
    try:
        table = ShardTable.of(fragment.shard() for file in old.files for fragment in file.fragments)
    except OverflowError:
        raise ValueError("a shard's numbers are too large") from None
    return Manifest.with_table(table, folder, files=files, shard_table=None, **fields)
