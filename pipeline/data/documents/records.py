"""What is read: a record, the text in it, and what happens to one that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pipeline.errors import DataError

Record = str | dict[str, Any]
BAD_RECORDS = "bad records"  # their count in a tally
TYPE_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}


class Tally(Counter[str]):
    """Counts what is worth telling about records, and keeps the place of the first record of each kind.

    Attributes:
        first: File and line of the first record that was counted under a name.
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
        """Return a line for each kind: what, how many, and the first of them."""
        return [
            f"{what}: {count:,}" + (f" (first: {self.first[what]})" if what in self.first else "")
            for what, count in sorted(self.items())
            if count
        ]

    def add(self, other: Tally) -> None:
        """Count what another tally counted, of records behind those of this one."""
        self.update(other)
        self.first = other.first | self.first


class BadRecordPolicy:
    """Stops at a record that cannot be used, or leaves it out and counts it.

    Args:
        skip: Leave it out.
        tally: Where it is counted, under `bad records`.
    """

    def __init__(self, skip: bool, tally: Tally) -> None:
        self.skip = skip
        self.tally = tally

    def skip_or_raise(self, message: str) -> None:
        """Return where bad records are skipped.

        Raises:
            DataError: with `message`, where they are not.
        """
        if not self.skip:
            raise DataError(message)
        self.tally.note(BAD_RECORDS, message)


class SourcePiece(Protocol):
    """What a part is made of. Goes to other processes by pickle.

    Attributes:
        digest: Of the content, 32 hexadecimal digits; no path and no time of change is in it.
        size: Bytes of input, as far as known.
    """

    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield (where, record). Where `field` is given, a row may come without its others."""


def extract_text(where: str, record: Record, field: str) -> str:
    """Return the text of a record: the record itself, or its `field`.

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
        raise DataError(f"{where}: field {field!r} is a {get_json_type_name(text)}; expected a string")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a pair, as JSON can write it: no tokenizer takes it
            raise DataError(f"{where}: field {field!r} is no valid text: {error.reason}") from None
    return text


def get_json_type_name(value: object) -> str:
    """Return what JSON calls the type of `value`."""
    return "null" if value is None else TYPE_NAMES.get(type(value), type(value).__name__)
