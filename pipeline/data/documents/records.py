"""What is read: a record, the text in it, and what happens to one that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

from pipeline.errors import DataError

Record = str | dict[str, Any]
BAD_RECORDS = "bad records"  # their count in a tally
TYPE_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}


class BadRecords:
    """Stops at a record that cannot be used, or leaves it out and counts it.

    Args:
        skip: Leave it out.
        tally: Where it is counted, under `bad records`.
    """

    def __init__(self, skip: bool, tally: Counter[str]) -> None:
        self.skip = skip
        self.tally = tally

    def refuse(self, message: str) -> None:
        """Returns where bad records are skipped.

        Raises:
            DataError: with `message`, where they are not.
        """
        if not self.skip:
            raise DataError(message)
        self.tally[BAD_RECORDS] += 1


class Piece(Protocol):
    """What a part is made of. Goes to other processes by pickle.

    Attributes:
        digest: Of the content, 32 hexadecimal digits; no path and no time of change is in it.
        size: Bytes of input, as far as known.
    """

    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read(self, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
        """(where, record) one by one. Where `field` is given, a row may come without its others."""


def text_of(where: str, record: Record, field: str) -> str:
    """The text of a record: the record itself, or its `field`.

    Raises:
        DataError: there is no such field, or it holds no text.
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
        raise DataError(f"{where}: field {field!r} is a {type_name(text)}; expected a string")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a pair, as JSON can write it: no tokenizer takes it
            raise DataError(f"{where}: field {field!r} is no valid text: {error.reason}") from None
    return text


def type_name(value: object) -> str:
    """What JSON calls the type of `value`."""
    return "null" if value is None else TYPE_NAMES.get(type(value), type(value).__name__)
