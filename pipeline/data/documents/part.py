"""Divides a source into parts that are read and prepared independently. The entry point of this package."""

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
    """All texts and dicts that a user's function returns.

    Attributes:
        import_path: Function as `package.module:function`.
        args: Keyword arguments of the function, as JSON.
        digest: Hash of the import path, the arguments and the source of the function's module. The data that
            the function reads is not part of it; use an argument such as a version number to signal changes.
        size: 0, which means unknown.
    """

    import_path: str
    args: str
    digest: str
    size: int = 0

    @staticmethod
    def of(import_path: str, args: dict[str, Any]) -> IterablePiece:
        """Return one piece with all items; a function's items cannot be divided.

        Raises:
            DataError: There is no such function, it does not take `args`, or `args` are not JSON values.
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
            raise DataError(f"{start}args hold no plain value: {error}; use JSON types") from None
        file = getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__file__", None)
        source = Path(file).read_text("utf-8") if file is not None and Path(file).is_file() else ""
        return IterablePiece(import_path, written, hash_json([import_path, written, source]))

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield each text or dict that the function returns.

        Raises:
            DataError: The function returned no iterable, or an item is neither a text nor a dict.
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
TABLES = ("parquet", "arrow")  # formats with internal compression
# Tests add little to the other text. The other folders differ between installations of one Python version.
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
STDLIB_TOPICS = "pydoc_data/topics.py"


def find_files(paths: Sequence[str]) -> list[FileSpan]:
    """Return the files that `paths` name, each once, sorted within each entry.

    Names that begin with a dot are left out. So are links to folders inside of a folder, which could form a
    cycle.

    Raises:
        DataError: An entry does not exist, cannot be read, or contains no file with a known suffix.
    """
    found: dict[str, FileSpan] = {}
    for entry in paths:
        try:
            spans = _find_stdlib() if entry == PYTHON_STDLIB else _find_entry(entry)
        except OSError as error:  # permission denied, a name that is too long
            raise DataError(f"data.paths: {entry}: {error.strerror or error}") from None
        for span in spans:
            found.setdefault(os.path.realpath(span.path), span)
    return list(found.values())


def classify_file(path: Path) -> FileSpan | None:
    """Return the whole file, with kind and compression by its suffixes; `None` if a suffix is not known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    kind = SUFFIX_KINDS.get(suffixes[-1]) if suffixes else None
    return (
        None if kind is None or (compression and kind in TABLES) else FileSpan(str(path), kind, compression)
    )


def _find_entry(entry: str) -> list[FileSpan]:
    """Return the files that an entry of `data.paths` names: a file, a folder or a glob."""
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
        matches = [path]
        what = "folder"
    elif glob.has_magic(entry):
        matches = _expand_glob(entry)
        what = "glob"
    else:
        raise DataError(f"data.paths: {entry or repr(entry)} does not exist{_suggest_path(path)}")
    named = {match for match in matches if not match.is_dir()}
    files = sorted(named | {file for match in matches if match.is_dir() for file in _walk_files(match)})
    usable = []
    for file in files:
        span = classify_file(file)
        if span is not None and not file.exists():
            raise DataError(
                f"data.paths: {file} is a link to something that is not there; remove or repair it"
            )
        if span is not None and file.is_file() and (file in named or not _is_no_row_list(span)):
            usable.append(span)
    if not usable:
        suffixes = sorted({file.suffix.lower() or "without a suffix" for file in files})
        seen = f"only {len(files)} other files ({', '.join(suffixes[:5])})" if files else "nothing"
        raise DataError(f"data.paths: the {what} {entry} holds {seen}; expected files that end in {EXPECTED}")
    return usable


def _is_no_row_list(span: FileSpan) -> bool:
    """Return whether a JSON file holds no list of rows, as files of settings or an index do.

    Such files are left out if they were found in a folder.
    """
    if span.kind != "json":
        return False
    with open_stream(span.path, span.compression) as stream:
        return not stream.read(1000).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _expand_glob(entry: str) -> list[Path]:
    """Return the matches of a glob without hidden ones.

    pathlib's `**` does not follow links, unlike that of the glob module.
    """
    parts = Path(entry).expanduser().parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    pattern = parts[fixed:]
    try:
        found = list(root.glob(os.path.join(*pattern)))
    except ValueError as error:
        raise DataError(f"data.paths: {entry} is no glob: {error}") from None
    if any(part.startswith(".") for part in pattern):
        return found
    return [path for path in found if not any(name.startswith(".") for name in path.relative_to(root).parts)]


def _walk_files(folder: Path, left_out: frozenset[str] | set[str] = frozenset()) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise unreadable_error(error.filename or folder, error)

    for directory, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(directory, name) for name in files if not name.startswith("."))


def _find_stdlib() -> list[FileSpan]:
    """Return the Python files of the standard library, and the topics of Python's documentation."""
    root = Path(sysconfig.get_path("stdlib"))
    machine = [path.name for path in root.glob("config-*")]  # build settings of this installation
    files = sorted(
        file
        for file in _walk_files(root, STDLIB_LEFT_OUT | set(machine))
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    )
    if not files:
        raise DataError(f"data.paths: {PYTHON_STDLIB} finds no source in {root}; give your own text")
    topics = root / STDLIB_TOPICS
    return [FileSpan(str(file), "stdlib_topics" if file == topics else "stdlib_source") for file in files]


def _suggest_path(path: Path) -> str:
    """Return `; did you mean ...?` for the first component of a path that does not exist."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    names = [*os.listdir(missing.parent)] if missing.parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, [*names, PYTHON_STDLIB], n=1)
    if not close:
        return ""
    return f"; did you mean {close[0] if close[0] == PYTHON_STDLIB else missing.parent / close[0]}?"


PART_SIZE = 32 * 2**20  # bytes of input: seconds of work, so that little is lost if a process is killed
READING_VERSION = 2  # part of every digest: increase it when a change alters the documents that are read


@dataclass(frozen=True)
class SourcePart:
    """A share of a source that is read and prepared as a unit; picklable.

    Attributes:
        source: Name of the source.
        digest: Hash of the content and the settings for reading it; equal for parts with equal content.
        size: Bytes of input; 0 if not known.
        pieces: Files or other pieces of input, in order.
        text_field: Field of a row that holds the text.
        skip_bad_records: Whether to skip and count records that cannot be used.
        max_documents: Maximum number of records to read; `None` for all.
        fields: Field name in the layouts -> field name in the rows.
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
    """Return the parts of a source, in order; together they contain each of its documents once.

    Files that `digests` does not know are hashed, at about 1 GB/s per core; `max_documents` does not limit
    that. A source without any text is an error only after all of it is read: see `no_text_error`.

    Args:
        source: A source of the recipe.
        digests: Cache of the files' digests.
        part_size: Bytes of input in a part, if the source can be divided. Small files are grouped to about a
            quarter of it.

    Raises:
        DataError: The source has no files, none that can be read, or only empty ones.
    """
    pieces: Sequence[SourcePiece]
    if source.paths is not None:
        files = find_files(source.paths)
        whole = split_files(files, digests, part_size)
        if not whole:
            raise DataError(f"data.paths: no text in {len(files)} files, all empty (first: {files[0].path})")
        pieces = whole
        groups = _group_files(whole, part_size // 4)
    else:
        if source.dataset is not None:
            pieces = split_dataset(source, digests, part_size)
        else:
            assert source.iterable is not None  # the schema requires exactly one of the three
            pieces = [IterablePiece.of(source.iterable, source.args)]
        groups = [(piece,) for piece in pieces]
    if source.max_documents is not None:
        groups = [tuple(pieces)]  # one part, so that the first documents can be counted while reading
    return [_make_part(source, group) for group in groups]


def _group_files(pieces: Sequence[FilePiece], mean_size: int) -> list[tuple[SourcePiece, ...]]:
    """Group neighbouring small files into about `mean_size` bytes.

    The digest of a file decides whether it ends a group, so that a changed file does not alter other groups.
    """
    groups: list[list[SourcePiece]] = [[]]
    for piece in pieces:
        if piece.size >= mean_size:
            groups += [[piece], []]
            continue
        groups[-1].append(piece)
        if int(piece.digest[:16], 16) < 2**64 * piece.size // mean_size:
            groups.append([])
    return [tuple(group) for group in groups if group]


def _make_part(source: SourceConfig, pieces: tuple[SourcePiece, ...]) -> SourcePart:
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
    """Yield (location, record) of a part. Texts of white space are skipped; rows are not.

    Args:
        part: Part to read.
        tally: Receives the number of skipped records under `bad records`.

    Raises:
        DataError: A record is bad and may not be skipped, or a file cannot be read or has changed.
    """
    bad = BadRecordPolicy(part.skip_bad_records, tally)
    records = islice(_iter_records(part, bad, None), part.max_documents)
    if not part.fields:
        return records
    return ((where, _rename_fields(record, part.fields)) for where, record in records)


def read_texts(part: SourcePart, tally: Tally) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of a part, without empty texts and texts of white space. See `read_records`.

    A row without text is a bad record. Of a table, only the column with the text is read.
    """
    return islice(_iter_texts(part, BadRecordPolicy(part.skip_bad_records, tally)), part.max_documents)


def _iter_records(part: SourcePart, bad: BadRecordPolicy, column: str | None) -> Iterator[tuple[str, Record]]:
    for piece in part.pieces:
        for where, record in piece.read(bad, column):
            if not isinstance(record, str) or (record and not record.isspace()):
                yield where, record


def _rename_fields(record: Record, fields: Mapping[str, str]) -> Record:
    """Return a row whose fields have the names that the layouts use."""
    if isinstance(record, str):
        return record
    own = {name: record[theirs] for name, theirs in fields.items() if theirs in record}
    return {key: value for key, value in record.items() if key not in fields.values()} | own


def _iter_texts(part: SourcePart, bad: BadRecordPolicy) -> Iterator[tuple[str, str]]:
    for where, record in _iter_records(part, bad, part.text_field):
        try:
            text = extract_text(where, record, part.text_field)
        except DataError as error:
            bad.skip_or_raise(str(error))
            continue
        if text and not text.isspace():
            yield where, text


def no_text_error(source: SourceConfig, tally: Tally) -> DataError:
    """Return the error for a source whose parts were all read without finding any text."""
    given = source.dataset or source.iterable or ", ".join(source.paths or [])
    bad = tally[BAD_RECORDS]
    left_out = f"; {bad} bad records were skipped (bad_records: error shows the first)" if bad else ""
    dropped = "".join(f"; {count:,} {what}" for what, count in sorted(tally.items()) if what != BAD_RECORDS)
    if not dropped:
        return DataError(f"data source {source.name}: no document of {given} has any text{left_out}")
    cure = "; data.too_long=error names the first and the length it needs" * ("longer than" in dropped)
    return DataError(f"data source {source.name}: nothing of {given} can be used{dropped}{left_out}{cure}")
