"""Reads records from files one at a time: whole texts, lines of JSON, rows of CSV files and of tables.

Each reader yields (location, record), where the location is file and line or row for messages.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.data.documents.records import BadRecordPolicy, Record, get_json_type_name
from pipeline.data.documents.streams import FileSpan, decode_utf8, open_stream
from pipeline.errors import DataError, summarize_error

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 256  # rows that exist as Python objects at the same time
BYTE_ORDER_MARK = "\ufeff"
NO_UTF8 = re.compile("[\udc80-\udcff]")  # characters that `surrogateescape` reads for bytes that are no UTF-8
Reader = Callable[[FileSpan, BadRecordPolicy, str | None], Iterator[tuple[str, Record]]]


def read_parquet(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the rows of row groups `start` to `end`; only the column `field` if it is given and exists."""
    import pyarrow.parquet as pq

    number = span.first
    # With pre_buffer, pyarrow would hold all row groups in memory at once.
    with table_errors(span.path, "parquet"), pq.ParquetFile(span.path, pre_buffer=False) as file:
        batches = file.iter_batches(
            ROWS_AT_ONCE,
            row_groups=list(range(span.start, file.num_row_groups if span.end is None else span.end)),
            columns=[field] if field is not None and field in file.schema_arrow.names else None,
        )
        for batch in batches:
            yield from iter_table_records(batch, span.path, number)
            number += batch.num_rows


def split_row_groups(path: str, size: int) -> list[tuple[int, int, int, int]]:
    """Return ranges of row groups of about `size` bytes.

    Returns:
        First row group, end (exclusive), number of the first row (from 1) and uncompressed bytes of each
        range.

    Raises:
        DataError: The file is not valid parquet.
    """
    import pyarrow.parquet as pq

    found: list[tuple[int, int, int, int]] = []
    with table_errors(path, "parquet"), pq.ParquetFile(path, pre_buffer=False) as file:
        start = 0
        first_row = 1
        num_rows = 0
        num_bytes = 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            num_rows += group.num_rows
            num_bytes += group.total_byte_size
            if num_bytes >= size or index + 1 == file.num_row_groups:
                if num_rows:
                    found.append((start, index + 1, first_row, num_bytes))
                start = index + 1
                first_row += num_rows
                num_rows = 0
                num_bytes = 0
    return found


def read_arrow(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the rows of an Arrow file or an Arrow stream; the first bytes tell which one it is."""
    import pyarrow as pa

    number = span.first
    with table_errors(span.path, "Arrow"), pa.OSFile(span.path) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader: Any = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            is_there = field is not None and field in batch.schema.names
            yield from iter_table_records(batch.select([field]) if is_there else batch, span.path, number)
            number += batch.num_rows


def iter_table_records(
    batch: pa.RecordBatch | pa.Table, path: str, first: int
) -> Iterator[tuple[str, Record]]:
    """Yield a location `path: row N`, counted from `first`, and a dict for each row.

    Columns of type JSON are decoded. `datasets` uses that type for fields without a common type, such as tool
    calls whose arguments differ.

    Raises:
        DataError: A column of type JSON holds invalid JSON.
    """
    of_json = {column.name: column.type for column in batch.schema if "extension<arrow.json>" in str(column)}
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        for number, row in enumerate(batch.slice(start, ROWS_AT_ONCE).to_pylist(), start=first + start):
            where = f"{path}: row {number}"
            for name, kind in of_json.items():
                try:
                    row[name] = _decode_json(row[name], kind)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"{where}: column {name!r} has the type JSON and holds invalid JSON: {error}; "
                        "write the table again"
                    ) from None
            yield where, row


def _decode_json(value: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else value
    if pa.types.is_struct(kind):
        return {each.name: _decode_json(value[each.name], each.type) for each in kind}
    return [_decode_json(each, kind.value_type) for each in value] if isinstance(value, list) else value


@contextmanager
def table_errors(path: str, what: str) -> Iterator[None]:
    """Turn errors of pyarrow into a DataError of one line."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as {what}: {summarize_error(error)}; is it whole?") from None


def read_text_file(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the whole file as one document."""
    with open_stream(span.path, span.compression) as stream:
        content = stream.read()
    try:
        text = decode_utf8(content, span.path, 0)
    except DataError as error:
        bad.skip_or_raise(str(error))
        return
    yield span.path, text.removeprefix(BYTE_ORDER_MARK)


def read_jsonl(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the object on each line; lines of white space are skipped."""
    with open_stream(span.path, span.compression) as stream:
        if span.start:
            stream.seek(span.start)
        offset = span.start
        for number, line in enumerate(stream, start=span.first):
            if span.end is not None and offset >= span.end:
                return
            where = f"{span.path}:{number}"
            try:
                record = _parse_line(line, where, offset)
            except DataError as error:
                bad.skip_or_raise(str(error))
            else:
                if record is not None:
                    yield where, record
            offset += len(line)


def _parse_line(line: bytes, where: str, offset: int) -> dict[str, Any] | None:
    content = decode_utf8(line, where, offset)
    if offset == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    if content.isspace():
        return None
    try:
        record = json.loads(content)
    except (
        ValueError,
        RecursionError,
    ) as error:  # invalid JSON, an integer with too many digits, deep nesting
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: is a {get_json_type_name(record)}; expected an object with fields")
    return record


def read_json(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the objects in a list; a file of one object per line, as many tools write, is read as JSONL."""
    with open_stream(span.path, span.compression) as stream:
        text = decode_utf8(stream.read(), span.path, 0).removeprefix(BYTE_ORDER_MARK).strip()
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.startswith("["):
            raise DataError(f"{span.path}: not JSON: {error}") from None
        yield from read_jsonl(span, bad, field)
        return
    if not isinstance(rows, list):
        raise DataError(
            f"{span.path}: is one JSON {get_json_type_name(rows)}; expected a list of rows, [...], or "
            "one object per line"
        )
    for number, record in enumerate(rows, start=1):
        where = f"{span.path}: row {number}"
        if isinstance(record, dict):
            yield where, record
        else:
            bad.skip_or_raise(f"{where}: is a {get_json_type_name(record)}; expected an object with fields")


def read_csv(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the rows; the first one names the fields. Quoted fields may contain line breaks.

    If no single `field` is asked for, a cell that holds conversation turns as JSON becomes a list of turns.
    """
    csv.field_size_limit(sys.maxsize)  # lift the csv module's limit of 128 KiB, for the whole process
    with open_stream(span.path, span.compression) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(lines, delimiter="\t" if span.kind == "tsv" else ",", strict=True)
        names: list[str] = []
        while True:
            where = f"{span.path}:{rows.line_num + 1}"
            row: list[str] | None = []
            fault = None
            try:
                row = next(rows, None)
            except csv.Error as error:
                fault = f"{where}: not a row of CSV: {error}"
            if row is None:
                return
            if NO_UTF8.search("".join(row)):
                fault = f"{where}: not UTF-8; convert the file (iconv -t UTF-8) or leave it out"
            twice = [name for name in row if not names and row.count(name) > 1]
            if twice:
                fault = f"{where}: the first row names the field {twice[0]!r} twice"
            elif names and row and len(row) != len(names):
                fault = f"{where}: {len(row)} fields, where the first row names {len(names)}"
            if fault is not None and not names:
                raise DataError(fault)  # without field names no row can be used
            if fault is not None:
                bad.skip_or_raise(fault)
            elif row and names:
                cells = row if field is not None else map(_parse_turns, row)
                yield where, dict(zip(names, cells, strict=True))
            names = names or row


def _parse_turns(cell: str) -> Any:
    """Return the turn or the turns that a cell holds as JSON; return any other cell unchanged.

    CSV has no lists, so only the content tells whether a `prompt` holds turns or text.
    """
    if cell[:1] not in ("[", "{"):
        return cell
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    turns = value if isinstance(value, list) else [value]
    is_turns = all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)
    return value if turns and is_turns else cell


def read_stdlib_source(
    span: FileSpan, bad: BadRecordPolicy, field: str | None
) -> Iterator[tuple[str, Record]]:
    """Yield a module of the standard library; the few that are not UTF-8 are skipped."""
    with open_stream(span.path, span.compression) as stream:
        content = stream.read()
    try:
        yield span.path, content.decode("utf-8")
    except UnicodeDecodeError:
        return


def read_stdlib_topics(
    span: FileSpan, bad: BadRecordPolicy, field: str | None
) -> Iterator[tuple[str, Record]]:
    """Yield the topics of Python's documentation, in the order of their names."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"{span.path}: {name}", topics[name]


READERS: dict[str, Reader] = {
    "text": read_text_file,
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "stdlib_source": read_stdlib_source,
    "stdlib_topics": read_stdlib_topics,
}
