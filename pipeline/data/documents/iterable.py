"""Documents from a function of the user's own, named by its import path."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.import_paths import import_object, may_not_exit
from pipeline.data.documents.records import BadRecords, Record, type_name
from pipeline.errors import DataError


@dataclass(frozen=True)
class IterablePiece:
    """All that the function returns.

    Attributes:
        import_path: `package.module:function`.
        args: Its keyword arguments, as JSON.
        digest: Of import path, arguments and the text of the function's module. What the function reads is
            not in it: an argument that says which version it is makes a change known.
        size: 0: not known.
    """

    import_path: str
    args: str
    digest: str
    size: int = 0

    def read(self, bad: BadRecords, field: str | None) -> Iterator[tuple[str, Record]]:
        """Each text or dict that the function yields.

        Raises:
            DataError: it returns nothing that can be iterated, or something else than texts and dicts.
        """
        for number, record in enumerate(self._call(), start=1):
            where = f"{self.import_path}: item {number}"
            if isinstance(record, str | dict):
                yield where, record
            else:
                bad.refuse(f"{where} is a {type_name(record)}; expected a string or a dict")

    def _call(self) -> Iterable[Any]:
        function = import_object(self.import_path, DataError)
        with may_not_exit(f"data iterable {self.import_path}", DataError):
            given = function(**json.loads(self.args))
        if isinstance(given, str | dict) or not isinstance(given, Iterable):
            raise DataError(
                f"data iterable {self.import_path}: returned a {type_name(given)}; expected an iterable of "
                "texts or dicts"
            )
        return given


def iterable_pieces(import_path: str, args: dict[str, Any]) -> list[IterablePiece]:
    """One piece: how the function's items could be divided is not known.

    Raises:
        DataError: there is no such function, it does not take `args`, or they are no plain values.
    """
    function = import_object(import_path, DataError)
    _check_arguments(import_path, function, args)
    try:
        written = json.dumps(args, sort_keys=True)
    except TypeError as error:
        raise DataError(f"data iterable {import_path}: args hold no plain value: {error}") from None
    content = f"{import_path} {written} ".encode() + _source(function)
    return [IterablePiece(import_path, written, hashlib.blake2b(content, digest_size=16).hexdigest())]


def _check_arguments(import_path: str, function: Callable[..., Any], args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable written in C may have none
        return
    try:
        signature.bind(**args)
    except TypeError as mismatch:
        name = import_path.partition(":")[2]
        raise DataError(
            f"data iterable {import_path}: {name}{signature} cannot be called with "
            f"({', '.join(args)}): {mismatch}; change args"
        ) from None


def _source(function: Callable[..., Any]) -> bytes:
    """The text of the module that defines `function`; nothing where it has none (what is built in)."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = getattr(module, "__file__", None)
    return Path(path).read_bytes() if path is not None and Path(path).is_file() else b""
