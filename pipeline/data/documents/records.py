"""Defines records, extracts their text, and rejects or skips records that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pipeline.errors import DataError

Record = str | dict[str, Any]
"""A text, or a row as a dict of fields."""
BAD_RECORDS = "bad records"  # kind under which a tally counts records that cannot be used
JSON_TYPE_NAMES = {
    dict: "object",
    list: "list",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
}


class Tally(Counter[str]):
    """Counts records by kinds that are worth reporting, such as `bad records`.

    Args:
        counts: Number of records by kind.
        first: Location of the first record by kind; `None` if not known.

    Attributes:
        first: Location of the first record that was counted, such as file and line, by kind.
    """

    def __init__(
        self, counts: Mapping[str, int] = MappingProxyType({}), first: Mapping[str, str] | None = None
    ):
        super().__init__(counts)
        self.first: dict[str, str] = dict(first or {})

    def note(self, kind: str, where: str) -> None:
        """Count one more record of a kind; `where` is its location, or the message that names it."""
        self[kind] += 1
        self.first.setdefault(kind, where)

    def format_lines(self) -> list[str]:
        """Return a line for each kind: its name, the count, and the location of the first record."""
        lines = []
        for kind, count in sorted(self.items()):
            location = f" (first: {self.first[kind]})" if kind in self.first else ""
            if count:
                lines.append(f"{kind}: {count:,}{location}")
        return lines

    def add(self, other: Tally) -> None:
        """Add the counts of another tally, whose records come after the records of this one."""
        self.update(other)
        self.first = other.first | self.first


class BadRecordPolicy:
    """Raises an error for a record that cannot be used, or skips and counts it.

    Args:
        skip: Whether to skip bad records.
        tally: Counts the skipped records as BAD_RECORDS.
    """

    def __init__(self, skip: bool, tally: Tally) -> None:
        self.skip = skip
        self.tally = tally

    def skip_or_raise(self, message: str) -> None:
        """Count a bad record if such records are skipped; the caller then continues with the next record.

        Raises:
            DataError: Bad records are not skipped. Its text is `message`.
        """
        if not self.skip:
            raise DataError(message)
        self.tally.note(BAD_RECORDS, message)


class SourcePiece(Protocol):
    """Input that a part is made of, such as a range of a file; picklable."""

    @property
    def digest(self) -> str:
        """Hash of the content, 32 hexadecimal digits; independent of path and time of change."""

    @property
    def size(self) -> int:
        """Bytes of input; 0 if not known."""

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield (location, record) of each record.

        Args:
            bad: Decides about records that cannot be used.
            field: The only field that the caller needs: rows may come without the others. `None` for all.
        """


def extract_text(where: str, record: Record, field: str) -> str:
    """Return the text of a record: the record itself, or its `field`.

    Raises:
        DataError: The record has no such field, or the field does not contain valid text.
    """
    if isinstance(record, str):
        text: Any = record
    elif field in record:
        text = record[field]
    else:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{where}: no field {field!r}; its fields: {fields}. Set data.text_field (or text_field of "
            "the source)"
        )
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is a {get_json_type_name(text)}; expected a string")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            # The text has half of a surrogate pair, which JSON allows and no tokenizer accepts.
            raise DataError(f"{where}: field {field!r} is no valid text: {error.reason}") from None
    return text


def get_json_type_name(value: object) -> str:
    """Return the name that JSON uses for the type of `value`."""
    return "null" if value is None else JSON_TYPE_NAMES.get(type(value), type(value).__name__)
