"""Reads records from files one at a time: entire texts, lines of JSON, rows of CSV files and of tables.

Each reader yields (location, record). The location names file and line, or file and row, for messages. A
reader takes a range of a file, a policy for records that cannot be used, and the name of the only field that
is needed (`None` for all fields). Tables and the standard library do not use the policy. Readers that cannot
skip fields yield all of them. A file that cannot be read raises DataError.
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
# Characters that the error handler `surrogateescape` decodes from bytes that are not UTF-8.
INVALID_UTF8 = re.compile("[\udc80-\udcff]")
Reader = Callable[[FileSpan, BadRecordPolicy, str | None], Iterator[tuple[str, Record]]]


def read_parquet(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the rows of the span's row groups; only the column `field` if it is given and exists."""
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
    """Divide the row groups of a parquet file into ranges of about `size` uncompressed bytes.

    Returns:
        For each range: first row group, end (exclusive), number of the first row (from 1) and uncompressed
        bytes.

    Raises:
        DataError: The file is not valid parquet.
    """
    import pyarrow.parquet as pq

    ranges: list[tuple[int, int, int, int]] = []
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
                    ranges.append((start, index + 1, first_row, num_bytes))
                start = index + 1
                first_row += num_rows
                num_rows = 0
                num_bytes = 0
    return ranges


def read_arrow(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the rows of an Arrow file or an Arrow stream; the first bytes tell which one it is."""
    import pyarrow as pa

    number = span.first
    with table_errors(span.path, "Arrow"), pa.OSFile(span.path) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader: Any = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            has_field = field is not None and field in batch.schema.names
            yield from iter_table_records(batch.select([field]) if has_field else batch, span.path, number)
            number += batch.num_rows


def iter_table_records(
    batch: pa.RecordBatch | pa.Table, path: str, first: int
) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) of each row, such as `path: row 7` and a dict.

    Columns of type JSON are decoded. `datasets` uses that type for fields without a common type, such as tool
    calls whose arguments differ.

    Args:
        batch: The table.
        path: Name of the table for the locations.
        first: Number of the first row.

    Raises:
        DataError: A column of type JSON contains invalid JSON.
    """
    json_types = {
        column.name: column.type for column in batch.schema if "extension<arrow.json>" in str(column)
    }
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        for number, row in enumerate(batch.slice(start, ROWS_AT_ONCE).to_pylist(), start=first + start):
            where = f"{path}: row {number}"
            for name, kind in json_types.items():
                try:
                    row[name] = _decode_json(row[name], kind)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"{where}: column {name!r} has the type JSON and contains invalid JSON: {error}; "
                        "write the table again"
                    ) from None
            yield where, row


def _decode_json(value: Any, kind: pa.DataType) -> Any:
    """Return a value of an Arrow type with its JSON texts decoded, also inside structs and lists."""
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
    """Turn errors of pyarrow inside of the context into a DataError of one line.

    Args:
        path: Path of the file that is read.
        what: Name of the file's format for the message.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read as {what}: {summarize_error(error)}; it may be incomplete"
        ) from None


def read_text_file(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the entire file as one document."""
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
    """Return the object on a line of JSON; `None` for a line of white space.

    Args:
        line: Bytes of the line.
        where: File and line for messages.
        offset: Offset of the line in the (decompressed) file, in bytes.

    Raises:
        DataError: The line is not UTF-8, not JSON, or not an object.
    """
    content = decode_utf8(line, where, offset)
    if offset == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    if content.isspace():
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        # Invalid JSON, an integer with too many digits, or too deep nesting.
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: is a {get_json_type_name(record)}; expected an object with fields")
    return record


def read_json(span: FileSpan, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
    """Yield the objects in a list; a file of several lines with one object each is read as JSONL."""
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
    """Yield the rows as dicts; the first row names the fields. Quoted fields may contain line breaks.

    If all fields are needed (`field` is `None`), a cell that contains a conversation turn, or a list of
    turns, as JSON is decoded. Removes the csv module's limit on the size of a field, for the entire process.
    """
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
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
            if INVALID_UTF8.search("".join(row)):
                fault = f"{where}: not UTF-8; convert the file (iconv -t UTF-8) or remove it"
            repeated = [name for name in row if not names and row.count(name) > 1]
            if repeated:
                fault = f"{where}: the first row names the field {repeated[0]!r} twice"
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
    """Return the turn or the turns that a cell contains as JSON; return any other cell unchanged.

    CSV has no lists, so only the content shows whether a field such as `prompt` contains turns or text.
    """
    if not cell.startswith(("[", "{")):
        return cell
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    turns = value if isinstance(value, list) else [value]
    are_turns = all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)
    return value if turns and are_turns else cell


def read_stdlib_source(
    span: FileSpan, bad: BadRecordPolicy, field: str | None
) -> Iterator[tuple[str, Record]]:
    """Yield the source of a module of the standard library as one text; nothing if it is not UTF-8."""
    with open_stream(span.path, span.compression) as stream:
        content = stream.read()
    try:
        yield span.path, content.decode("utf-8")
    except UnicodeDecodeError:
        return


def read_stdlib_topics(
    span: FileSpan, bad: BadRecordPolicy, field: str | None
) -> Iterator[tuple[str, Record]]:
    """Yield the texts of the topics of Python's documentation, in the order of the topics' names."""
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
"""Readers by `FileSpan.kind`."""
