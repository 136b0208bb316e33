"""`manifest.json`: what a checkpoint holds, checked in full before anything that it points to is opened.

It has its own checksum and is closed: an unknown key, a path that is more than a file name, a region outside
its tensor are refused. Its presence under the checkpoint's final name is what makes a checkpoint count.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.checkpoint.files import opened, read_exactly
from pipeline.checkpoint.layout import DTYPE_NAMES, DTYPES, Layout
from pipeline.errors import CheckpointError
from pipeline.shards import Region, Shard

MANIFEST = "manifest.json"
FORMAT = 1
MAX_BYTES = 1 << 30  # a manifest of a million shards has a fifth of this

Count = Annotated[int, Field(ge=0)]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Piece(Closed):
    """A shard in a file: which values of which tensor."""

    name: str
    kind: str
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    shape: tuple[Count, ...]
    box: tuple[tuple[Count, Count], ...] | None
    start: Count
    length: Count
    xxh3_64: str = Field(pattern="^[0-9a-f]{16}$")

    @model_validator(mode="after")
    def _lies_inside(self) -> Piece:
        if self.box is None:
            size = math.prod(self.shape)
        else:
            inside = len(self.box) == len(self.shape) and all(
                start <= stop <= extent for (start, stop), extent in zip(self.box, self.shape, strict=True)
            )
            if not inside:
                raise ValueError(f"{self.kind} of {self.name}: box {self.box} outside shape {self.shape}")
            size = math.prod(stop - start for start, stop in self.box)
        if self.start + self.length > size:
            raise ValueError(
                f"{self.kind} of {self.name}: values {self.start} to {self.start + self.length} of {size}"
            )
        return self

    @property
    def shard(self) -> Shard:
        return Shard(self.name, self.kind, self.region, DTYPES[self.dtype], checksum=self.xxh3_64)

    @property
    def region(self) -> Region:
        return Region(self.shape, self.box, self.start, self.length)

    @property
    def title(self) -> str:
        return f"{self.kind} of {self.name}"

    @staticmethod
    def of(shard: Shard, checksum: str) -> Piece:
        at = shard.region
        return Piece(
            name=shard.name,
            kind=shard.kind,
            dtype=DTYPE_NAMES[shard.dtype],
            shape=at.shape,
            box=at.box,
            start=at.start,
            length=at.length,
            xxh3_64=checksum,
        )


class FileRecord(Closed):
    """One file, the machine that wrote it, and its shards in order."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$")
    rank: Count
    host: str
    place: Count
    """The lowest rank on the file system that it was written to: files of one place lie side by side."""
    bytes: Count
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")
    fragments: tuple[Piece, ...]

    @model_validator(mode="after")
    def _has_its_size(self) -> FileRecord:
        if self.layout.num_bytes != self.bytes:
            raise ValueError(f"{self.name}: {self.bytes} bytes for fragments of {self.layout.num_bytes}")
        return self

    @cached_property
    def layout(self) -> Layout:
        """The header and offsets that follow from the shards."""
        return Layout.of(piece.shard for piece in self.fragments)


class Manifest(Closed):
    """Everything a checkpoint says of itself."""

    global_step: Count
    world_size: Count
    split: str
    state: dict[str, Any]
    """What the training loop remembers; JSON values."""
    scalars: dict[str, bool | int | float]
    """Of the engine: the same on all ranks."""
    files: tuple[FileRecord, ...]

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        names = [file.name for file in self.files]
        if len(set(names)) < len(names):
            raise ValueError("a file is listed twice")
        tensors: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.pieces():
            tensors.setdefault((piece.name, piece.kind), []).append(piece)
        for pieces in tensors.values():
            _check_cover(pieces)
        return self

    def pieces(self) -> list[Piece]:
        return [piece for file in self.files for piece in file.fragments]

    @cached_property
    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """(name, kind) -> shape of the whole tensor."""
        return {(piece.name, piece.kind): piece.shape for piece in reversed(self.pieces())}

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def encode(self) -> bytes:
        """The file's content. Deterministic."""
        head = json.dumps(self.model_dump(exclude={"files"}), separators=(",", ":"))
        # A file at a time: one call for all would hold the interpreter, and training with it, for a second.
        files = ",".join(file.model_dump_json() for file in self.files)
        content = f'{head[:-1]},"files":[{files}]}}'.encode()
        return _wrap(content, xxhash.xxh3_128_hexdigest(content))


def _check_cover(pieces: list[Piece]) -> None:
    """Each value of a tensor comes once.

    Raises:
        ValueError: the pieces are of different shapes, overlap, or leave values out.
    """
    first, boxes = pieces[0], defaultdict[Any, list[Piece]](list)
    for piece in pieces:
        if piece.shape != first.shape:
            raise ValueError(f"{first.title} has shapes {first.shape} and {piece.shape}")
        if piece.length:
            boxes[piece.box or tuple((0, extent) for extent in piece.shape)].append(piece)
    for among in boxes.values():
        among.sort(key=lambda piece: piece.start)
        if any(a.start + a.length > b.start for a, b in pairwise(among)):
            raise ValueError(f"{first.title} has values that are in two places")
    for one, other in combinations(boxes, 2):
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
            raise ValueError(f"{first.title} has boxes {one} and {other}, which overlap")
    counted, size = sum(piece.length for piece in pieces), math.prod(first.shape)
    if counted != size:
        raise ValueError(f"{first.title}: {counted} values of {size} are in the files")


def _wrap(content: bytes, checksum: str) -> bytes:
    start = f'{{"format":{FORMAT},"xxh3_128":"{checksum}","manifest":'
    return start.encode() + content + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, of another format, or does not hold together.
    """
    path = folder / MANIFEST
    try:
        with opened(path) as descriptor:
            raw = bytearray(min(path.stat().st_size, MAX_BYTES))
            read_exactly(descriptor, 0, memoryview(raw))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is not complete") from None
    return decode(bytes(raw), path)


def decode(raw: bytes, path: Path) -> Manifest:
    """As read_manifest, from the file's content; `path` is for the message."""
    damaged = f"{path} is damaged: its checksum does not match; go on from another checkpoint"
    try:
        tree = json.loads(raw)
        found = tree["format"]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise CheckpointError(damaged) from None
    if found != FORMAT or type(found) is not int:
        raise CheckpointError(
            f"{path} is in checkpoint format {str(found)[:20]}, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    del tree
    content = raw[len(_wrap(b"", "0" * 32)) - 2 : -2]
    # To the last byte: a flipped bit outside the content is found too.
    if _wrap(content, xxhash.xxh3_128_hexdigest(content)) != raw:
        raise CheckpointError(damaged)
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {place or 'manifest'}: {first['msg']}"[:500]) from None
