"""Writes small files and reads sources, for the tests beside it."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest
import zstandard

from pipeline.config.data_schema import SourceConfig
from pipeline.data.documents.part import SourcePart, find_parts, read_records, read_texts
from pipeline.data.documents.records import Tally
from pipeline.data.documents.streams import DigestCache
from pipeline.errors import DataError

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def source(*paths: Path | str, **settings: object) -> SourceConfig:
    if paths:
        settings["paths"] = [str(path) for path in paths]
    return SourceConfig(name="web", **settings)


def parts_of(config: SourceConfig, cache: Path, **settings: int) -> list[SourcePart]:
    return find_parts(config, DigestCache(cache), **settings)


def read(config: SourceConfig, cache: Path, tally: Tally | None = None, **settings: int) -> list[Any]:
    """(where, record) of all parts, each read after a trip through pickle as in a worker."""
    parts = parts_of(config, cache, **settings)
    tally = Tally() if tally is None else tally
    return [found for part in parts for found in read_records(pickle.loads(pickle.dumps(part)), tally)]


def texts(config: SourceConfig, cache: Path, tally: Tally | None = None, **settings: int) -> list[str]:
    """Return the texts of all parts."""
    parts = parts_of(config, cache, **settings)
    tally = Tally() if tally is None else tally
    return [text for part in parts for _, text in read_texts(pickle.loads(pickle.dumps(part)), tally)]


def one_line(config: SourceConfig, cache: Path) -> str:
    """Return the error of reading a source: a DataError of one line."""
    with pytest.raises(DataError) as caught:
        texts(config, cache)
    message = str(caught.value)
    assert "\n" not in message
    return message
