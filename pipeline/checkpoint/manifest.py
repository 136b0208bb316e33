"""Reads, writes and checks `manifest.json` and the table of shards of a checkpoint.

Both are checked in full before any file that they name is opened: shards must lie inside their tensors, and
together contain each value exactly once. The manifest contains its own checksum, the table's, and one for
each file. An unknown key and a path that is more than a file name are refused. A checkpoint counts once its
manifest has its final name.

The table has a few columns and one row for each shard, because a thousand ranks write two million shards, too
many for JSON. On the disk it is a safetensors file with 32 bytes for each shard, and the tensors' names.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load, save

from pipeline.checkpoint.shard_file import DTYPE_NAMES, DTYPES, FileLayout, open_for_reading, read_exactly
from pipeline.checkpoint.shards import Box, Region, Shard
from pipeline.errors import CheckpointError

MANIFEST = "manifest.json"
TABLE = "shards.safetensors"
FORMAT = 2  # version of the format of manifest and table
MAX_MANIFEST_BYTES = 1 << 30
MAX_TABLE_BYTES = 1 << 33  # enough for 250 million shards
Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # xxh3_128 in hexadecimal digits
Column = npt.NDArray[Any]
COLUMNS = {"start": "<i8", "length": "<i8", "checksum": "<u8", "tensor": "<i4", "box": "<i4"}
"""Dtype of each column of the table: `start` and `length` as in Region, in values; `checksum` as in Shard;
`tensor` and `box` are indices into the table's lists of tensors and boxes."""
ROW_BYTES = sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values())
NO_BOX = -1  # index of the box if a region has none, because it is a range of the whole tensor
MAX_VALUES = 1 << 62  # limit of a tensor's number of values, so that sums of two fit into int64


@dataclass(frozen=True)
class ShardTable:
    """Table with one row for each shard, in the order of the files."""

    tensors: bytes
    """JSON list of [name, kind, dtype, shape] for each tensor; the shape is that of the whole tensor."""
    boxes: bytes
    """JSON list of [[start, stop], ...] for each box."""
    columns: dict[str, Column]
    """Columns by their names in COLUMNS, each with one value for each shard."""

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    @staticmethod
    def of(shards: Iterable[Shard]) -> ShardTable:
        """Return the table of these shards, in their order."""
        tensors: dict[tuple[str, str, str, tuple[int, ...]], int] = {}  # -> index in the list of tensors
        boxes: dict[Box | None, int] = {None: NO_BOX}  # -> index in the list of boxes
        rows = []
        for shard in shards:
            region = shard.region
            checksum = int(shard.checksum or "0", 16)
            key = shard.name, shard.kind, DTYPE_NAMES[shard.dtype], region.shape
            is_whole = region.box == tuple((0, extent) for extent in region.shape)
            tensor = tensors.setdefault(key, len(tensors))
            box = boxes.setdefault(None if is_whole else region.box, len(boxes) - 1)
            rows.append((region.start, region.length, checksum, tensor, box))
        values: list[tuple[int, ...]] = list(zip(*rows, strict=True)) if rows else [()] * len(COLUMNS)
        columns = {
            name: np.array(column, dtype)
            for (name, dtype), column in zip(COLUMNS.items(), values, strict=True)
        }
        return ShardTable(_encode_json(list(tensors)), _encode_json(list(boxes)[1:]), columns)

    @staticmethod
    def concatenate(tables: Sequence[ShardTable]) -> ShardTable:
        """Return one table with the rows of all tables, in their order."""
        tensors: dict[str, int] = {}  # JSON of an entry -> its index in the joined list
        boxes: dict[str, int] = {}
        new_indices: dict[bytes, Column] = {}  # a table's list -> index of each entry in the joined list
        columns: dict[str, list[Column]] = {name: [] for name in COLUMNS}
        for table in tables:
            for encoded, joined_list in ((table.tensors, tensors), (table.boxes, boxes)):
                if encoded not in new_indices:  # most ranks have the same list, which is decoded once
                    entries = [json.dumps(entry, separators=(",", ":")) for entry in json.loads(encoded)]
                    indices = [joined_list.setdefault(entry, len(joined_list)) for entry in entries]
                    # The index NO_BOX takes the last value, and so stays NO_BOX.
                    new_indices[encoded] = np.array([*indices, NO_BOX], "<i4")
            renumbered = table.columns | {
                "tensor": new_indices[table.tensors][table.columns["tensor"]],
                "box": new_indices[table.boxes][table.columns["box"]],
            }
            for name, column in renumbered.items():
                columns[name].append(column)
        joined = {
            name: np.concatenate([np.zeros(0, dtype), *columns.pop(name)]) for name, dtype in COLUMNS.items()
        }
        return ShardTable(f"[{','.join(tensors)}]".encode(), f"[{','.join(boxes)}]".encode(), joined)

    @cached_property
    def entries(self) -> list[tuple[str, str, str, tuple[int, ...]]]:
        """List of (name, kind, dtype, shape of the whole tensor), one for each tensor."""
        return [(name, kind, dtype, tuple(shape)) for name, kind, dtype, shape in json.loads(self.tensors)]

    @cached_property
    def box_list(self) -> list[Box]:
        """List of all boxes. Whole tensors have none."""
        return [tuple((start, stop) for start, stop in box) for box in json.loads(self.boxes)]

    @cached_property
    def _box_indices(self) -> dict[Box | None, int]:
        return {None: NO_BOX, **{box: index for index, box in enumerate(self.box_list)}}

    @cached_property
    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Shape of each whole tensor by (name, kind)."""
        return {(name, kind): shape for name, kind, _, shape in reversed(self.entries)}

    @cached_property
    def _order(self) -> Column:
        """Indices of the rows, sorted by tensor, box and start."""
        groups = self._groups
        start = self.columns["start"]
        order = np.argsort(groups, kind="stable").astype(np.int32)
        # Rows are mostly in the order of starts already. Sorting by both keys takes five times as long.
        group = groups[order]
        starts = start[order]
        if ((group[1:] == group[:-1]) & (starts[1:] < starts[:-1])).any():
            order = np.lexsort((start, groups)).astype(np.int32)
        return order

    @property
    def _groups(self) -> Column:
        """Number of the group of each row. Rows of a group have the same tensor and the same box."""
        return self.columns["tensor"] * np.int64(len(self.box_list) + 1) + self.columns["box"] + 1

    @cached_property
    def _tensor_limits(self) -> Column:
        """Position in `_order` of the first row of each tensor, and the number of all rows."""
        counts = np.bincount(self.columns["tensor"], minlength=len(self.entries))
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def _tensor_indices(self) -> dict[tuple[str, str], int]:
        return {(name, kind): i for i, (name, kind, *_) in enumerate(self.entries)}

    def rows_of(self, name: str, kind: str, region: Region | None = None) -> list[int] | None:
        """Return the indices of the rows of one tensor; `None` if there is no such tensor.

        Args:
            name: Name of the tensor.
            kind: Kind of the tensor.
            region: Region to read. Rows of the region's box that do not overlap with the region are omitted;
                rows of other boxes are not. `None` for all rows.
        """
        index = self._tensor_indices.get((name, kind))
        if index is None:
            return None
        rows = self._order[self._tensor_limits[index] : self._tensor_limits[index + 1]]
        if region is not None:
            start = self.columns["start"][rows]
            stop = start + self.columns["length"][rows]
            overlaps = (start < region.start + region.length) & (region.start < stop)
            box_of_region = self._box_indices.get(region.box, NO_BOX - 1)  # if unknown, no row has it
            rows = rows[overlaps | (self.columns["box"][rows] != box_of_region)]
        return rows.tolist()

    def shard(self, row: int) -> Shard:
        """Return the shard of a row, without its values."""
        start, length, checksum, tensor, box = (int(self.columns[name][row]) for name in COLUMNS)
        name, kind, dtype, shape = self.entries[tensor]
        region = Region(shape, None if box == NO_BOX else self.box_list[box], start, length)
        return Shard(name, kind, region, DTYPES[dtype], checksum=f"{checksum:016x}")

    def encode(self) -> bytes:
        """Return the content of the table's file. Deterministic."""
        texts = {"tensors": self.tensors, "boxes": self.boxes}
        return save(self.columns | {name: np.frombuffer(text, np.uint8) for name, text in texts.items()})

    @staticmethod
    def decode(raw: bytes | bytearray) -> ShardTable:
        """Return the table in a file's content. Only `check` finds out whether its rows make sense.

        Raises:
            ValueError: The content is not a table of shards.
        """
        try:
            arrays = load(bytes(raw))
            columns = {name: arrays[name].view(dtype) for name, dtype in COLUMNS.items()}
            return ShardTable(arrays["tensors"].tobytes(), arrays["boxes"].tobytes(), columns)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"not a table of shards: {type(error).__name__}") from None

    def check(self) -> None:
        """Check that the shards cover every tensor exactly once.

        Raises:
            ValueError: A shard lies outside its tensor or in none, or a value is missing or stored twice.
        """
        count = len(self)
        columns = self.columns
        if any(column.shape != (count,) for column in columns.values()):
            raise ValueError("the columns of the table of shards are not equally long")
        try:
            sizes = [_count_values(entry) for entry in self.entries]
            for start, stop in chain(*self.box_list):
                are_integers = type(start) is int and type(stop) is int
                if not are_integers or not 0 <= start <= stop < MAX_VALUES:
                    raise ValueError(f"({start!r:.20}, {stop!r:.20}) is no side of a box")
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a table of shards: {error}") from None
        if count:
            lowest = {"tensor": 0, "box": NO_BOX, "start": 0, "length": 0}
            is_too_low = any(columns[name].min() < limit for name, limit in lowest.items())
            has_no_tensor = columns["tensor"].max() >= len(sizes)
            has_no_box = columns["box"].max() >= len(self.box_list)
            if is_too_low or has_no_tensor or has_no_box:
                raise ValueError("a shard points to a tensor, a box or a position that does not exist")
        for (name, kind), times in Counter((name, kind) for name, kind, *_ in self.entries).items():
            if times > 1:
                raise ValueError(f"{kind} of {name} is listed with {times} shapes or dtypes")
        self._check_cover(sizes)

    def _check_cover(self, sizes: list[int]) -> None:
        """Check that no shards of a box and no boxes of a tensor overlap, and that no value is missing.

        Args:
            sizes: Number of values of each tensor.

        Raises:
            ValueError: Shards or boxes overlap, a value is missing, a shard ends behind its box, or a box
                lies outside of its tensor.
        """
        rows = self._order
        length = self.columns["length"]
        if not length.all():
            rows = rows[length[rows] > 0]
        group = self._groups[rows]
        start = self.columns["start"][rows]
        length = length[rows]
        is_first = np.ones(len(rows), bool)
        is_first[1:] = group[1:] != group[:-1]
        firsts = np.flatnonzero(is_first)
        tensors_and_boxes = [self._decode_group(number) for number in group[firsts].tolist()]
        volumes = [math.prod(stop - start for start, stop in box) for _, box in tensors_and_boxes]
        ends = np.repeat(np.array(volumes, np.int64), np.diff(np.append(firsts, len(group))))
        for row in rows[length > ends - start][:1].tolist():
            shard = self.shard(row)
            stop = shard.region.start + shard.region.length
            raise ValueError(f"{shard.title}: values {shard.region.start} to {stop} end behind their box")
        overlaps_next = ~is_first[1:] & (start[:-1] + length[:-1] > start[1:])
        for row in rows[:-1][overlaps_next][:1].tolist():
            raise ValueError(f"{self.shard(row).title} has values that are stored twice")
        boxes: list[list[Box]] = [[] for _ in sizes]
        counts = [0] * len(sizes)
        totals = np.add.reduceat(length, firsts).tolist() if len(firsts) else []
        for (tensor, box), total in zip(tensors_and_boxes, totals, strict=True):
            boxes[tensor].append(box)
            counts[tensor] += total
        for (name, kind, *_), own_boxes, count, size in zip(self.entries, boxes, counts, sizes, strict=True):
            for one, other in combinations(own_boxes, 2):
                if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
                    raise ValueError(f"{kind} of {name} has boxes {one} and {other}, which overlap")
            if count != size:
                raise ValueError(f"{kind} of {name}: {count} values of {size} are in the files")

    def _decode_group(self, number: int) -> tuple[int, Box]:
        """Return the tensor's index and the box of a group, from the group's number in `_groups`.

        Raises:
            ValueError: The box lies outside of the tensor.
        """
        tensor, box = divmod(number, len(self.box_list) + 1)
        name, kind, _, shape = self.entries[tensor]
        limits = self.box_list[box - 1] if box else tuple((0, extent) for extent in shape)
        inside = len(limits) == len(shape) and all(
            stop <= extent for (_, stop), extent in zip(limits, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{kind} of {name}: box {limits} lies outside of shape {shape}")
        return tensor, limits


def _count_values(entry: tuple[str, str, str, tuple[int, ...]]) -> int:
    """Return the number of values of an entry (name, kind, dtype, shape) of a table.

    Raises:
        ValueError: The entry does not describe a tensor.
    """
    name, kind, dtype, shape = entry
    if not (isinstance(name, str) and isinstance(kind, str) and dtype in DTYPES):
        raise ValueError(f"{name!r:.80} of kind {kind!r:.20} and dtype {dtype!r:.20} is no tensor")
    if any(type(extent) is not int or extent < 0 for extent in shape) or math.prod(shape) >= MAX_VALUES:
        raise ValueError(f"{kind} of {name} has an impossible shape: {shape}")
    return math.prod(shape)


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class StrictRecord(BaseModel):
    """Base of records in the manifest. Unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(StrictRecord):
    """Record of one file and of the machine that wrote it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$")
    rank: Count
    """Rank that wrote the file."""
    host: str
    """Name of that rank's machine."""
    place: Count
    """Lowest rank on the file system of the file. Files with equal `place` are in one folder."""
    bytes: Count
    """Size of the file."""
    xxh3_128: Checksum
    """Checksum of the file as in FileChecksums."""
    shards: Count
    """Number of shards in the file. In the table, the rows of all files follow each other in this order."""


class TableRecord(StrictRecord):
    """Record of the file with the table of all shards."""

    bytes: Count
    """Size of the file."""
    xxh3_128: Checksum
    """Checksum of the file's content."""


def make_table_record(content: bytes) -> TableRecord:
    """Return the record of an encoded table."""
    return TableRecord(bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))


def has_evaluation(state: Mapping[str, Any]) -> bool:
    """Return whether the state stored in a checkpoint includes an evaluation of its weights."""
    return state.get("eval_loss") is not None or state.get("best_by") is not None


@dataclass(frozen=True)
class BestBy:
    """Metric that chooses the best checkpoint, and its value for one checkpoint."""

    metric: str
    """Name of the metric without `eval/`."""
    value: float
    best_is_lowest: bool
    """Whether the lowest value is the best."""

    @property
    def sort_key(self) -> float:
        """Key to order checkpoints by this metric; the lowest is the best."""
        return self.value if self.best_is_lowest else -self.value


class Manifest(StrictRecord):
    """Content of manifest.json: step, split, training state, scalars, and the records of all files."""

    global_step: Count
    """Number of optimizer steps completed."""
    world_size: Count
    """Number of ranks that saved."""
    split: str
    """Description of the split that was trained, for messages."""
    state: dict[str, Any]
    """State of the training loop, as JSON values."""
    scalars: dict[str, bool | int | float]
    """Scalar state of the engine, equal on all ranks."""
    files: tuple[FileRecord, ...]
    """Records of the files with shards, in the order of the table's rows."""
    shard_table: TableRecord
    """Record of the file with the table of all shards; see `table`."""

    _folder: Path = PrivateAttr()
    _table: ShardTable | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _refuse_duplicate_files(self) -> Manifest:
        names = [file.name for file in self.files]
        if len({*names, TABLE}) < len(names) + 1:
            raise ValueError("a file is listed twice")
        return self

    @staticmethod
    def with_table(table: ShardTable, folder: Path, **fields: Any) -> Manifest:
        """Return a manifest with a table that is already in memory.

        Raises:
            ValueError: The table is inconsistent, or does not match the files.
        """
        manifest = Manifest(**fields)
        manifest._folder = folder
        manifest._table = manifest._check_table(table)
        return manifest

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return self._folder

    def _check_table(self, table: ShardTable) -> ShardTable:
        """Return the table unchanged after checking it.

        Raises:
            ValueError: The table is inconsistent, or does not match the files.
        """
        table.check()
        num_shards = sum(file.shards for file in self.files)
        if num_shards != len(table):
            raise ValueError(f"the table has {len(table)} shards, and the files have {num_shards}")
        return table

    @property
    def table(self) -> ShardTable:
        """Table of all shards, in the order of files; read at the first access.

        Raises:
            CheckpointError: The table is missing, damaged or inconsistent.
        """
        if self._table is None:
            path = self._folder / TABLE
            record = self.shard_table
            # The limit matters if another file is at this path, maybe a much larger one.
            raw = _read_file(path, min(record.bytes + 1, MAX_TABLE_BYTES))
            if len(raw) != record.bytes or xxhash.xxh3_128_hexdigest(raw) != record.xxh3_128:
                raise CheckpointError(
                    f"{path} is damaged: its size or checksum differs from the manifest; resume from another "
                    "checkpoint"
                )
            try:
                self._table = self._check_table(ShardTable.decode(raw))
            except ValueError as error:
                raise CheckpointError(f"{path}: {str(error)[:400]}; resume from another checkpoint") from None
        return self._table

    @cached_property
    def first_rows(self) -> list[int]:
        """Number of the first row of each file in the table, and the number of rows."""
        return [0, *np.cumsum([file.shards for file in self.files], dtype=np.int64).tolist()]

    def shards_of(self, file: FileRecord) -> list[Shard]:
        """Return the shards of a file, in the order in which the file has them."""
        first = self.first_rows[self.files.index(file)]
        return [self.table.shard(row) for row in range(first, first + file.shards)]

    def layout_of(self, file: FileRecord) -> FileLayout:
        """Return the header and offsets of a file, which follow from its shards.

        Raises:
            CheckpointError: The manifest states another size, or the table cannot be read.
        """
        layout = FileLayout.of(self.shards_of(file))
        if layout.num_bytes != file.bytes:
            raise CheckpointError(
                f"{self._folder}: {file.name}: the manifest states {file.bytes} bytes, and the shards of this"
                f" file take {layout.num_bytes}; resume from another checkpoint"
            )
        return layout

    @property
    def eval_loss(self) -> float | None:
        """Loss of the evaluation after this step; `None` if there was none or it is not finite."""
        loss = self.state.get("eval_loss")
        return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None

    @property
    def best_by(self) -> BestBy | None:
        """Metric that chooses the best checkpoint; `None` if it was not measured or is not finite."""
        record = self.state.get("best_by")
        if not isinstance(record, dict):
            return None
        value = record.get("value")
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return BestBy(str(record.get("metric")), float(value), best_is_lowest=record.get("mode") == "min")

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, without manifest and table."""
        return sum(file.bytes for file in self.files)

    def encode(self) -> bytes:
        """Return the content of manifest.json. Deterministic."""
        content = json.dumps(self.model_dump(), separators=(",", ":")).encode()
        return _wrap(content)


def _wrap(content: bytes) -> bytes:
    """Return the JSON of a manifest with its format and checksum before it."""
    checksum = xxhash.xxh3_128_hexdigest(content)
    return f'{{"format":{FORMAT},"xxh3_128":"{checksum}","manifest":'.encode() + content + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, or it is damaged, of another format, or inconsistent.
    """
    return decode_manifest(_read_file(folder / MANIFEST, MAX_MANIFEST_BYTES), folder / MANIFEST)


def _read_file(path: Path, max_bytes: int) -> bytearray:
    """Return the first `max_bytes` bytes of a file of a checkpoint, or fewer if it is shorter.

    Raises:
        CheckpointError: The file does not exist or cannot be read.
    """
    try:
        with open_for_reading(path) as descriptor:
            raw = bytearray(min(path.stat().st_size, max_bytes))
            read_exactly(descriptor, 0, memoryview(raw))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is not complete") from None
    return raw


def decode_manifest(raw: bytes | bytearray, path: Path) -> Manifest:
    """Return the manifest in a file's content.

    Args:
        raw: Content of the file.
        path: Path of the file, for messages. Its parent becomes the manifest's folder.

    Raises:
        CheckpointError: The content is damaged, of another format, or inconsistent.
    """
    damaged = f"{path} is damaged: its checksum does not match; resume from another checkpoint"
    try:
        tree = json.loads(raw)
        file_format = tree["format"]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise CheckpointError(damaged) from None
    if file_format != FORMAT or type(file_format) is not int:
        raise CheckpointError(
            f"{path} is in checkpoint format {str(file_format)[:20]}, and this version reads format {FORMAT};"
            " use the version that wrote it"
        )
    del tree
    content = bytes(raw[len(_wrap(b"")) - 2 : -2])
    # All bytes are compared, so that a flipped bit outside of the content is found, too.
    if _wrap(content) != raw:
        raise CheckpointError(damaged)
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "manifest"
        problem = f"{key}: {first['msg']}"[:400]
        raise CheckpointError(f"{path}: {problem}; resume from another checkpoint") from None
    manifest._folder = path.parent
    return manifest
