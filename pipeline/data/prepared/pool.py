"""Worker processes that prepare parts. One that dies is missed at once, and its part is named.

Not concurrent.futures: there a worker that is killed takes the others along, and nobody knows what it had.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.data.documents.part import Part, read_records, read_texts
from pipeline.data.documents.records import BAD_RECORDS, Record, Tally
from pipeline.data.prepared.encoder import Document, Encoder, EncoderSettings, Records, TextEncoder
from pipeline.data.prepared.part_files import PartWriter, held_lock, is_prepared, writing_to
from pipeline.errors import DataError, PipelineError
from pipeline.files import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

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


LINE_SECONDS = 10.0  # a batch job shows that it lives
log = logging.getLogger(__name__)


class PrepareProgress:
    """Adds up what is reported of parts; a context manager.

    Args:
        total_bytes: Of input, as far as known.
        num_parts: To prepare.
    """

    def __init__(self, total_bytes: int, num_parts: int) -> None:
        self._total_bytes = total_bytes
        self._num_parts = num_parts
        self._finished_parts = 0
        self._finished_bytes = 0
        self._under_way: dict[str, int] = {}  # bytes of text by the part's key
        self.text_bytes = self.documents = self.tokens = 0
        self._start = time.monotonic()
        self._last_line = self._start
        self._bar: Progress | None = None

    def __enter__(self) -> PrepareProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("preparing"),
                BarColumn(20),
                TextColumn("{task.percentage:3.0f} %  {task.fields[line]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task("preparing", total=max(1, self._total_bytes), line="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, task: PartTask, advance: Advance) -> None:
        """A batch of the part is done."""
        self.text_bytes += advance.bytes
        self.documents += advance.documents
        self.tokens += advance.tokens
        self._under_way[task.key] = self._under_way.get(task.key, 0) + advance.bytes
        self._show()

    def finish(self, task: PartTask) -> None:
        """The part is there."""
        self._under_way.pop(task.key, None)
        self._finished_parts += 1
        self._finished_bytes += task.part.size
        self._show()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def rates(self) -> str:
        """Return bytes of text and tokens a second, since the start."""
        size = format_bytes(self.text_bytes / self.seconds)
        return f"{size}/s, {self.tokens / self.seconds:,.0f} tokens/s"

    def _show(self) -> None:
        parts = f"{self._finished_parts} of {self._num_parts} parts"
        if self._bar is not None:
            # Compressed input is smaller than its text: a part counts as no more than its size.
            done = self._finished_bytes + min(sum(self._under_way.values()), self._total_bytes)
            line = f"{parts}, {self.tokens / 1e6 / self.seconds:.2f} M tokens/s"  # fits into 80 columns
            self._bar.update(self._bar.task_ids[0], completed=min(done, self._total_bytes), line=line)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            log.info(
                "preparing: %s, %s documents, %s tokens, %s",
                parts,
                f"{self.documents:,}",
                f"{self.tokens:,}",
                self.rates(),
            )


PATIENCE_SECONDS = 60.0  # for a worker to notice that it is to end, after a batch; the machine may be busy
WORKER = "prepare-data"  # how a process of the pool is called
SCRIPT_RAN_CODE = 3  # of a worker in which the user's script, which it imports, began to prepare data itself


class _Abandoned(Exception):
    """The process that asked for the part is gone."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    task: PartTask | None = None


def build_encoder(settings: EncoderSettings) -> Encoder:
    """The encoder of the recipe's kind of data.

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
    tasks: Sequence[PartTask], settings: EncoderSettings, wait_for_others: bool, progress: PrepareProgress
) -> list[PartTask]:
    """As `prepare_in_pool`, in this process, with the tokeniser's own threads."""
    encoder = build_encoder(settings)
    left = []
    for task in tasks:
        if prepare_part(task, settings, encoder, partial(progress.advance, task), wait_for_others):
            progress.finish(task)
        else:
            left.append(task)
    return left


def prepare_in_pool(
    tasks: Sequence[PartTask],
    settings: EncoderSettings,
    workers: int,
    wait_for_others: bool,
    progress: PrepareProgress,
) -> list[PartTask]:
    """Prepares all tasks; an error ends the workers, and parts that are finished stay.

    Args:
        tasks: Parts to prepare; each is tried once.
        settings: Of the encoder that each worker makes.
        workers: Processes.
        wait_for_others: Wait where another process is at a part.
        progress: Is told in this process.

    Returns:
        Tasks that another process is at.

    Raises:
        DataError: a record cannot be used, the cache cannot be written, or a worker was killed.
    """
    # Large ones first, so that workers run out of work at about the same time.
    waiting = deque(sorted(tasks, key=lambda task: task.part.size, reverse=True))
    left = []
    with _pool(min(workers, len(tasks)), settings) as pool:
        for worker in pool:
            _give(worker, waiting, wait_for_others)
        while busy := [worker for worker in pool if worker.task is not None]:
            ready = wait([worker.connection for worker in busy])
            for worker in busy:
                if worker.connection not in ready or worker.task is None:
                    continue
                task = worker.task
                message = _receive(worker, task)
                if isinstance(message, Advance):
                    progress.advance(task, message)
                    continue
                if message:
                    progress.finish(task)
                else:
                    left.append(task)
                _give(worker, waiting, wait_for_others)
    return left


def _give(worker: _Worker, waiting: deque[PartTask], wait_for_others: bool) -> None:
    worker.task = waiting.popleft() if waiting else None
    if worker.task is not None:
        with suppress(OSError):  # a worker that is dead is found by _receive
            worker.connection.send((worker.task, wait_for_others))


def _receive(worker: _Worker, task: PartTask) -> Advance | bool:
    """How far the worker is, or what `prepare_part` returned; an error where it failed, or is dead."""
    try:
        message: Advance | bool | Exception = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        raise DataError(_describe_death(worker.process.exitcode or 0, task)) from None
    if isinstance(message, Exception):
        raise message
    return message


def end_if_imported() -> None:
    """Ends a process that imports a script which trains without asking whether it is the main program.

    One that was started to prepare data would wait for its own parent's lock, for ever; its parent says what
    to change, once. One of somebody else, such as a loader's, says it itself.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        sys.exit(SCRIPT_RAN_CODE if process.name.startswith(WORKER) else f"error: {_unguarded()}")


def _unguarded() -> str:
    return (
        f'{sys.argv[0]} is imported by further processes: put what it does under if __name__ == "__main__":'
    )


def _describe_death(code: int, task: PartTask) -> str:
    if code == SCRIPT_RAN_CODE:
        return _unguarded()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = "; most often there was too little memory, and fewer data.prepare_workers need less"
    return (
        f"a worker process {how} while it prepared {task.label}{hint if code == -signal.SIGKILL else ''}; "
        "what is finished is kept, and the same command goes on"
    )


@contextmanager
def _pool(count: int, settings: EncoderSettings) -> Iterator[list[_Worker]]:
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        with _ignoring_interrupts():
            for n in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, name=f"{WORKER}-{n}", args=(theirs, settings), daemon=True
                )
                process.start()
                theirs.close()
                pool.append(_Worker(process, ours))
        yield pool
    finally:
        for worker in pool:
            worker.connection.close()  # how a worker is told to end; the death of this process tells it too
        for worker in pool:
            worker.process.join(PATIENCE_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Children inherit it: Ctrl-C reaches every process of a terminal, and this one sees to the rest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(connection: Connection, settings: EncoderSettings) -> None:
    """In a worker: prepares what it is given until nobody is at the other end."""
    # For the Rust libraries, before they are first used.
    os.environ["RAYON_NUM_THREADS"] = str(settings.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if settings.threads > 1 else "false"
    encoder: Encoder | None = None

    def report(advance: Advance) -> None:
        try:
            connection.send(advance)
        except OSError:
            raise _Abandoned from None

    with suppress(EOFError, OSError, _Abandoned):
        while True:
            task, wait_for_others = connection.recv()
            answer: bool | Exception
            try:
                if encoder is None:
                    encoder = build_encoder(settings)
                answer = prepare_part(task, settings, encoder, report, wait_for_others)
            except PipelineError as error:
                answer = DataError(str(error))
            except MemoryError:
                answer = DataError(f"no memory left for {task.label}; lower data.prepare_workers")
            except _Abandoned:
                raise
            except Exception:  # ours: its traceback crosses to the process that asked
                answer = RuntimeError(f"in a worker that prepared {task.label}:\n{traceback.format_exc()}")
            connection.send(answer)
