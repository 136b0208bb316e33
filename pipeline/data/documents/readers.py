"""Reads (where, record) from files of text: whole files, lines of JSON, rows of CSV; one at a time."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from pipeline.data.documents.records import BadRecords, Record, type_name
from pipeline.data.documents.streams import Span, decode, open_stream
from pipeline.data.documents.tables import read_arrow, read_parquet
from pipeline.errors import DataError

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
