"""Prepares one part: its records are read, tokenised and written, by one process, whole or not at all.

The bytes depend on the part, the tokenizer and the settings alone: not on threads, workers, the tokeniser
that was used, or how often somebody was killed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.documents.part import Part, read_records, read_texts
from pipeline.data.documents.records import BAD_RECORDS, Record, Tally
from pipeline.data.prepared.encoder import Document, Encoder, EncoderSettings, Records
from pipeline.data.prepared.part_files import PartWriter, held_lock, is_prepared, writing_to
from pipeline.errors import DataError

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
        eval_fraction: Share of the documents held out; 1: all of them.
        identity: What the key was made of; kept in the index for people to read.
        cache_dir: Of the recipe, expanded.
    """

    part: Part
    key: str
    eval_fraction: float
    identity: dict[str, Any]
    cache_dir: Path

    @property
    def folder(self) -> Path:
        return self.cache_dir / "parts" / self.key

    @property
    def label(self) -> str:
        """For messages."""
        return f"part {self.key[:8]} of {self.part.source}"


def prepare_part(
    task: PartTask, settings: EncoderSettings, encoder: Encoder, report: Report, wait: bool
) -> bool:
    """Makes the part's folder, unless it is there.

    Args:
        task: Which part.
        settings: Of the encoder.
        encoder: Made from them.
        report: Called for every batch, and while waiting; what it raises ends the work without a trace.
        wait: Wait for another process that is at it.

    Returns:
        False: another process is at it.

    Raises:
        DataError: a record cannot be used, or the cache cannot be written.
    """
    alive = (lambda: report(Advance())) if wait else None
    with held_lock(task.cache_dir, task.key, alive) as held:
        if held and not is_prepared(task.folder):
            _write(task, settings, encoder, report)
        return held


def _write(task: PartTask, settings: EncoderSettings, encoder: Encoder, report: Report) -> None:
    has_rows = settings.config.conversations is not None
    has_segments = settings.config.preferences is not None
    tally = Tally()
    records = read_records(task.part, tally) if has_rows else read_texts(task.part, tally)
    with writing_to(task.cache_dir, task.label):
        writer = PartWriter(task.folder, settings.dtype, has_rows, has_segments)
    try:
        size = 0
        for batch in _batches(records):
            documents = _encode(encoder, batch, tally, task.part.skip_bad_records)
            if documents:
                with writing_to(task.cache_dir, task.label):
                    writer.append(documents, task.eval_fraction)
            done = sum(len(document.key) for document in documents)
            size += done
            report(Advance(done, len(documents), sum(len(document.ids) for document in documents)))
        facts = {
            "identity": task.identity,
            "text_bytes": size,
            "tally": dict(sorted(tally.items())),
            "first": tally.first,
        }
        with writing_to(task.cache_dir, task.label):
            writer.finish(facts)
    except BaseException:
        writer.abandon()
        raise


def _encode(encoder: Encoder, batch: Records, tally: Tally, skip_bad: bool) -> list[Document]:
    """The documents of a batch. Where one record is bad and may be left out, they are encoded one by one."""
    counts = Tally()
    try:
        documents = encoder(batch, counts)
    except DataError:
        if not skip_bad:
            raise
    else:
        tally.add(counts)
        return documents
    documents = []
    for record in batch:
        try:
            documents += encoder([record], tally)
        except DataError as error:
            tally.note(BAD_RECORDS, str(error))
    return documents


def _batches(records: Iterable[tuple[str, Record]]) -> Iterator[Records]:
    """Records in lists of about BATCH_CHARACTERS together (more only where one record is longer)."""
    batch: Records = []
    length = 0
    for item in records:
        batch.append(item)
        length += _length(item[1])
        if length >= BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _length(record: Any) -> int:
    """About how many characters there are."""
    if isinstance(record, str):
        return len(record)
    if isinstance(record, dict):
        return sum(map(_length, record.values()), 16)
    return sum(map(_length, record), 16) if isinstance(record, list) else 16
