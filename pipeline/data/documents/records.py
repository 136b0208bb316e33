"""Defines records, extracts their text, and decides what happens to records that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pipeline.errors import DataError

Record = str | dict[str, Any]
BAD_RECORDS = "bad records"  # name under which a tally counts them
TYPE_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}


class Tally(Counter[str]):
    """Counts records worth reporting by kind, and remembers the location of the first record of each kind.

    Attributes:
        first: File and line of the first record that was counted, by kind.
    """

    def __init__(
        self, counts: Mapping[str, int] = MappingProxyType({}), first: Mapping[str, str] | None = None
    ):
        super().__init__(counts)
        self.first: dict[str, str] = dict(first or {})

    def note(self, what: str, where: str) -> None:
        """Count one more record under `what`."""
        self[what] += 1
        self.first.setdefault(what, where)

    def lines(self) -> list[str]:
        """Return a line for each kind: its name, the count, and the location of the first record."""
        return [
            f"{what}: {count:,}" + (f" (first: {self.first[what]})" if what in self.first else "")
            for what, count in sorted(self.items())
            if count
        ]

    def add(self, other: Tally) -> None:
        """Add the counts of another tally, whose records come after those of this one."""
        self.update(other)
        self.first = other.first | self.first


class BadRecordPolicy:
    """Raises an error for a record that cannot be used, or skips and counts it.

    Args:
        skip: Whether to skip bad records.
        tally: Receives the number of skipped records under `bad records`.
    """

    def __init__(self, skip: bool, tally: Tally) -> None:
        self.skip = skip
        self.tally = tally

    def skip_or_raise(self, message: str) -> None:
        """Count a bad record if such records are skipped.

        Raises:
            DataError: Bad records are errors; has the text `message`.
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
        """Yield (location, record). If `field` is given, a row may come without its other fields."""


def extract_text(where: str, record: Record, field: str) -> str:
    """Return the text of a record: the record itself, or its `field`.

    Raises:
        DataError: The record has no such field, or the field holds no valid text.
    """
    if isinstance(record, str):
        text: Any = record
    elif field in record:
        text = record[field]
    else:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{where}: no field {field!r}; its fields: {fields}. Set data.text_field (or the source's)"
        )
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is a {get_json_type_name(text)}; expected a string")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except (
            UnicodeEncodeError
        ) as error:  # half of a surrogate pair, which JSON allows and no tokenizer accepts
            raise DataError(f"{where}: field {field!r} is no valid text: {error.reason}") from None
    return text


def get_json_type_name(value: object) -> str:
    """Return the name that JSON uses for the type of `value`."""
    return "null" if value is None else TYPE_NAMES.get(type(value), type(value).__name__)
