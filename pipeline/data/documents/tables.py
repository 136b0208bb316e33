"""Reads rows of parquet and Arrow files, a few hundred at a time. Feather is Arrow under another name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.data.documents.records import BadRecords, Record
from pipeline.data.documents.streams import Span, open_file
from pipeline.errors import DataError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 256  # documents held as Python objects
ARROW_FILE, OLD_FEATHER = b"ARROW1", b"FEA1"


def read_parquet(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """The rows of row groups `start` to `end`; only the column `field` where there is one."""
    number = span.first
    with open_parquet(span.path, span.compression) as file:
        end = file.num_row_groups if span.end is None else span.end
        batches = file.iter_batches(
            ROWS_AT_ONCE,
            row_groups=list(range(span.start, end)),
            columns=[field] if field is not None and field in file.schema_arrow.names else None,
        )
        for batch in batches:
            yield from records_of(batch, span.path, number)
            number += batch.num_rows


def row_groups(path: str, compression: str, size: int) -> list[tuple[int, int, int, int]]:
    """Row groups put together to about `size` bytes: (start, end, first row from 1, bytes uncompressed).

    Raises:
        DataError: the file is no parquet.
    """
    found: list[tuple[int, int, int, int]] = []
    with open_parquet(path, compression) as file:
        start, first, rows, held = 0, 1, 0, 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            rows, held = rows + group.num_rows, held + group.total_byte_size
            if held >= size or index + 1 == file.num_row_groups:
                if rows:
                    found.append((start, index + 1, first, held))
                start, first, rows, held = index + 1, first + rows, 0, 0
    return found


@contextmanager
def open_parquet(path: str, compression: str) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`, which lives as long as the context.

    Raises:
        DataError: the file cannot be read, or is damaged.
    """
    import pyarrow.parquet as pq

    with (
        open_file(path, compression) as stream,
        table_errors(path, "parquet"),
        # Read ahead, it would hold all its row groups at once.
        pq.ParquetFile(stream if compression else path, pre_buffer=False) as file,
    ):
        yield file


def read_arrow(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """The rows of an Arrow file or an Arrow stream, as its first bytes say."""
    number = span.first
    with open_file(span.path, span.compression) as stream, table_errors(span.path, "Arrow"):
        for batch in _record_batches(stream, span.path):
            is_there = field is not None and field in batch.schema.names
            yield from records_of(batch.select([field]) if is_there else batch, span.path, number)
            number += batch.num_rows


def _record_batches(stream: BinaryIO, path: str) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    magic = stream.read(len(ARROW_FILE))
    stream.seek(0)
    if magic.startswith(OLD_FEATHER):
        raise DataError(f"{path}: version 1 of Feather; write it again with pyarrow.feather.write_feather")
    if magic == ARROW_FILE:
        reader = pa.ipc.open_file(stream)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(stream)


def records_of(batch: pa.RecordBatch | pa.Table, path: str, first: int) -> Iterator[tuple[str, Record]]:
    """Return a dict for each row, with `path: row N` counted from `first`.

    Raises:
        DataError: A column of JSON holds something else.
    """
    decoders = {column.name: decode for column in batch.schema if (decode := _json_decoder(column.type))}
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        rows = batch.slice(start, ROWS_AT_ONCE).to_pylist()
        for number, row in enumerate(rows, start=first + start):
            where = f"{path}: row {number}"
            for name, decode in decoders.items():
                try:
                    row[name] = decode(row[name])
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where}: column {name!r} is of JSON, and holds none: {error}") from None
            yield where, row


def _json_decoder(column: pa.DataType) -> Callable[[Any], Any] | None:
    """Return what makes values out of the JSON text in a column; None if it has none.

    `datasets` stores fields as JSON that have no common type, such as tool calls whose arguments differ.
    """
    import pyarrow as pa

    if isinstance(column, pa.BaseExtensionType):
        return _decode_json if column.extension_name == "arrow.json" else None
    if pa.types.is_list(column) or pa.types.is_large_list(column) or pa.types.is_fixed_size_list(column):
        decode = _json_decoder(column.value_type)
        return None if decode is None else partial(_decode_list, decode)
    if pa.types.is_struct(column):
        inside = {each.name: decode for each in column if (decode := _json_decoder(each.type))}
        return partial(_decode_struct, inside) if inside else None
    return None


def _decode_json(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _decode_list(decode: Callable[[Any], Any], values: list[Any] | None) -> list[Any] | None:
    return None if values is None else [decode(value) for value in values]


def _decode_struct(
    inside: dict[str, Callable[[Any], Any]], value: dict[str, Any] | None
) -> dict[str, Any] | None:
    if value is None:
        return None
    return value | {name: decode(value[name]) for name, decode in inside.items()}


@contextmanager
def table_errors(path: str, what: str) -> Iterator[None]:
    """pyarrow's errors as one line."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as {what}: {one_line(error)}; is it whole?") from None
