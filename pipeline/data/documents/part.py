"""Divides a source into parts that are read, and prepared, each by itself; the way in to this package."""

from __future__ import annotations

import codecs
import difflib
import glob
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.config.data_schema import SourceConfig
from pipeline.config.import_paths import exit_as_error, import_object
from pipeline.data.documents.hub import split_dataset
from pipeline.data.documents.pieces import FilePiece, split_files
from pipeline.data.documents.records import (
    BAD_RECORDS,
    BadRecordPolicy,
    Record,
    SourcePiece,
    Tally,
    extract_text,
    get_json_type_name,
)
from pipeline.data.documents.streams import (
    COMPRESSIONS,
    DigestCache,
    FileSpan,
    hash_json,
    open_stream,
    unreadable_error,
)
from pipeline.errors import DataError


@dataclass(frozen=True)
class IterablePiece:
    """All texts and dicts that a function of the user's returns.

    Attributes:
        import_path: `package.module:function`.
        args: Its keyword arguments, as JSON.
        digest: Of import path, arguments and the text of the function's module. An argument that names a
            version tells of a change in what the function reads.
        size: 0: not known.
    """

    import_path: str
    args: str
    digest: str
    size: int = 0

    @staticmethod
    def of(import_path: str, args: dict[str, Any]) -> IterablePiece:
        """Return the one piece: how the function's items could be divided is not known.

        Raises:
            DataError: there is no such function, it does not take `args`, or they are no plain values.
        """
        function = import_object(import_path, DataError)
        start = f"data iterable {import_path}: "
        try:
            inspect.signature(function).bind(**args)
        except TypeError as mismatch:
            call = f"{import_path.partition(':')[2]}{inspect.signature(function)}"
            raise DataError(
                f"{start}{call} cannot be called with ({', '.join(args)}): {mismatch}; change args"
            ) from None
        except ValueError:
            pass  # a callable written in C may have no signature
        try:
            written = json.dumps(args, sort_keys=True)
        except TypeError as error:
            raise DataError(f"{start}args hold no plain value: {error}") from None
        file = getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__file__", None)
        source = Path(file).read_text("utf-8") if file is not None and Path(file).is_file() else ""
        return IterablePiece(import_path, written, hash_json([import_path, written, source]))

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield each text or dict of the function.

        Raises:
            DataError: it returns nothing that can be iterated, or something else than texts and dicts.
        """
        function = import_object(self.import_path, DataError)
        with exit_as_error(f"data iterable {self.import_path}", DataError):
            given = function(**json.loads(self.args))
        if isinstance(given, str | dict) or not isinstance(given, Iterable):
            raise DataError(
                f"data iterable {self.import_path}: returned a {get_json_type_name(given)}; expected an "
                "iterable of texts or dicts"
            )
        for number, record in enumerate(given, start=1):
            where = f"{self.import_path}: item {number}"
            if isinstance(record, str | dict):
                yield where, record
            else:
                bad.skip_or_raise(f"{where} is a {get_json_type_name(record)}; expected a string or a dict")


PYTHON_STDLIB = "python_stdlib"
PROSE = ".txt .text .md .markdown .rst .tex .org .adoc"
CODE = (
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .kt .scala .groovy .js .mjs .cjs .jsx .ts .tsx .vue"
    " .go .rs .rb .php .pl .lua .r .jl .swift .m .mm .cs .fs .hs .ml .clj .ex .exs .erl .dart .zig .nim .f90"
    " .asm .s .v .sv .vhd .sh .bash .zsh .ps1 .bat .sql .html .htm .css .scss .less .xml .yaml .yml .toml"
    " .ini .cfg .cmake .proto .tf .graphql .el .lisp .scm .sol"
)
SUFFIX_KINDS = {
    **dict.fromkeys(f"{PROSE} {CODE}".split(), "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
EXPECTED = (
    ".txt .md .rst, source code, .jsonl .json .csv .tsv (also with .gz or .zst), .parquet .arrow .feather"
)
TABLES = ("parquet", "arrow")  # which have compression of their own
# Tests say little that the rest does not; the others belong to one installation, not to a version of Python.
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
STDLIB_TOPICS = "pydoc_data/topics.py"


def find_files(paths: Sequence[str]) -> list[FileSpan]:
    """Return the files that `paths` name, each once, sorted within each entry.

    Names that begin with a dot, and links to folders inside a folder, are left out: links cannot lead in
    circles.

    Raises:
        DataError: an entry does not exist, cannot be read, or holds no file of a known suffix.
    """
    found: dict[str, FileSpan] = {}
    for entry in paths:
        try:
            spans = _find_stdlib() if entry == PYTHON_STDLIB else _find_entry(entry)
        except OSError as error:  # no right to look, a name that is too long
            raise DataError(f"data.paths: {entry}: {error.strerror or error}") from None
        for span in spans:
            found.setdefault(os.path.realpath(span.path), span)
    return list(found.values())


def classify_file(path: Path) -> FileSpan | None:
    """Return the file, with what its suffixes say; `None` where they say nothing."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    kind = SUFFIX_KINDS.get(suffixes[-1]) if suffixes else None
    return (
        None if kind is None or (compression and kind in TABLES) else FileSpan(str(path), kind, compression)
    )


def _find_entry(entry: str) -> list[FileSpan]:
    """Return the files of a file, a folder or a glob."""
    path = Path(entry).expanduser()
    if entry.strip() and path.exists() and not path.is_dir():
        span = classify_file(path)
        if not path.is_file():
            raise DataError(
                f"data.paths: {entry} is no file: a pipe, a socket or a device; write it to a file"
            )
        if span is None:
            raise DataError(f"data.paths: {entry} cannot be read, by its suffix; expected one of {EXPECTED}")
        return [span]
    if entry.strip() and path.is_dir():
        matches, what = [path], "folder"
    elif glob.has_magic(entry):
        matches, what = _glob(entry), "glob"
    else:
        raise DataError(f"data.paths: {entry or repr(entry)} does not exist{_suggestion(path)}")
    named = {match for match in matches if not match.is_dir()}
    files = sorted(named | {file for match in matches if match.is_dir() for file in _walk(match)})
    usable = []
    for file in files:
        span = classify_file(file)
        if span is not None and not file.exists():
            raise DataError(f"data.paths: {file} is a link to something that is not there; remove or mend it")
        if span is not None and file.is_file() and (file in named or not _is_description(span)):
            usable.append(span)
    if not usable:
        suffixes = sorted({file.suffix.lower() or "without a suffix" for file in files})
        seen = f"only {len(files)} other files ({', '.join(suffixes[:5])})" if files else "nothing"
        raise DataError(f"data.paths: the {what} {entry} holds {seen}; expected files that end in {EXPECTED}")
    return usable


def _is_description(span: FileSpan) -> bool:
    """Return whether a file of JSON that was found in a folder holds no list of rows: settings, an index."""
    if span.kind != "json":
        return False
    with open_stream(span.path, span.compression) as stream:
        return not stream.read(1000).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _glob(entry: str) -> list[Path]:
    """Return matches without hidden ones. Unlike the glob module's, pathlib's `**` follows no links."""
    parts = Path(entry).expanduser().parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root, pattern = Path(*parts[:fixed]), parts[fixed:]
    try:
        found = list(root.glob(os.path.join(*pattern)))
    except ValueError as error:
        raise DataError(f"data.paths: {entry} is no glob: {error}") from None
    if any(part.startswith(".") for part in pattern):
        return found
    return [path for path in found if not any(name.startswith(".") for name in path.relative_to(root).parts)]


def _walk(folder: Path, left_out: frozenset[str] | set[str] = frozenset()) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise unreadable_error(error.filename or folder, error)

    for directory, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(directory, name) for name in files if not name.startswith("."))


def _find_stdlib() -> list[FileSpan]:
    """Return the standard library's own source, and the topics of its documentation."""
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
    return [FileSpan(str(file), "stdlib_topics" if file == topics else "stdlib_source") for file in files]


def _suggestion(path: Path) -> str:
    """Return `; did you mean ...?` for the first part of a path that does not exist."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    names = [*os.listdir(missing.parent)] if missing.parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, [*names, PYTHON_STDLIB], n=1)
    if not close:
        return ""
    return f"; did you mean {close[0] if close[0] == PYTHON_STDLIB else missing.parent / close[0]}?"


PART_SIZE = 32 * 2**20  # bytes of input: seconds of work, so that little is lost with a process
READING_VERSION = 2  # part of every digest: raise it when documents would come out differently


@dataclass(frozen=True)
class SourcePart:
    """A share of a source, in its order. Goes to other processes by pickle.

    Attributes:
        source: Name of the source.
        digest: Of the content and of how it is read. Two parts with equal content have the same one.
        size: Bytes of input; 0 where it is not known.
        pieces: What it is made of, in order.
        text_field: Field of a row that holds the text.
        skip_bad_records: Leave out and count what cannot be used.
        max_documents: The most that are read, or None.
        fields: Name of a layout -> name of that field in the rows.
    """

    source: str
    digest: str
    size: int
    pieces: tuple[SourcePiece, ...]
    text_field: str
    skip_bad_records: bool
    max_documents: int | None
    fields: Mapping[str, str] = field(default_factory=dict)


def find_parts(source: SourceConfig, digests: DigestCache, part_size: int = PART_SIZE) -> list[SourcePart]:
    """Return the parts of a source, in order: together they hold each of its documents once.

    Files that are new to `digests` are read once, at about 1 GB/s a core, with `max_documents` too. Whether
    any document has text shows only when all are read: see `no_text`.

    Args:
        source: Of the recipe.
        digests: What is known of files already.
        part_size: Bytes of input that a part is cut to, where it can be cut. Small files are put together
            to about a quarter of it.

    Raises:
        DataError: there is nothing, nothing that can be read, or only empty files.
    """
    pieces: Sequence[SourcePiece]
    if source.paths is not None:
        files = find_files(source.paths)
        whole = split_files(files, digests, part_size)
        if not whole:
            raise DataError(f"data.paths: no text in {len(files)} files, all empty (first: {files[0].path})")
        pieces, groups = whole, _group_files(whole, part_size // 4)
    else:
        if source.dataset is not None:
            pieces = split_dataset(source, digests, part_size)
        else:
            assert source.iterable is not None  # the schema: exactly one of the three
            pieces = [IterablePiece.of(source.iterable, source.args)]
        groups = [(piece,) for piece in pieces]
    if source.max_documents is not None:
        groups = [tuple(pieces)]  # which are the first ones shows only in one go
    return [_part(source, group) for group in groups]


def _group_files(pieces: Sequence[FilePiece], mean_size: int) -> list[tuple[SourcePiece, ...]]:
    """Group neighbours. A file's own digest ends a group: after a change groups end where they did."""
    groups: list[list[SourcePiece]] = [[]]
    for piece in pieces:
        if piece.size >= mean_size:
            groups += [[piece], []]
            continue
        groups[-1].append(piece)
        if int(piece.digest[:16], 16) < 2**64 * piece.size // mean_size:
            groups.append([])
    return [tuple(group) for group in groups if group]


def _part(source: SourceConfig, pieces: tuple[SourcePiece, ...]) -> SourcePart:
    skip = source.bad_records == "skip"
    reading = [READING_VERSION, source.text_field, source.max_documents, skip, source.fields]
    return SourcePart(
        source=source.name or "source",
        digest=hash_json([*reading, *(piece.digest for piece in pieces)]),
        size=sum(piece.size for piece in pieces),
        pieces=pieces,
        text_field=source.text_field,
        skip_bad_records=skip,
        max_documents=source.max_documents,
        fields=source.fields,
    )


def read_records(part: SourcePart, tally: Tally) -> Iterator[tuple[str, Record]]:
    """Yield (where, record) of a part. Texts of white space are left out, rows of it are not.

    Args:
        part: What to read.
        tally: `bad records` counts those that were skipped.

    Raises:
        DataError: a bad record that is not to be skipped; a file that cannot be read, or changed.
    """
    bad = BadRecordPolicy(part.skip_bad_records, tally)
    records = islice(_records(part, bad, None), part.max_documents)
    return ((where, _renamed(record, part.fields)) for where, record in records) if part.fields else records


def read_texts(part: SourcePart, tally: Tally) -> Iterator[tuple[str, str]]:
    """Yield (where, text) of a part; no text is empty or all white space. See `read_records`.

    A row without its text is a bad record like any other. Reads no column but that of the text.
    """
    return islice(_texts(part, BadRecordPolicy(part.skip_bad_records, tally)), part.max_documents)


def _records(part: SourcePart, bad: BadRecordPolicy, column: str | None) -> Iterator[tuple[str, Record]]:
    for piece in part.pieces:
        for where, record in piece.read(bad, column):
            if not isinstance(record, str) or (record and not record.isspace()):
                yield where, record


def _renamed(record: Record, fields: Mapping[str, str]) -> Record:
    """Return a row whose fields have the names of the layouts."""
    if isinstance(record, str):
        return record
    own = {name: record[theirs] for name, theirs in fields.items() if theirs in record}
    return {key: value for key, value in record.items() if key not in fields.values()} | own


def _texts(part: SourcePart, bad: BadRecordPolicy) -> Iterator[tuple[str, str]]:
    for where, record in _records(part, bad, part.text_field):
        try:
            text = extract_text(where, record, part.text_field)
        except DataError as error:
            bad.skip_or_raise(str(error))
            continue
        if text and not text.isspace():
            yield where, text


def no_text_error(source: SourceConfig, tally: Tally) -> DataError:
    """Return the error for a source of which every part was read and no document has text."""
    given = source.dataset or source.iterable or ", ".join(source.paths or [])
    bad = tally[BAD_RECORDS]
    left_out = f"; {bad} bad records were skipped (bad_records: error shows the first)" if bad else ""
    dropped = "".join(f"; {count:,} {what}" for what, count in sorted(tally.items()) if what != BAD_RECORDS)
    if not dropped:
        return DataError(f"data source {source.name}: no document of {given} has any text{left_out}")
    cure = "; data.too_long=error names the first and the length it needs" * ("longer than" in dropped)
    return DataError(f"data source {source.name}: nothing of {given} can be used{dropped}{left_out}{cure}")
