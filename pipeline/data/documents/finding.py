"""Finds the files a recipe names: files, folders, globs and the standard library. Reads none of them."""

from __future__ import annotations

import codecs
import difflib
import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.data.documents.streams import COMPRESSIONS, Span, open_stream, unreadable
from pipeline.errors import DataError

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
    ".txt .md .rst, source code, .jsonl .json .csv .tsv .parquet .arrow .feather, or these with .gz or .zst"
)
# Tests say little that the rest does not; the others belong to one installation, not to a version of Python.
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
STDLIB_TOPICS = "pydoc_data/topics.py"


def find_files(paths: Sequence[str]) -> list[Span]:
    """The files that `paths` name, each once, sorted within each entry.

    Names that begin with a dot, and links to folders inside a folder, are left out: links cannot lead in
    circles.

    Raises:
        DataError: an entry does not exist, cannot be read, or holds no file of a known suffix.
    """
    found: dict[str, Span] = {}
    for entry in paths:
        try:
            spans = _find_stdlib() if entry == PYTHON_STDLIB else _find_entry(entry)
        except OSError as error:  # no right to look, a name that is too long
            raise DataError(f"data.paths: {entry}: {error.strerror or error}") from None
        for span in spans:
            found.setdefault(os.path.realpath(span.path), span)
    return list(found.values())


def whole_file(path: Path) -> Span | None:
    """The file, with what its suffixes say; None where they say nothing."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    kind = SUFFIX_KINDS.get(suffixes[-1]) if suffixes else None
    return None if kind is None else Span(str(path), kind, compression)


def _find_entry(entry: str) -> list[Span]:
    """The files of a file, a folder or a glob."""
    path = Path(entry).expanduser()
    if entry.strip() and path.is_file():
        span = whole_file(path)
        if span is None:
            raise DataError(f"data.paths: {entry} cannot be read, by its suffix; expected one of {EXPECTED}")
        return [span]
    if entry.strip() and path.exists() and not path.is_dir():
        raise DataError(f"data.paths: {entry} is no file: a pipe, a socket or a device; write it to a file")
    if entry.strip() and path.is_dir():
        matches, what = [path], "folder"
    elif glob.has_magic(entry):
        matches, what = _glob(entry), "glob"
    else:
        raise DataError(f"data.paths: {entry or repr(entry)} does not exist{_suggestion(path)}")
    named = {match for match in matches if not match.is_dir()}
    files = named | {file for match in matches if match.is_dir() for file in _walk(match)}
    spans = [
        span
        for file in sorted(files)
        if (span := whole_file(file)) is not None and (file in named or not _is_description(span))
    ]
    dangling = next((span.path for span in spans if not os.path.exists(span.path)), None)
    if dangling is not None:
        raise DataError(f"data.paths: {dangling} is a link to something that is not there; remove or mend it")
    usable = [span for span in spans if os.path.isfile(span.path)]
    if not usable:
        raise DataError(
            f"data.paths: the {what} {entry} holds {_seen(files)}; expected files that end in {EXPECTED}"
        )
    return usable


def _is_description(span: Span) -> bool:
    """Return whether a file of JSON that was found in a folder holds no list of rows: settings, an index."""
    if span.kind != "json" or not os.path.isfile(span.path):
        return False
    with open_stream(span.path, span.compression) as stream:
        return not stream.read(1000).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _seen(files: set[Path]) -> str:
    """`only 3 other files (.json, .pdf)`."""
    if not files:
        return "nothing"
    suffixes = Counter(file.suffix.lower() or "without a suffix" for file in sorted(files))
    common = ", ".join(suffix for suffix, _ in suffixes.most_common(4))
    return f"only {len(files)} other files ({common}{', ...' if len(suffixes) > 4 else ''})"


def _glob(entry: str) -> list[Path]:
    """Matches without hidden ones. pathlib's `**` follows no links; the glob module's goes in circles."""
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
        raise unreadable(error.filename or folder, error)

    for directory, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(directory, name) for name in files if not name.startswith("."))


def _find_stdlib() -> list[Span]:
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
    return [Span(str(file), "stdlib_topics" if file == topics else "stdlib_source") for file in files]


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
