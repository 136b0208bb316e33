"""Divides a source into parts that are read and prepared independently. The entry point of this package.

A source has pieces: ranges of files, rows of a data set, or all items of a function. A part is a group of
pieces.
"""

from __future__ import annotations

import codecs
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
from pipeline.files import suggest_path


@dataclass(frozen=True)
class IterablePiece:
    """All texts and dicts that a user's function returns.

    Attributes:
        import_path: Function as `package.module:function`.
        args: Keyword arguments of the function, as JSON.
        digest: Hash of the import path, the arguments and the source code of the function's module. Data that
            the function reads does not change it. So a user who changes the data must change an argument,
            such as a version number.
        size: 0, which means that the number of bytes is not known.
    """

    import_path: str
    args: str
    digest: str
    size: int = 0

    @staticmethod
    def from_function(import_path: str, args: dict[str, Any]) -> IterablePiece:
        """Return one piece with all items of a function, because they cannot be divided.

        The function is imported and not called.

        Raises:
            DataError: There is no such function, it does not take `args`, or `args` are not JSON values.
        """
        function = import_object(import_path, DataError)
        start = f"iterable {import_path}: "
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
            args_json = json.dumps(args, sort_keys=True)
        except TypeError as error:
            raise DataError(
                f"{start}args contain a value that is not JSON: {error}; use JSON types"
            ) from None
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        source_code = Path(file).read_text("utf-8") if file is not None and Path(file).is_file() else ""
        digest = hash_json([import_path, args_json, source_code])
        return IterablePiece(import_path, args_json, digest)

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield each text or dict that the function returns.

        Raises:
            DataError: The function does not return an iterable or calls `sys.exit`, or an item is neither a
                text nor a dict. Other exceptions of the function keep their type.
        """
        function = import_object(self.import_path, DataError)
        with exit_as_error(f"iterable {self.import_path}", DataError):
            items = function(**json.loads(self.args))
        if isinstance(items, str | dict) or not isinstance(items, Iterable):
            raise DataError(
                f"iterable {self.import_path}: returned a {get_json_type_name(items)}; expected an "
                "iterable of texts or dicts"
            )
        for number, record in enumerate(items, start=1):
            where = f"{self.import_path}: item {number}"
            if isinstance(record, str | dict):
                yield where, record
            else:
                bad.skip_or_raise(f"{where} is a {get_json_type_name(record)}; expected a string or a dict")


PYTHON_STDLIB = "python_stdlib"  # entry of `data.paths` that stands for Python's standard library
PROSE_SUFFIXES = ".txt .text .md .markdown .rst .tex .org .adoc"
CODE_SUFFIXES = (
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .kt .scala .groovy .js .mjs .cjs .jsx .ts .tsx .vue"
    " .go .rs .rb .php .pl .lua .r .jl .swift .m .mm .cs .fs .hs .ml .clj .ex .exs .erl .dart .zig .nim .f90"
    " .asm .s .v .sv .vhd .sh .bash .zsh .ps1 .bat .sql .html .htm .css .scss .less .xml .yaml .yml .toml"
    " .ini .cfg .cmake .proto .tf .graphql .el .lisp .scm .sol"
)
SUFFIX_KINDS = {
    **dict.fromkeys(f"{PROSE_SUFFIXES} {CODE_SUFFIXES}".split(), "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""`FileSpan.kind` by the suffix of the file, in lower case."""
READABLE_FILES = (
    ".txt .md .rst, source code, .jsonl .json .csv .tsv (also with .gz or .zst), .parquet .arrow .feather"
)
COMPRESSED_KINDS = ("parquet", "arrow")  # formats with internal compression: not read from .gz or .zst
# Folders that are not read. Tests add little to the other text. The other folders differ between
# installations of one Python version.
SKIPPED_STDLIB_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
STDLIB_TOPICS = "pydoc_data/topics.py"  # Python's documentation, as a dict of texts


def find_files(paths: Sequence[str]) -> list[FileSpan]:
    """Return the files that entries of `data.paths` name, each file once, sorted within each entry.

    Files and folders whose names begin with a dot are left out. Links to folders inside of a folder are not
    followed, because they could form a cycle.

    Args:
        paths: Entries: files, folders, globs, or PYTHON_STDLIB.

    Raises:
        DataError: An entry does not exist, cannot be read, or contains no file with a known suffix.
    """
    files: dict[str, FileSpan] = {}  # by the path without links
    for entry in paths:
        try:
            spans = _find_stdlib_files() if entry == PYTHON_STDLIB else _find_files_of_entry(entry)
        except OSError as error:  # permission denied, a name that is too long
            raise DataError(f"data.paths: {entry}: {error.strerror or error}") from None
        for span in spans:
            files.setdefault(os.path.realpath(span.path), span)
    return list(files.values())


def classify_file(path: Path) -> FileSpan | None:
    """Return the span of an entire file, with kind and compression by its suffixes.

    Returns:
        The span; `None` if the suffix is not known, or if it is a compression suffix after that of a format
        with internal compression (COMPRESSED_KINDS).
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    kind = SUFFIX_KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None or (compression and kind in COMPRESSED_KINDS):
        return None
    return FileSpan(str(path), kind, compression)


def _find_files_of_entry(entry: str) -> list[FileSpan]:
    """Return the files that an entry of `data.paths` names: a file, a folder or a glob.

    Raises:
        DataError: The entry does not exist, or contains no file that can be read.
        OSError: The system cannot read a folder.
    """
    path = Path(entry).expanduser()
    if entry.strip() and path.exists() and not path.is_dir():
        span = classify_file(path)
        if not path.is_file():
            raise DataError(
                f"data.paths: {entry} is a pipe, a socket or a device; write its content to a file, and name "
                "that file"
            )
        if span is None:
            raise DataError(
                f"data.paths: {entry} has no suffix that can be read; expected one of {READABLE_FILES}"
            )
        return [span]
    if entry.strip() and path.is_dir():
        matches = [path]
        what = "folder"
    elif glob.has_magic(entry):
        matches = _expand_glob(entry)
        what = "glob"
    else:
        hint = suggest_path(path, [PYTHON_STDLIB])
        raise DataError(f"data.paths: {entry or repr(entry)} does not exist{hint}")
    matched_files = {match for match in matches if not match.is_dir()}
    files_in_folders = {file for match in matches if match.is_dir() for file in _walk_files(match)}
    files = sorted(matched_files | files_in_folders)
    usable = []
    for file in files:
        span = classify_file(file)
        if span is not None and not file.exists():
            raise DataError(
                f"data.paths: {file} is a link to a file that does not exist; remove or repair the link"
            )
        if span is None or not file.is_file():
            continue
        # Leave out JSON files that a folder contains unless they are lists of rows: most are settings.
        if file in matched_files or span.kind != "json" or _begins_with_list(span):
            usable.append(span)
    if not usable:
        suffixes = sorted({file.suffix.lower() or "without a suffix" for file in files})
        content = f"only files of other types ({', '.join(suffixes[:5])})" if files else "no files"
        raise DataError(
            f"data.paths: the {what} {entry} has {content}; expected files that end in {READABLE_FILES}"
        )
    return usable


def _begins_with_list(span: FileSpan) -> bool:
    """Return whether the first character of a JSON file opens a list."""
    with open_stream(span.path, span.compression) as stream:
        return stream.read(1000).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _expand_glob(entry: str) -> list[Path]:
    """Return the matches of a glob, without hidden ones unless the pattern names them.

    Uses pathlib, because its `**` does not follow links, unlike `**` of the glob module.

    Raises:
        DataError: The pattern is invalid.
    """
    components = Path(entry).expanduser().parts
    num_fixed = next(index for index, component in enumerate(components) if glob.has_magic(component))
    root = Path(*components[:num_fixed])
    pattern = components[num_fixed:]
    try:
        matches = list(root.glob(os.path.join(*pattern)))
    except ValueError as error:
        raise DataError(f"data.paths: {entry} is not a valid glob: {error}") from None
    if any(component.startswith(".") for component in pattern):
        return matches
    return [
        match for match in matches if not any(name.startswith(".") for name in match.relative_to(root).parts)
    ]


def _walk_files(folder: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, except hidden ones.

    Args:
        folder: The folder.
        skipped: Names of subfolders that are not read, on any level.

    Raises:
        DataError: A folder cannot be read.
    """

    def raise_unreadable(error: OSError) -> None:
        raise unreadable_error(error.filename or folder, error)

    for directory, folders, files in os.walk(folder, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        yield from (Path(directory, name) for name in files if not name.startswith("."))


def _find_stdlib_files() -> list[FileSpan]:
    """Return the Python files of the standard library, and the topics of Python's documentation.

    Raises:
        DataError: This installation of Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    build_folders = {path.name for path in root.glob("config-*")}  # build settings of this installation
    files = sorted(
        file
        for file in _walk_files(root, SKIPPED_STDLIB_FOLDERS | build_folders)
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    )
    if not files:
        raise DataError(f"data.paths: {PYTHON_STDLIB}: there are no source files in {root}; use other text")
    topics = root / STDLIB_TOPICS
    return [FileSpan(str(file), "stdlib_topics" if file == topics else "stdlib_source") for file in files]


PART_SIZE = 32 * 2**20  # bytes of input: at most a minute of work is lost if a process is killed
READING_VERSION = 2  # part of every digest: increase it when a change alters the documents that are read


@dataclass(frozen=True)
class SourcePart:
    """Pieces of a source that are read and prepared as a unit; picklable.

    Attributes:
        source: Name of the source.
        digest: Hash of the content and the settings for reading it, 32 hexadecimal digits.
        size: Bytes of input; 0 if not known.
        pieces: Ranges of files or other pieces of input, in order.
        text_field: Field of a row that contains the text.
        skip_bad_records: Whether to skip and count records that cannot be used.
        max_documents: Maximum number of records to read; `None` for all.
        fields: Names of fields in the rows, by the names that the layouts use (`fields` of the source).
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

    Files whose digest is not in the cache are hashed, at about 1 GB/s per core, even if `max_documents` is
    small. Whether the documents have any text is known only after all parts are read: see `no_text_error`.

    Args:
        source: A source of the recipe.
        digests: Cache of the files' digests.
        part_size: Approximate bytes of input in a part, if the source can be divided. Small files are grouped
            into parts of about a quarter of this size.

    Raises:
        DataError: The source cannot be found or read, or it is empty.
    """
    pieces: Sequence[SourcePiece]
    if source.paths is not None:
        files = find_files(source.paths)
        file_pieces = split_files(files, digests, part_size)
        if not file_pieces:
            raise DataError(f"data.paths: {len(files)} files, all empty (first: {files[0].path}); add text")
        pieces = file_pieces
        groups = _group_files(file_pieces, part_size // 4)
    else:
        if source.dataset is not None:
            pieces = split_dataset(source, digests, part_size)
        else:
            assert source.iterable is not None  # the schema requires exactly one of the three
            pieces = [IterablePiece.from_function(source.iterable, source.args)]
        groups = [(piece,) for piece in pieces]
    if source.max_documents is not None:
        groups = [tuple(pieces)]  # one part, so that the first documents can be counted while reading
    return [_make_part(source, group) for group in groups]


def _group_files(pieces: Sequence[FilePiece], mean_size: int) -> list[tuple[SourcePiece, ...]]:
    """Group neighbouring small pieces into groups of about `mean_size` bytes; larger pieces stay alone.

    A piece ends its group with the probability `size / mean_size`, drawn from its digest. The sizes of
    earlier pieces do not matter. So a changed file alters only its own group and the next one.
    """
    groups: list[list[SourcePiece]] = [[]]
    for piece in pieces:
        if piece.size >= mean_size:
            groups += [[piece], []]
            continue
        groups[-1].append(piece)
        first_64_bits = int(piece.digest[:16], 16)
        if first_64_bits < 2**64 * piece.size // mean_size:
            groups.append([])
    return [tuple(group) for group in groups if group]


def _make_part(source: SourceConfig, pieces: tuple[SourcePiece, ...]) -> SourcePart:
    skip = source.bad_records == "skip"
    settings = [READING_VERSION, source.text_field, source.max_documents, skip, source.fields]
    return SourcePart(
        source=source.name or "source",
        digest=hash_json([*settings, *(piece.digest for piece in pieces)]),
        size=sum(piece.size for piece in pieces),
        pieces=pieces,
        text_field=source.text_field,
        skip_bad_records=skip,
        max_documents=source.max_documents,
        fields=source.fields,
    )


def read_records(part: SourcePart, tally: Tally) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) of a part, for chat and preference data.

    Empty texts and texts of white space are left out; rows never are.

    Args:
        part: Part to read.
        tally: Counts the skipped records as BAD_RECORDS.

    Raises:
        DataError: A record is bad and not skipped, or a file cannot be read or has changed.
    """
    bad = BadRecordPolicy(part.skip_bad_records, tally)
    records = islice(_iter_records(part, bad, None), part.max_documents)
    if not part.fields:
        return records
    return ((where, _rename_fields(record, part.fields)) for where, record in records)


def read_texts(part: SourcePart, tally: Tally) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of a part, without empty texts and texts of white space.

    A row without a text field is a bad record. Only the column with the text is read from a table.

    Args:
        part: Part to read.
        tally: Counts the skipped records as BAD_RECORDS.

    Raises:
        DataError: A record is bad and not skipped, or a file cannot be read or has changed.
    """
    return islice(_iter_texts(part, BadRecordPolicy(part.skip_bad_records, tally)), part.max_documents)


def _iter_records(part: SourcePart, bad: BadRecordPolicy, column: str | None) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) of all pieces; rows may have `column` alone, or all fields if it is `None`."""
    for piece in part.pieces:
        for where, record in piece.read(bad, column):
            is_blank = isinstance(record, str) and (not record or record.isspace())
            if not is_blank:
                yield where, record


def _rename_fields(record: Record, fields: Mapping[str, str]) -> Record:
    """Return a row whose fields have the names that the layouts use; return a text unchanged.

    Args:
        record: The record.
        fields: Names of fields in the row, by the names that the layouts use.
    """
    if isinstance(record, str):
        return record
    renamed = {name: record[name_in_row] for name, name_in_row in fields.items() if name_in_row in record}
    others = {key: value for key, value in record.items() if key not in fields.values()}
    return others | renamed


def _iter_texts(part: SourcePart, bad: BadRecordPolicy) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of all records that have one."""
    for where, record in _iter_records(part, bad, part.text_field):
        try:
            text = extract_text(where, record, part.text_field)
        except DataError as error:
            bad.skip_or_raise(str(error))
            continue
        if text and not text.isspace():
            yield where, text


def no_text_error(source: SourceConfig, tally: Tally) -> DataError:
    """Return the error for a source without a single document that can be used.

    Args:
        source: The source.
        tally: Counts of skipped and dropped records of all parts.
    """
    location = source.dataset or source.iterable or ", ".join(source.paths or [])
    num_bad = tally[BAD_RECORDS]
    skipped = f"; {num_bad} bad records were skipped (bad_records: error shows the first)" if num_bad else ""
    dropped = "".join(f"; {count:,} {kind}" for kind, count in sorted(tally.items()) if kind != BAD_RECORDS)
    if not dropped:
        return DataError(
            f"data source {source.name}: no document of {location} has any text{skipped}; add text, or "
            "remove the source"
        )
    is_too_long = "longer than" in dropped
    advice = "; data.too_long=error names the first and the length it needs" if is_too_long else ""
    return DataError(
        f"data source {source.name}: nothing of {location} can be used{dropped}{skipped}{advice}"
    )
