"""Worker processes that prepare parts. One that dies is missed at once, and its part is named.

Not concurrent.futures: there a worker that is killed takes the others along, and nobody knows what it had.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from pipeline.data.prepared.encoder import Encoder, EncoderSettings, TextEncoder
from pipeline.data.prepared.parts import Advance, PartTask, prepare_part
from pipeline.data.prepared.progress_bar import PrepareProgress
from pipeline.errors import DataError, PipelineError

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
