"""Writes one prepared part: its documents, tokenised and split in two, as raw little-endian arrays.

The bytes depend on the part, the tokenizer and the settings alone: not on threads, batches of other parts,
the tokeniser used, or how often somebody was killed on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from pipeline.config.data_schema import ChatDataConfig
from pipeline.data.documents.part import Part, read_records
from pipeline.data.documents.records import BAD_RECORDS
from pipeline.data.prepared.encoder import Document, Encoder, EncoderSettings, Records
from pipeline.data.prepared.folders import (
    find_damage,
    held_lock,
    new_folder,
    stamp,
    synchronise,
    writing_to,
    write_json,
)
from pipeline.errors import DataError

FORMAT_VERSION = 1  # part of every key: raise it when the files would come out differently
INDEX = "part.json"
SPLITS = ("train", "eval")
BATCH_CHARACTERS = 1_000_000  # encoded at once: enough for every thread, little enough for memory


@dataclass(frozen=True)
class Advance:
    """What was done since the last report: bytes of documents, documents, tokens."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0


Report = Callable[[Advance], None]


@dataclass(frozen=True)
class PartTask:
    """A part to prepare; picklable.

    Attributes:
        part: Where the records are.
        key: Name of the folder; stands for all that decides the bytes.
        encoding: How records become documents.
        eval_fraction: Share of the documents held out; 1: all of them.
        skip_bad: Leave out and count records that give no document, where they would be an error.
        identity: What the key was made of; kept in the index for people to read.
        cache_dir: Of the recipe, expanded.
    """

    part: Part
    key: str
    encoding: EncoderSettings
    eval_fraction: float
    skip_bad: bool
    identity: dict[str, Any]
    cache_dir: Path

    @property
    def folder(self) -> Path:
        return self.cache_dir / "parts" / self.key

    @property
    def label(self) -> str:
        """For messages."""
        return f"part {self.key[:8]} of {self.part.source}"


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a prepared part: counts, files with their checksums; None where there is none."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text("utf-8"))
        return index if index["format_version"] == FORMAT_VERSION and index["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage_of(folder: Path, verify: bool) -> str | None:
    """What is wrong with a prepared part; None: it is whole, or not there at all."""
    if not folder.exists():
        return None
    index = read_index(folder)
    if index is None:
        return f"{INDEX} cannot be read"
    return find_damage(folder, index["files"], verify)


def is_prepared(folder: Path) -> bool:
    return folder.exists() and damage_of(folder, verify=False) is None


def prepare_part(task: PartTask, encoder: Encoder, report: Report, wait: bool) -> bool:
    """Makes the part's folder, unless it is there.

    Args:
        wait: Wait for another process that is at it.
        report: Called for every batch; what it raises ends the work and leaves nothing behind.

    Returns:
        False: another process is at it.

    Raises:
        DataError: a record cannot be used, or the cache cannot be written.
    """
    alive = (lambda: report(Advance())) if wait else None
    with held_lock(task.cache_dir, task.key, alive) as held:
        if not held:
            return False
        if not is_prepared(task.folder):
            with ExitStack() as stack:
                with writing_to(task.cache_dir, task.label):
                    temporary = stack.enter_context(_guarded(task))
                _write(task, encoder, report, temporary)
    return True


def _guarded(task: PartTask) -> Any:
    return new_folder(task.folder)


def _write(task: PartTask, encoder: Encoder, report: Report, folder: Path) -> None:
    tally: Counter[str] = Counter()
    encoder.tally.clear()
    has_learned = isinstance(task.encoding.config, ChatDataConfig)
    with ExitStack() as stack:
        with writing_to(task.cache_dir, task.label):
            files = [
                stack.enter_context(SplitFiles(folder, split, task.encoding.dtype, has_learned))
                for split in SPLITS
            ]
        for batch in batches(read_records(task.part, tally), BATCH_CHARACTERS):
            documents = _encode(encoder, batch, task.skip_bad, tally)
            hashes = hash_documents(documents)
            held_out = is_held_out(hashes, task.eval_fraction)
            with writing_to(task.cache_dir, task.label):
                for split, chosen in zip(files, (~held_out, held_out), strict=True):
                    split.append(list(compress(documents, chosen.tolist())), hashes[chosen])
            size = sum(len(document.key) for document in documents)
            tokens = sum(len(document.ids) for document in documents)
            report(Advance(size, len(documents), tokens))
    tally.update(encoder.tally)
