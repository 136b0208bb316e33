"""Finds the text files a recipe names and reads documents from them; says where when one is bad.

Nothing is kept in memory: finding lists files, `read_documents` goes through them one by one.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DataError

PYTHON_STDLIB = "python_stdlib"
SUFFIX_KINDS = {".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".jsonl": "jsonl"}
SUFFIXES = " ".join(SUFFIX_KINDS)
# Tests say little that the rest does not; the others belong to one installation, not to a version of Python.
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class Source:
    """A file that holds one document or many; `kind` is a key of READERS."""

    path: Path
    kind: str


def find_sources(paths: list[str]) -> list[Source]:
    """The files `data.paths` names, each once, sorted within each entry.

    Names that begin with a dot, and links to folders inside a folder, are left out.

    Raises:
        DataError: an entry does not exist or holds no file of a known suffix.
    """
    found: dict[Path, Source] = {}
    for entry in paths:
        for source in _find_stdlib() if entry == PYTHON_STDLIB else _find_entry(entry):
            found.setdefault(source.path.resolve(), source)
    return list(found.values())


def _find_entry(entry: str) -> list[Source]:
    """Sources of a file, a folder or a glob."""
    path = Path(entry).expanduser()
    if path.is_file():
        if path.suffix.lower() not in SUFFIX_KINDS:
            raise DataError(f"data.paths: {entry} is no text file by its suffix; expected one of {SUFFIXES}")
        return [_source(path)]
    if path.is_dir():
        matches, what = [path], "folder"
    elif glob.has_magic(entry):
        matches, what = [Path(name) for name in glob.glob(str(path), recursive=True)], "glob"
    else:
        raise DataError(f"data.paths: {entry} does not exist{_suggestion(path)}")
    files = {file for match in matches for file in (_walk(match) if match.is_dir() else [match])}
    usable = sorted(file for file in files if file.suffix.lower() in SUFFIX_KINDS and file.is_file())
    if not usable:
        seen = f"only {len(files)} other files" if files else "nothing"
        raise DataError(f"data.paths: the {what} {entry} holds {seen}; expected files that end in {SUFFIXES}")
    return [_source(file) for file in usable]


def _source(path: Path) -> Source:
    return Source(path, SUFFIX_KINDS[path.suffix.lower()])


def _walk(folder: Path, left_out: frozenset[str] | set[str] = frozenset()) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(directory, name) for name in files if not name.startswith("."))


def _find_stdlib() -> list[Source]:
    """The standard library's own source, and the topics of its documentation."""
    root = Path(sysconfig.get_path("stdlib"))
    machine = [path.name for path in root.glob("config-*")]  # says how this Python was built
    files = sorted(
        file
        for file in _walk(root, STDLIB_LEFT_OUT | set(machine))
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    )
    if not files:
        raise DataError(f"data.paths: {PYTHON_STDLIB} finds no source in {root}; give your own text")
    topics = root / STDLIB_TOPICS
    return [Source(file, "stdlib_topics" if file == topics else "stdlib_source") for file in files]


def _suggestion(path: Path) -> str:
    """` (...; did you mean ...?)` for the first part of `path` that does not exist."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    names = os.listdir(missing.parent) if missing.parent.is_dir() else []
    if path.parent == Path("."):
        names.append(PYTHON_STDLIB)
    close = difflib.get_close_matches(missing.name, names, n=1)
    where = f" ({missing.parent.resolve()} has no {missing.name!r})"
    if not close:
        return where
    return f"{where}; did you mean {close[0] if close[0] == PYTHON_STDLIB else missing.parent / close[0]}?"


def read_documents(sources: list[Source], text_field: str) -> Iterator[str]:
    """Every document that holds more than white space, in order.

    Raises:
        DataError: a file cannot be read, is not UTF-8, or has a JSONL line without the text.
    """
    for source in sources:
        for text in READERS[source.kind](source.path, text_field):
            if text and not text.isspace():
                yield text


def digest_sources(sources: list[Source]) -> tuple[str, int]:
    """A hash of the content of all files in their order, and their size in bytes. About 1 GB/s."""
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    for source in sources:
        content = hashlib.blake2b(_read(source.path), digest_size=16)
        size += source.path.stat().st_size
        digest.update(source.kind.encode() + b"\0" + content.digest())
    return digest.hexdigest(), size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_text(path: Path, text_field: str) -> Iterator[str]:
    yield _decode(_read(path), path, 0).removeprefix("\ufeff")


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8: byte 0x{content[error.start]:02x} at byte offset {offset + error.start}; "
            "convert the file (iconv -t UTF-8) or leave it out"
        ) from None


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    """One document a line; the file is read line by line."""
    offset = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                content = _decode(line, path, offset)
                offset += len(line)
                if number == 1:
                    content = content.removeprefix("\ufeff")
                if not content.isspace():
                    yield _text_of_line(content, f"{path}:{number}", text_field)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _text_of_line(line: str, where: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:  # a JSONDecodeError, or a number too long to convert
        raise DataError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: is a {_json_type(record)}; expected an object with a field {text_field!r}")
    if text_field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{where}: no field {text_field!r}; its fields: {fields}. Set data.text_field")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} is a {_json_type(text)}; expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {text_field!r} is no valid text: {error.reason}") from None
    return text


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _read_stdlib_source(path: Path, text_field: str) -> Iterator[str]:
    try:
        yield _read(path).decode("utf-8")
    except UnicodeDecodeError:
        return  # a few modules declare another encoding


def _read_stdlib_topics(path: Path, text_field: str) -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "stdlib_source": _read_stdlib_source,
    "stdlib_topics": _read_stdlib_topics,
}
