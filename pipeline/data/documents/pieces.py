"""Divides files into pieces that can be read independently: entire files, ranges of lines or of row groups.

Ranges of lines are counted from the start of the file. So lines that are appended to a file change only its
last range.
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

FileRanges = list[tuple[int, int | None, int, int, str]]
"""Ranges of a file: `start`, `end` and `first` of a FileSpan, size in bytes, digest. A JSON value."""
RANGES_VERSION = 1  # part of every cache entry: increase it when a change alters the ranges or digests below


@dataclass(frozen=True)
class FilePiece:
    """A piece of a file that can be read independently.

    Attributes:
        span: Range in the file.
        size: Bytes of the range; in parquet files, its uncompressed bytes.
        digest: Hash of the content and kind, 32 hexadecimal digits.
        stamp: Stamp of the file when the digest was computed. If it has changed, `read` raises an error.
    """

    span: FileSpan
    size: int
    digest: str
    stamp: FileStamp

    def read(self, bad: BadRecordPolicy, field: str | None) -> Iterator[tuple[str, Record]]:
        """Yield (location, record) one by one.

        Raises:
            DataError: A record is bad and not skipped, or the file cannot be read or has changed since its
                digest was computed. A change that keeps size, time and inode is not detected.
        """
        self._check_unchanged()
        yield from READERS[self.span.kind](self.span, bad, field)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if read_file_stamp(self.span.path) != self.stamp:
            raise DataError(
                f"{self.span.path}: changed since its digest was computed; start again when no program "
                "writes to it"
            )


def split_files(files: Sequence[FileSpan], digests: DigestCache, size: int) -> list[FilePiece]:
    """Return the pieces of all files, in order.

    Only plain JSONL files and parquet files are divided. Empty files have no pieces. Files whose digest is
    not in the cache are hashed, at about 1 GB/s per core.

    Args:
        files: The files, each from its start to its end.
        digests: Cache of the ranges and digests of files.
        size: Approximate size of a piece in bytes, if the file can be divided.

    Raises:
        DataError: A file cannot be read, is invalid or changes while it is read.
    """
    ranges_by_path: dict[str, tuple[FileStamp, FileRanges]] = {}
    for kind, compression in sorted({(file.kind, file.compression) for file in files}):
        paths = [file.path for file in files if (file.kind, file.compression) == (kind, compression)]
        find_ranges = partial(_find_ranges, kind=kind, compression=compression, size=size)
        value_name = f"{kind} {compression} {size} {RANGES_VERSION}"
        ranges_by_path |= digests.get_or_compute(paths, value_name, find_ranges)
    pieces = []
    for file in files:
        stamp, ranges = ranges_by_path[file.path]
        for start, end, first, num_bytes, digest in ranges:
            span = replace(file, start=start, end=end, first=first)
            pieces.append(FilePiece(span, num_bytes, digest, stamp))
    return pieces


def _find_ranges(path: str, kind: str, compression: str, size: int) -> FileRanges:
    """Return the ranges of one file; none if it is empty.

    Raises:
        DataError: The file cannot be read or is invalid, or it is empty although its format has a header.
    """
    if kind == "jsonl" and not compression:
        return _split_lines(path, size)
    length, content_digest = hash_file(path)
    if kind == "parquet":
        return [
            (start, end, first, num_bytes, _hash_range("parquet", content_digest, start, end))
            for start, end, first, num_bytes in split_row_groups(path, size)
        ]
    if length == 0 and (compression or kind == "arrow"):
        raise DataError(f"{path}: is empty, so no {compression or 'Arrow'} file; fetch or write it again")
    if length == 0:
        return []
    return [(0, None, 1, length, _hash_range(f"{kind} {compression}", content_digest))]


def _split_lines(path: str, size: int) -> FileRanges:
    """Return ranges of complete lines of about `size` bytes."""
    ranges: FileRanges = []
    start = 0
    first = 1
    with open_stream(path, "") as stream:
        while content := stream.read(size):
            # Hashed separately, so that memory is needed for one range and one line, and not for their sum.
            rest = b"" if content.endswith(b"\n") else stream.readline()
            end = start + len(content) + len(rest)
            hasher = hashlib.blake2b(content, digest_size=16)
            hasher.update(rest)
            ranges.append((start, end, first, end - start, _hash_range("jsonl ", hasher.hexdigest())))
            first += content.count(b"\n") + rest.count(b"\n")
            start = end
    return ranges


def hash_file(path: str) -> tuple[int, str]:
    """Return the length in bytes and the blake2b hash, 32 hexadecimal digits, of a file's content.

    Raises:
        DataError: The file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    length = 0
    with open_stream(path, "") as stream:
        while block := stream.read(BUFFER_SIZE):
            hasher.update(block)
            length += len(block)
    return length, hasher.hexdigest()


def _hash_range(kind: str, content_digest: str, *bounds: int) -> str:
    """Return the digest of a range.

    Args:
        kind: Kind and compression of the file.
        content_digest: Digest of the range's content, or of the entire file's.
        *bounds: Start and end of the range, if `content_digest` is the entire file's.
    """
    return hashlib.blake2b(f"{kind} {content_digest} {bounds}".encode(), digest_size=16).hexdigest()
