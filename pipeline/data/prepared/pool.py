"""Prepares parts, in this process or in worker processes; a part that is finished stays whatever happens."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipeline.data.documents.part import SourcePart, read_records, read_texts
from pipeline.data.documents.records import BAD_RECORDS, Record, Tally
from pipeline.data.prepared.encoder import Encoder, EncoderSettings, Records, TextEncoder, TokenizedDocument
from pipeline.data.prepared.part_files import (
    PartWriter,
    discard_unfinished,
    explain_write_errors,
    fill_folder,
    hold_lock,
    is_prepared,
)
from pipeline.errors import DataError
from pipeline.files import format_bytes

BATCH_CHARACTERS = 1_000_000  # encoded at once: enough for every thread, little enough for memory
LINE_SECONDS = 10.0  # between two lines in a log: a batch job shows that it lives
LOOK_SECONDS = 1.0  # between two looks at what the workers have done
COUNTED = ("bytes", "documents", "tokens")
SCRIPT_RAN_CODE = 3  # of a worker in which the user's script, which it imports, began to prepare data itself
log = logging.getLogger(__name__)


ReportProgress = Callable[[Mapping[str, int]], None]
"""Is called with the bytes, documents and tokens since the last call."""


@dataclass(frozen=True)
class PartTask:
    """A part to prepare; picklable.

    Attributes:
        part: Where the records are.
        key: Name of the folder; stands for all that decides the bytes.
        eval_fraction: Share of the documents held out; 1: all of them.
        identity: Values that the key is made of; the index has them for people to read.
        cache_dir: Of the recipe, expanded.
    """

    part: SourcePart
    key: str
    eval_fraction: float
    identity: dict[str, Any]
    cache_dir: Path

    @property
    def folder(self) -> Path:
        return self.cache_dir / "parts" / self.key

    @property
    def label(self) -> str:
        """Name of the part in messages."""
        return f"part {self.key[:8]} of {self.part.source}"


class PrepareProgress:
    """Adds up what is done, and logs a line now and then."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._finished_parts = 0
        self._done: Counter[str] = Counter()
        self._start = self._last_line = time.monotonic()

    def add(self, done: Mapping[str, int]) -> None:
        """Count what was prepared since the last call."""
        self._done.update(done)
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            log.info("preparing: %d of %d parts, %s", self._finished_parts, self._num_parts, self)

    def finish_part(self) -> None:
        """Count a part that is there."""
        self._finished_parts += 1

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        size, tokens = self._done["bytes"], self._done["tokens"]
        return (
            f"{self._done['documents']:,} documents, {tokens:,} tokens, {format_bytes(size)} of text in "
            f"{seconds:.1f} s: {format_bytes(size / seconds)}/s, {tokens / seconds:,.0f} tokens/s"
        )


def prepare_part(
    task: PartTask, settings: EncoderSettings, encoder: Encoder, report: ReportProgress, wait: bool
) -> bool:
    """Make the part's folder, unless it is there.

    Args:
        task: Which part.
        settings: Of the encoder.
        encoder: Made from them.
        report: Called for every batch.
        wait: Whether to wait for another process that prepares the same part.

    Returns:
        Whether the part is there. If not, another process prepares it.

    Raises:
        DataError: a record cannot be used, the cache cannot be written, or there is no memory left.
    """
    notice = f"another process prepares {task.label}: waiting for it"
    with hold_lock(task.cache_dir, task.key, (lambda: notice) if wait else None) as held:
        if held and not is_prepared(task.folder):
            try:
                _write(task, settings, encoder, report)
            except MemoryError:
                raise DataError(f"no memory left for {task.label}; lower data.prepare_workers") from None
        return held


def _write(task: PartTask, settings: EncoderSettings, encoder: Encoder, report: ReportProgress) -> None:
    has_rows = settings.config.conversations is not None
    has_segments = settings.config.preferences is not None
    tally = Tally()
    records = read_records(task.part, tally) if has_rows else read_texts(task.part, tally)
    with fill_folder(task.folder, task.cache_dir, task.label) as folder:
        with explain_write_errors(task.cache_dir, task.label):
            writer = PartWriter(folder, settings.dtype, has_rows, has_segments)
        for batch in _batches(records):
            documents = _encode(encoder, batch, tally, task.part.skip_bad_records)
            if documents:
                with explain_write_errors(task.cache_dir, task.label):
                    writer.append(documents, task.eval_fraction)
            sizes = {
                "bytes": sum(len(document.key) for document in documents),
                "documents": len(documents),
                "tokens": sum(len(document.ids) for document in documents),
            }
            report(sizes)
        facts = {"identity": task.identity, "tally": dict(sorted(tally.items())), "first": tally.first}
        with explain_write_errors(task.cache_dir, task.label):
            writer.finish(facts)


def _encode(encoder: Encoder, batch: Records, tally: Tally, skip_bad: bool) -> list[TokenizedDocument]:
    """Return the documents of a batch. If a record is bad and may be left out, each is encoded by itself."""
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
    """Yield records in lists of about BATCH_CHARACTERS together."""
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
    """Return about how many characters there are."""
    if isinstance(record, str):
        return len(record)
    if isinstance(record, dict):
        return sum(map(_length, record.values()), 16)
    return sum(map(_length, record), 16) if isinstance(record, list) else 16


def build_encoder(settings: EncoderSettings) -> Encoder:
    """Return the encoder of the recipe's kind of data.

    Raises:
        DataError: the tokenizer does not fit the data (no chat template).
    """
    if settings.config.chat is not None:
        from pipeline.data.prepared.chat_encoder import ChatEncoder

        return ChatEncoder(settings)
    if settings.config.preferences is not None:
        from pipeline.data.prepared.preference_encoder import PreferenceEncoder

        return PreferenceEncoder(settings)
    return TextEncoder(settings)


def prepare_here(
    tasks: Sequence[PartTask], settings: EncoderSettings, wait: bool, progress: PrepareProgress
) -> list[PartTask]:
    """Prepare parts in this process, with the tokeniser's own threads; see `prepare_in_pool`."""
    encoder = build_encoder(settings)
    left = []
    for task in tasks:
        if prepare_part(task, settings, encoder, progress.add, wait):
            progress.finish_part()
        else:
            left.append(task)
    return left


class _RecordingContext(SpawnContext):
    """Records the processes that it starts; multiprocessing.active_children() forgets those that have ended.

    Attributes:
        started: Processes in the order of their start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        process = SpawnProcess(*arguments, **named)
        self.started.append(process)
        return process


def prepare_in_pool(
    tasks: Sequence[PartTask],
    settings: EncoderSettings,
    workers: int,
    wait: bool,
    progress: PrepareProgress,
) -> list[PartTask]:
    """Prepare parts in worker processes; an error ends the workers.

    Returns:
        Parts that another process prepares.

    Raises:
        DataError: a record cannot be used, the cache cannot be written, or a worker was killed.
    """
    context = _RecordingContext()
    counts = context.Array("q", len(COUNTED))
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(settings, counts))
    # Start all workers before the pool's thread watches them: a worker that dies while another one is started
    # would break that thread or the start.
    pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]
    # Large ones first, so that workers run out of work at about the same time.
    by_size = sorted(tasks, key=lambda task: task.part.size, reverse=True)
    left = []
    ended: queue.SimpleQueue[Future[bool]] = queue.SimpleQueue()
    counted = Counter[str]()
    # Ctrl-C reaches every process of a terminal: workers inherit it blocked, and this process ends them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            futures = {pool.submit(_work, task, wait): task for task in by_size}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in futures:
            future.add_done_callback(ended.put)
        num_running = len(futures)
        while num_running:
            try:
                future = ended.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                pass
            else:
                num_running -= 1
                if future.result():
                    progress.finish_part()
                else:
                    left.append(futures[future])
            done = Counter(dict(zip(COUNTED, counts.get_obj(), strict=True)))
            progress.add(done - counted)
            counted = done
    except BaseException as error:
        for process in context.started:
            if process.pid is not None:
                process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise DataError(_describe_death([process.exitcode or 0 for process in context.started])) from None
        raise
    pool.shutdown()
    return left


def _describe_death(codes: Sequence[int]) -> str:
    if SCRIPT_RAN_CODE in codes:
        return _unguarded()
    code = next((code for code in codes if code not in (0, -signal.SIGTERM)), -signal.SIGTERM)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = "; most often there was too little memory, and fewer data.prepare_workers need less"
    return (
        f"a worker process {how} while parts were prepared{hint if code == -signal.SIGKILL else ''}; what is "
        "finished is kept, and the same command goes on"
    )


def exit_if_imported() -> None:
    """End a process that imports a script which trains without asking whether it is the main program.

    It would wait for its own parent's lock, for ever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(f"error: {_unguarded()}", file=sys.stderr)
        sys.exit(SCRIPT_RAN_CODE)


def _unguarded() -> str:
    return (
        f'{sys.argv[0]} is imported by further processes: put what it does under if __name__ == "__main__":'
    )


# Of a worker process.
_settings: EncoderSettings | None = None
_encoder: Encoder | None = None
_counts: Any = None  # of all workers together
SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl


def _start(settings: EncoderSettings, counts: Any) -> None:
    global _settings, _counts
    _settings = settings
    _counts = counts
    # For the Rust libraries, before they are first used.
    os.environ["RAYON_NUM_THREADS"] = str(settings.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if settings.threads > 1 else "false"
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # gone before the line above
        os._exit(0)


def _end(*_: object) -> None:
    """Remove the part that is being written, and leave."""
    discard_unfinished()
    os._exit(0)


def _count(sizes: Mapping[str, int]) -> None:
    with _counts.get_lock():
        for index, name in enumerate(COUNTED):
            _counts[index] += sizes[name]


def _work(task: PartTask, wait: bool) -> bool:
    """Prepare a part; see `prepare_part`."""
    global _encoder
    assert _settings is not None
    if _encoder is None:
        _encoder = build_encoder(_settings)
    return prepare_part(task, _settings, _encoder, _count, wait)
