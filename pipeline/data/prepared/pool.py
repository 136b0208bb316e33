"""Prepares parts, in this process or in worker processes. If the process fails, finished parts remain."""

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
    CONTINUE_ADVICE,
    PartWriter,
    explain_write_errors,
    fill_folder,
    hold_lock,
    is_prepared,
    remove_unfinished_folders,
)
from pipeline.errors import DataError
from pipeline.files import format_bytes

BATCH_CHARACTERS = 1_000_000  # in a call of the encoder: enough for every thread, and little memory
CHARACTERS_PER_VALUE = 16  # estimate for a number, and for the syntax around a list or an object
PROGRESS_LOG_SECONDS = 10.0  # between two lines of progress in the log
COUNT_POLL_SECONDS = 1.0  # between two readings of the workers' counts
COUNT_NAMES = ("bytes", "documents", "tokens")
MISSING_GUARD_EXIT_CODE = 3  # of a worker in which the import of the user's script began to prepare data
PR_SET_PDEATHSIG = 1  # option of Linux's prctl: the signal that a process gets when its parent ends
log = logging.getLogger(__name__)


ReportProgress = Callable[[Mapping[str, int]], None]
"""Function that takes the bytes, documents and tokens (COUNT_NAMES) since its last call."""


@dataclass(frozen=True)
class PartTask:
    """A part to prepare; picklable.

    Attributes:
        part: Part with the records.
        key: Name of the folder, a hash of everything that decides the bytes of the files.
        eval_fraction: Fraction of documents to hold out, from 0 to 1; 1 for an evaluation set.
        identity: Values whose hash is `key`. The index lists them for people to read.
        cache_dir: The recipe's cache folder, with `~` expanded.
    """

    part: SourcePart
    key: str
    eval_fraction: float
    identity: dict[str, Any]
    cache_dir: Path

    @property
    def folder(self) -> Path:
        """Folder of the prepared part."""
        return self.cache_dir / "parts" / self.key

    @property
    def label(self) -> str:
        """Name of the part in messages."""
        return f"part {self.key[:8]} of {self.part.source}"


class PrepareProgress:
    """Counts finished work, and logs a line every PROGRESS_LOG_SECONDS.

    Args:
        num_parts: Number of parts to prepare.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._num_finished_parts = 0
        self._counts: Counter[str] = Counter()
        self._start = time.monotonic()
        self._last_log = self._start

    def add(self, new_counts: Mapping[str, int]) -> None:
        """Add the bytes, documents and tokens since the last call; log a line if one is due."""
        self._counts.update(new_counts)
        now = time.monotonic()
        if now - self._last_log >= PROGRESS_LOG_SECONDS:
            self._last_log = now
            log.info("preparing: %d of %d parts, %s", self._num_finished_parts, self._num_parts, self)

    def finish_part(self) -> None:
        """Count a finished part."""
        self._num_finished_parts += 1

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        size = self._counts["bytes"]
        tokens = self._counts["tokens"]
        return (
            f"{self._counts['documents']:,} documents, {tokens:,} tokens, {format_bytes(size)} of text in "
            f"{seconds:.1f} s: {format_bytes(size / seconds)}/s, {tokens / seconds:,.0f} tokens/s"
        )


def prepare_part(
    task: PartTask, settings: EncoderSettings, encoder: Encoder, report: ReportProgress, wait: bool
) -> bool:
    """Prepare a part, unless it exists and is undamaged.

    Args:
        task: Part to prepare.
        settings: Settings of the encoder.
        encoder: Encoder that was built from the settings.
        report: Function to call after every batch.
        wait: Whether to wait for another process that is preparing the same part.

    Returns:
        Whether the part exists now; false if another process is preparing it.

    Raises:
        DataError: A record cannot be used, the cache cannot be written, or memory is exhausted.
    """
    notice = f"waiting for another process, which is preparing {task.label}"
    with hold_lock(task.cache_dir, task.key, (lambda: notice) if wait else None) as has_lock:
        if has_lock and not is_prepared(task.folder):
            try:
                _write_part(task, settings, encoder, report)
            except MemoryError:
                raise DataError(
                    f"out of memory while {task.label} was prepared; lower data.prepare_workers"
                ) from None
        return has_lock


def _write_part(task: PartTask, settings: EncoderSettings, encoder: Encoder, report: ReportProgress) -> None:
    has_loss_mask = settings.config.conversations is not None
    has_segments = settings.config.preferences is not None
    tally = Tally()
    records = read_records(task.part, tally) if has_loss_mask else read_texts(task.part, tally)
    with fill_folder(task.folder, task.cache_dir, task.label) as folder:
        with explain_write_errors(task.cache_dir, task.label):
            writer = PartWriter(folder, settings.dtype, has_loss_mask, has_segments)
        for batch in _iter_batches(records):
            documents = _encode_batch(encoder, batch, tally, task.part.skip_bad_records)
            if documents:
                with explain_write_errors(task.cache_dir, task.label):
                    writer.append(documents, task.eval_fraction)
            counts = {
                "bytes": sum(len(document.key) for document in documents),
                "documents": len(documents),
                "tokens": sum(len(document.ids) for document in documents),
            }
            report(counts)
        entries = {"identity": task.identity, "tally": dict(sorted(tally.items())), "first": tally.first}
        with explain_write_errors(task.cache_dir, task.label):
            writer.finish(entries)


def _encode_batch(encoder: Encoder, batch: Records, tally: Tally, skip_bad: bool) -> list[TokenizedDocument]:
    """Return the documents of a batch. With `skip_bad`, skip bad records and count them in the tally."""
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
    for record in batch:  # encode each record separately to find the bad ones
        try:
            documents += encoder([record], tally)
        except DataError as error:
            tally.note(BAD_RECORDS, str(error))
    return documents


def _iter_batches(records: Iterable[tuple[str, Record]]) -> Iterator[Records]:
    """Yield lists of records with about BATCH_CHARACTERS each."""
    batch: Records = []
    length = 0
    for item in records:
        batch.append(item)
        length += _estimate_length(item[1])
        if length >= BATCH_CHARACTERS:
            yield batch
            batch = []
            length = 0
    if batch:
        yield batch


def _estimate_length(record: Any) -> int:
    """Estimate the number of characters in a record."""
    if isinstance(record, str):
        return len(record)
    if isinstance(record, dict):
        return CHARACTERS_PER_VALUE + sum(map(_estimate_length, record.values()))
    if isinstance(record, list):
        return CHARACTERS_PER_VALUE + sum(map(_estimate_length, record))
    return CHARACTERS_PER_VALUE


def build_encoder(settings: EncoderSettings) -> Encoder:
    """Return the encoder for the recipe's kind of data.

    Raises:
        DataError: Chat data has no chat template.
    """
    if settings.config.chat is not None:
        from pipeline.data.prepared.chat_encoder import ChatEncoder

        return ChatEncoder(settings)
    if settings.config.preferences is not None:
        from pipeline.data.prepared.preference_encoder import PreferenceEncoder

        return PreferenceEncoder(settings)
    return TextEncoder(settings)


def prepare_in_process(
    tasks: Sequence[PartTask], settings: EncoderSettings, wait: bool, progress: PrepareProgress
) -> list[PartTask]:
    """Prepare parts in this process, with the threads of the tokenizer.

    Args:
        tasks: Parts to prepare.
        settings: Settings of the encoder.
        wait: Whether to wait for parts that another process is preparing.
        progress: Counts the work and logs it.

    Returns:
        Parts that another process is preparing; empty if `wait` is set.

    Raises:
        DataError: A record cannot be used, the cache cannot be written, or memory is exhausted.
    """
    encoder = build_encoder(settings)
    tasks_elsewhere = []
    for task in tasks:
        if prepare_part(task, settings, encoder, progress.add, wait):
            progress.finish_part()
        else:
            tasks_elsewhere.append(task)
    return tasks_elsewhere


class _RecordingContext(SpawnContext):
    """Context that records its processes, since multiprocessing.active_children() omits ended ones.

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
    """Prepare parts in worker processes. An error terminates all of them.

    Args:
        tasks: Parts to prepare.
        settings: Settings of the encoders.
        workers: Number of worker processes.
        wait: Whether to wait for parts that another process is preparing.
        progress: Counts the work and logs it.

    Returns:
        Parts that a process outside of the pool is preparing; empty if `wait` is set.

    Raises:
        DataError: A record cannot be used, the cache cannot be written, or a worker was killed.
    """
    context = _RecordingContext()
    shared_counts = context.Array("q", len(COUNT_NAMES))
    pool = ProcessPoolExecutor(
        workers, context, initializer=_start_worker, initargs=(settings, shared_counts)
    )
    # Start all workers before the pool's thread watches them. Otherwise a worker that dies while another one
    # is started could make that thread or the start fail.
    pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]
    # Prepare large parts first, so that all workers finish at about the same time.
    by_size = sorted(tasks, key=lambda task: task.part.size, reverse=True)
    tasks_elsewhere = []
    finished: queue.SimpleQueue[Future[bool]] = queue.SimpleQueue()
    reported = Counter[str]()
    # Ctrl-C sends SIGINT to every process of a terminal. Workers inherit the blocked signal, and this process
    # terminates them.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            futures = {pool.submit(_prepare_in_worker, task, wait): task for task in by_size}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        for future in futures:
            future.add_done_callback(finished.put)
        num_running = len(futures)
        while num_running:
            try:
                future = finished.get(timeout=COUNT_POLL_SECONDS)
            except queue.Empty:
                pass
            else:
                num_running -= 1
                if future.result():
                    progress.finish_part()
                else:
                    tasks_elsewhere.append(futures[future])
            counts = Counter(dict(zip(COUNT_NAMES, shared_counts.get_obj(), strict=True)))
            progress.add(counts - reported)
            reported = counts
    except BaseException as error:
        for process in context.started:
            if process.pid is not None:
                process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            exit_codes = [process.exitcode or 0 for process in context.started]
            raise DataError(_describe_worker_death(exit_codes)) from None
        raise
    pool.shutdown()
    return tasks_elsewhere


def _describe_worker_death(exit_codes: Sequence[int]) -> str:
    """Return a message with the first exit code that this process did not cause by SIGTERM."""
    if MISSING_GUARD_EXIT_CODE in exit_codes:
        return _describe_missing_guard()
    code = next((code for code in exit_codes if code not in (0, -signal.SIGTERM)), -signal.SIGTERM)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = "; the machine was probably out of memory: lower data.prepare_workers"
    return f"a worker process {how} while parts were prepared{hint}; {CONTINUE_ADVICE}"


def exit_if_imported() -> None:
    """Exit with an error if a worker process runs this while it imports a script without a `__main__` guard.

    Otherwise the worker would wait forever for the lock of its parent process.
    """
    # multiprocessing sets `_inheriting` while a spawned process imports the user's script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(f"error: {_describe_missing_guard()}", file=sys.stderr)
        sys.exit(MISSING_GUARD_EXIT_CODE)


def _describe_missing_guard() -> str:
    return f'{sys.argv[0]} is imported by worker processes: put its code under if __name__ == "__main__":'


# State of a worker process; `_start_worker` and `_prepare_in_worker` set it.
_settings: EncoderSettings | None = None
_encoder: Encoder | None = None
_shared_counts: Any = None  # array of COUNT_NAMES, to which all workers add


def _start_worker(settings: EncoderSettings, shared_counts: Any) -> None:
    """Set up a worker process, which ends with its parent."""
    global _settings, _shared_counts
    _settings = settings
    _shared_counts = shared_counts
    # The Rust libraries read these when they are first used.
    os.environ["RAYON_NUM_THREADS"] = str(settings.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if settings.threads > 1 else "false"
    signal.signal(signal.SIGTERM, _end_worker)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before prctl took effect
        os._exit(0)


def _end_worker(*_: object) -> None:
    """Handle SIGTERM: remove the part that is being written, and exit."""
    remove_unfinished_folders()
    os._exit(0)


def _add_to_shared_counts(new_counts: Mapping[str, int]) -> None:
    with _shared_counts.get_lock():
        for index, name in enumerate(COUNT_NAMES):
            _shared_counts[index] += new_counts[name]


def _prepare_in_worker(task: PartTask, wait: bool) -> bool:
    """Prepare a part in a worker process, and build its encoder for the first one; see `prepare_part`."""
    global _encoder
    assert _settings is not None
    if _encoder is None:
        _encoder = build_encoder(_settings)
    return prepare_part(task, _settings, _encoder, _add_to_shared_counts, wait)
