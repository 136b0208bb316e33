"""Divides files into pieces that can be read independently: whole files, ranges of lines or of row groups.

Ranges of lines are counted from the start of the file. Lines appended to a file change only its last range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeline.data.documents.readers import READERS, split_row_groups
from pipeline.data.documents.records import BadRecordPolicy, Record
from pipeline.data.documents.streams import (
    BUFFER_SIZE,
    DigestCache,
    FileSpan,
    FileStamp,
    open_stream,
    read_file_stamp,
)
from pipeline.errors import DataError

FileRanges = list[
    tuple[int, int | None, int, int, str]
]  # start, end and first of a FileSpan, size in bytes, digest
LOOK_VERSION = 1  # part of every cache entry: increase it when a change alters the ranges or digests below


@dataclass(frozen=True)
class FilePiece:
    """A piece of a file that can be read independently.

    Attributes:
        span: Range in the file.
        size: Number of bytes; for parquet files, the uncompressed size.
        digest: Hash of the content and kind.
        stamp: Size, time and inode of the file when the digest was made. If they have changed, `read` fails.
    """

    span: FileSpan
    size: int
    digest: str
    stamp: FileStamp

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield (location, record) one by one.

        Raises:
            DataError: A record is bad, or the file cannot be read or has changed since its digest was made. A
                change that keeps size, time and inode is not detected.
        """
        self._check_unchanged()
        yield from READERS[self.span.kind](self.span, bad, field)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if read_file_stamp(self.span.path) != self.stamp:
            raise DataError(
                f"{self.span.path}: changed since its digest was made; start again when it is finished"
            )


def split_files(files: Sequence[FileSpan], digests: DigestCache, size: int) -> list[FilePiece]:
    """Return the pieces of all files in order, of about `size` bytes if a file can be divided.

    Empty files have no pieces. Files that `digests` does not know are hashed, at about 1 GB/s per core.

    Raises:
        DataError: A file cannot be read, or a .parquet file is invalid.
    """
    found: dict[str, tuple[FileStamp, FileRanges]] = {}
    for kind, compression in sorted({(file.kind, file.compression) for file in files}):
        paths = [file.path for file in files if (file.kind, file.compression) == (kind, compression)]
        look = partial(_find_ranges, kind=kind, compression=compression, size=size)
        found |= digests.get_or_compute(paths, f"{kind} {compression} {size} {LOOK_VERSION}", look)
    return [
        FilePiece(replace(file, start=start, end=end, first=first), length, digest, found[file.path][0])
        for file in files
        for start, end, first, length, digest in found[file.path][1]
    ]


def _find_ranges(path: str, kind: str, compression: str, size: int) -> FileRanges:
    if kind == "jsonl" and not compression:
        return _split_lines(path, size)
    length, content = hash_file(path)
    if kind == "parquet":
        return [
            (start, end, first, held, _hash_range("parquet", content, start, end))
            for start, end, first, held in split_row_groups(path, size)
        ]
    if length == 0 and (compression or kind == "arrow"):
        raise DataError(f"{path}: is empty, so no {compression or 'Arrow'} file; fetch or write it again")
    return [(0, None, 1, length, _hash_range(f"{kind} {compression}", content))] if length else []


def _split_lines(path: str, size: int) -> FileRanges:
    found: FileRanges = []
    start = 0
    first = 1
    with open_stream(path, "") as stream:
        while content := stream.read(size):
            # Memory use is one range and one line.
            rest = b"" if content.endswith(b"\n") else stream.readline()
            end = start + len(content) + len(rest)
            hashed = hashlib.blake2b(content, digest_size=16)
            hashed.update(rest)
            found.append((start, end, first, end - start, _hash_range("jsonl ", hashed.hexdigest())))
            first += content.count(b"\n") + rest.count(b"\n")
            start = end
    return found


def hash_file(path: str) -> tuple[int, str]:
    """Return the length in bytes and the blake2b hash (16 bytes) of a file's content.

    Raises:
        DataError: The file cannot be read.
    """
    hashed = hashlib.blake2b(digest_size=16)
    length = 0
    with open_stream(path, "") as stream:
        while block := stream.read(BUFFER_SIZE):
            hashed.update(block)
            length += len(block)
    return length, hashed.hexdigest()


def _hash_range(kind: str, content: str, *place: int) -> str:
    return hashlib.blake2b(f"{kind} {content} {place}".encode(), digest_size=16).hexdigest()
