"""Reads (where, record) from files of text: whole files, lines of JSON, rows of CSV; one at a time."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.data.documents.records import BadRecords, Record, type_name
from pipeline.data.documents.streams import Span, decode, open_file, open_stream
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


BYTE_ORDER_MARK = "\ufeff"
SPACE = re.compile(r"[ \t\r\n]*")
Reader = Callable[[Span, BadRecords, str | None], Iterator[tuple[str, Record]]]


def read_text(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """The whole file is one document."""
    with open_stream(span.path, span.compression) as stream:
        content = stream.read()
    try:
        text = decode(content, span.path, span.path, 0)
    except DataError as error:
        bad.refuse(str(error))
        return
    yield span.path, text.removeprefix(BYTE_ORDER_MARK)


def read_jsonl(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """An object a line; lines of white space are left out."""
    with open_stream(span.path, span.compression) as stream:
        if span.start:
            stream.seek(span.start)
        offset = span.start
        for number, line in enumerate(stream, start=span.first):
            if span.end is not None and offset >= span.end:
                return
            where = f"{span.path}:{number}"
            try:
                record = _object_of_line(line, where, span.path, offset)
            except DataError as error:
                bad.refuse(str(error))
            else:
                if record is not None:
                    yield where, record
            offset += len(line)


def read_json(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """A list of objects. Many tools give lines of objects this name too: such a file is read as them."""
    with open_stream(span.path, span.compression) as stream:
        content = stream.read()
    text = decode(content, span.path, span.path, 0).removeprefix(BYTE_ORDER_MARK).strip()
    if text.startswith("{") and _is_one_object(text):
        raise DataError(
            f"{span.path}: is one JSON object; expected a list of rows, [...], or an object a line"
        )
    if not text.startswith("["):
        yield from read_jsonl(span, bad, field)
        return
    for number, record in enumerate(_elements(text, span.path), start=1):
        where = f"{span.path}: row {number}"
        if isinstance(record, dict):
            yield where, record
        else:
            bad.refuse(f"{where}: is a {type_name(record)}; expected an object with fields")


def _is_one_object(text: str) -> bool:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return end == len(text)


def _elements(text: str, path: str) -> Iterator[Any]:
    """The elements of a JSON list, one at a time.

    Raises:
        DataError: The text is no such list. What stands behind the fault cannot be read.
    """
    decoder = json.JSONDecoder()
    number = 1
    place = _skip_space(text, 1)
    is_last = text[place : place + 1] == "]"
    while not is_last:
        try:
            element, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: row {number}: not JSON: {error}") from None
        place = _skip_space(text, place)
        separator = text[place : place + 1]
        if separator not in (",", "]"):
            raise DataError(
                f"{path}: row {number}: not JSON: expected ',' or ']' behind it, got {separator!r}"
            )
        yield element
        is_last = separator == "]"
        place = place if is_last else _skip_space(text, place + 1)
        number += 1
    if place + 1 < len(text):
        raise DataError(f"{path}: there is more text behind the end of its list")


def _skip_space(text: str, place: int) -> int:
    found = SPACE.match(text, place)
    assert found is not None  # it matches nothing, too
    return found.end()


def _object_of_line(line: bytes, where: str, path: str, offset: int) -> dict[str, Any] | None:
    content = decode(line, where, path, offset)
    if offset == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    if content.isspace():
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # no JSON, a number too long to convert, nested too deep
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: is a {type_name(record)}; expected an object with fields")
    return record


def read_csv(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """A row each; the first one names the fields. Quoted fields may hold line breaks.

    Unless the row's one `field` is wanted, a cell with a conversation's turns as JSON becomes these turns.
    """
    csv.field_size_limit(sys.maxsize)  # the csv module's limit of 128 KiB holds for the whole process
    with open_stream(span.path, span.compression) as stream:
        damaged: list[str] = []
        delimiter = "\t" if span.kind == "tsv" else ","
        rows = csv.reader(_lines(stream, span.path, damaged), delimiter=delimiter, strict=True)
        names: list[str] | None = None
        for where, row, fault in _numbered(rows, span.path, damaged):
            if names is None:
                names = _field_names(where, row, fault)
            elif fault is not None:
                bad.refuse(fault)
            elif len(row) != len(names):
                bad.refuse(f"{where}: {len(row)} fields, where the first row names {len(names)}")
            else:
                cells = row if field is not None else map(_turns_or_text, row)
                yield where, dict(zip(names, cells, strict=True))


def _turns_or_text(cell: str) -> Any:
    """Return the turn or the turns that a cell holds as JSON; any other cell as it is.

    A table of text has no lists, so only what is in a cell tells `prompt` of turns from one of text.
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


def _field_names(where: str, row: list[str], fault: str | None) -> list[str]:
    if fault is not None:
        raise DataError(fault)  # without names no other row can be used
    twice = sorted({name for name in row if row.count(name) > 1})
    if twice:
        raise DataError(f"{where}: the first row names the field {twice[0]!r} twice")
    return row


def _numbered(rows: Any, path: str, damaged: list[str]) -> Iterator[tuple[str, list[str], str | None]]:
    """(where, row, what is wrong with it). An empty row is no row."""
    while True:
        where = f"{path}:{rows.line_num + 1}"
        fault = None
        row: list[str] = []
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            fault = f"{where}: not a row of CSV: {error}"
        if damaged:
            fault = damaged[0]
            damaged.clear()
        if row or fault is not None:
            yield where, row, fault


def _lines(stream: BinaryIO, path: str, damaged: list[str]) -> Iterator[str]:
    """Lines as text. What is wrong with one is put in `damaged`: only its row is known to be bad."""
    offset = 0
    for number, line in enumerate(stream, start=1):
        try:
            text = decode(line, f"{path}:{number}", path, offset)
        except DataError as error:
            damaged.append(str(error))
            text = line.decode("utf-8", errors="replace")
        yield text.removeprefix(BYTE_ORDER_MARK) if offset == 0 else text
        offset += len(line)


def read_stdlib_source(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """A module of the standard library; a few declare another encoding and are left out."""
    with open_stream(span.path, span.compression) as stream:
        content = stream.read()
    try:
        yield span.path, content.decode("utf-8")
    except UnicodeDecodeError:
        return


def read_stdlib_topics(span: Span, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
    """The topics of Python's documentation, in the order of their names."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"{span.path}: {name}", topics[name]


READERS: dict[str, Reader] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "stdlib_source": read_stdlib_source,
    "stdlib_topics": read_stdlib_topics,
}
