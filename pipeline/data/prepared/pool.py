"""Prepares parts, in this process or in worker processes. Finished parts are kept if the process fails."""

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

BATCH_CHARACTERS = 1_000_000  # encoded at once: work for every thread, and little memory
LINE_SECONDS = 10.0  # between two lines of progress in the log
LOOK_SECONDS = 1.0  # between two readings of the workers' counts
COUNTED = ("bytes", "documents", "tokens")
SCRIPT_RAN_CODE = 3  # exit code of a worker whose import of the user's script began to prepare data
log = logging.getLogger(__name__)


ReportProgress = Callable[[Mapping[str, int]], None]
"""Function that is called with the bytes, documents and tokens since the last call."""


@dataclass(frozen=True)
class PartTask:
    """A part to prepare; picklable.

    Attributes:
        part: Part with the records.
        key: Name of the folder, a hash of everything that decides the bytes of the files.
        eval_fraction: Share of documents to hold out; 1 for an evaluation set.
        identity: Values that are hashed to `key`; the index has them for people to read.
        cache_dir: The recipe's cache folder, expanded.
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
    """Counts the work that is done, and logs a line every LINE_SECONDS."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._finished_parts = 0
        self._done: Counter[str] = Counter()
        self._start = self._last_line = time.monotonic()

    def add(self, done: Mapping[str, int]) -> None:
        """Count work that was done since the last call."""
        self._done.update(done)
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            log.info("preparing: %d of %d parts, %s", self._finished_parts, self._num_parts, self)

    def finish_part(self) -> None:
        """Count a finished part."""
        self._finished_parts += 1

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        size = self._done["bytes"]
        tokens = self._done["tokens"]
        return (
            f"{self._done['documents']:,} documents, {tokens:,} tokens, {format_bytes(size)} of text in "
            f"{seconds:.1f} s: {format_bytes(size / seconds)}/s, {tokens / seconds:,.0f} tokens/s"
        )


def prepare_part(
    task: PartTask, settings: EncoderSettings, encoder: Encoder, report: ReportProgress, wait: bool
) -> bool:
    """Prepare a part, unless its folder exists.

    Args:
        task: Part to prepare.
        settings: Settings of the encoder.
        encoder: Encoder that was built from the settings.
        report: Function to call after every batch.
        wait: Whether to wait for another process that prepares the same part.

    Returns:
        Whether the part exists now. If not, another process is preparing it.

    Raises:
        DataError: A record cannot be used, the cache cannot be written, or memory is exhausted.
    """
    notice = f"another process prepares {task.label}: waiting for it"
    with hold_lock(task.cache_dir, task.key, (lambda: notice) if wait else None) as held:
        if held and not is_prepared(task.folder):
            try:
                _write_part(task, settings, encoder, report)
            except MemoryError:
                raise DataError(f"no memory left for {task.label}; lower data.prepare_workers") from None
        return held


def _write_part(task: PartTask, settings: EncoderSettings, encoder: Encoder, report: ReportProgress) -> None:
    has_rows = settings.config.conversations is not None
    has_segments = settings.config.preferences is not None
    tally = Tally()
    records = read_records(task.part, tally) if has_rows else read_texts(task.part, tally)
    with fill_folder(task.folder, task.cache_dir, task.label) as folder:
        with explain_write_errors(task.cache_dir, task.label):
            writer = PartWriter(folder, settings.dtype, has_rows, has_segments)
        for batch in _iter_batches(records):
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
    """Return the documents of a batch; if a record is bad and may be skipped, encode each one separately."""
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
        return sum(map(_estimate_length, record.values()), 16)
    return sum(map(_estimate_length, record), 16) if isinstance(record, list) else 16


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


def prepare_here(
    tasks: Sequence[PartTask], settings: EncoderSettings, wait: bool, progress: PrepareProgress
) -> list[PartTask]:
    """Prepare parts in this process, with the threads of the tokenizer.

    Returns:
        Parts that another process is preparing.
    """
    encoder = build_encoder(settings)
    left = []
    for task in tasks:
        if prepare_part(task, settings, encoder, progress.add, wait):
            progress.finish_part()
        else:
            left.append(task)
    return left


class _RecordingContext(SpawnContext):
    """Context that records the processes it starts; multiprocessing.active_children() omits ended ones.

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
    """Prepare parts in worker processes, which an error terminates.

    Returns:
        Parts that another process is preparing.

    Raises:
        DataError: A record cannot be used, the cache cannot be written, or a worker was killed.
    """
    context = _RecordingContext()
    counts = context.Array("q", len(COUNTED))
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(settings, counts))
    # Start all workers before the pool's thread watches them: a worker that dies while another one is started
    # would break that thread or the start.
    pool._safe_to_dynamically_spawn_children = False  # type: ignore[attr-defined]
    # Prepare large parts first, so that all workers finish at about the same time.
    by_size = sorted(tasks, key=lambda task: task.part.size, reverse=True)
    left = []
    ended: queue.SimpleQueue[Future[bool]] = queue.SimpleQueue()
    counted = Counter[str]()
    # Ctrl-C sends SIGINT to every process of a terminal. Workers inherit it blocked; this process ends them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            futures = {pool.submit(_prepare_in_worker, task, wait): task for task in by_size}
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
        return _describe_missing_guard()
    code = next((code for code in codes if code not in (0, -signal.SIGTERM)), -signal.SIGTERM)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = "; most often there was too little memory, and fewer data.prepare_workers need less"
    return (
        f"a worker process {how} while parts were prepared{hint if code == -signal.SIGKILL else ''}; what is "
        "finished is kept: run the same command again to continue"
    )


def exit_if_imported() -> None:
    """Exit if this is a worker process that runs the user's script on import, for lack of a `__main__` guard.

    Otherwise the worker would wait forever for the lock of its parent process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(f"error: {_describe_missing_guard()}", file=sys.stderr)
        sys.exit(SCRIPT_RAN_CODE)


def _describe_missing_guard() -> str:
    return f'{sys.argv[0]} is imported by worker processes: put what it does under if __name__ == "__main__":'


# State of a worker process.
_settings: EncoderSettings | None = None
_encoder: Encoder | None = None
_counts: Any = None  # shared by all workers
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def _start_worker(settings: EncoderSettings, counts: Any) -> None:
    global _settings, _counts
    _settings = settings
    _counts = counts
    # The Rust libraries read these when they are first used.
    os.environ["RAYON_NUM_THREADS"] = str(settings.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if settings.threads > 1 else "false"
    signal.signal(signal.SIGTERM, _end_worker)
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before prctl took effect
        os._exit(0)


def _end_worker(*_: object) -> None:
    """Remove the part that is being written, and exit."""
    discard_unfinished()
    os._exit(0)


def _count(sizes: Mapping[str, int]) -> None:
    with _counts.get_lock():
        for index, name in enumerate(COUNTED):
            _counts[index] += sizes[name]


def _prepare_in_worker(task: PartTask, wait: bool) -> bool:
    """Prepare a part in a worker process; see `prepare_part`."""
    global _encoder
    assert _settings is not None
    if _encoder is None:
        _encoder = build_encoder(_settings)
    return prepare_part(task, _settings, _encoder, _count, wait)
