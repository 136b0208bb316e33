"""Interface of a sink, several as one, and sinks that are dropped with one line where they fail or block."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from pipeline.config.import_paths import import_object, may_not_exit, refuse_misfit
from pipeline.config.schema import SinkConfig
from pipeline.errors import ConfigError, PipelineError, one_line
from pipeline.monitoring.events import RUN_FAILED, Event, Shown
from pipeline.redaction import redact_text

GIT_DIFF = "git.diff"
"""File of a run directory with the changes since the commit; a tracker may upload it."""
METHODS = ("write", "tell", "close")


class Sink(Protocol):
    """A place where the numbers of a run go."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take one row.

        Args:
            step: Optimizer steps done (`global_step`); smaller than in the row before only after a ROLLBACK.
            row: Metric key (`group/snake_case`) to value.
        """

    def tell(self, step: int, event: Event) -> None:
        """Take what happened at a step.

        Args:
            step: As of `write`, but that the row of the same step may come after it.
        """

    def close(self, exit_code: int) -> None:
        """Write out what is left.

        Args:
            exit_code: 0 for a run that ended as it should, 128 + n for one that signal n stopped, anything
                else for one that failed.
        """


@runtime_checkable
class Shows(Protocol):
    """A sink that takes what is neither a row nor an event, too. metrics.jsonl has none of it."""

    def show(self, what: Shown) -> None:
        """Take it. Histograms come behind their row."""


def import_sink(config: SinkConfig) -> Callable[..., Any]:
    """The class that `kind` names.

    Raises:
        ConfigError: there is none, or it does not take what it will be given.
    """
    make = import_object(config.kind, ConfigError)
    message = f"log.sinks: {config.kind} cannot be called with (run_dir, start_step, run_config) and its args"
    refuse_misfit(make, message, ConfigError, Path(), 0, {}, **config.args)
    missing = [name for name in METHODS if isinstance(make, type) and not hasattr(make, name)]
    if missing:
        raise ConfigError(_lacks(config, missing))
    return make


def open_own(config: SinkConfig, run_dir: Path, start_step: int, run_config: dict[str, Any]) -> Sink:
    """Makes it.

    Args:
        run_dir: Directory of the run, which is there.
        start_step: Optimizer steps done before this process; rows of later steps come again.
        run_config: Recipe, DeepSpeed JSON and number of ranks.

    Raises:
        ConfigError: see import_sink; or what it makes is no sink.
    """
    make = import_sink(config)
    with may_not_exit(f"log.sinks: {config.kind}", ConfigError):
        sink: Sink = make(run_dir, start_step, run_config, **config.args)
    missing = [name for name in METHODS if not callable(getattr(sink, name, None))]
    if missing:
        raise ConfigError(_lacks(config, missing))
    return sink


def _lacks(config: SinkConfig, missing: list[str]) -> str:
    return (
        f"log.sinks: {config.kind} has no {' and no '.join(missing)}; a sink has write(step, row), "
        "tell(step, event) and close(exit_code), see docs/your-own-sink.md"
    )


logger = logging.getLogger(__name__)

QUEUE_SIZE = 10_000
"""Rows and events that a sink may be behind: some 30 MB of the host's memory."""
CLOSE_SECONDS = 20.0
"""Seconds that the end of a run gives all of its sinks together. W&B needs up to 16 of them."""
QUIET_SECONDS = 3.0
"""Seconds of them that pass before a line says which sink the run waits for."""
EXIT_SECONDS = 10.0
"""Seconds that a process with a hanging sink may take to exit. wandb's exit handler needs up to 8 of them."""
_THREAD = "sink "


class Dispensable:
    """A sink, until it raises for the first time; from then on nothing.

    It is not closed then: what failed to write may wait for ever to be written out.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        """Args:
        name: As the line names it.
        """
        self.name = name
        self._sink: Sink | None = sink

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """See Sink."""
        if self._sink is not None:
            self._attempt(self._sink.write, step, dict(row))

    def tell(self, step: int, event: Event) -> None:
        """See Sink."""
        if self._sink is not None:
            self._attempt(self._sink.tell, step, event)

    def show(self, what: Shown) -> None:
        """See Shows."""
        if isinstance(self._sink, Shows):
            self._attempt(self._sink.show, what)

    def close(self, exit_code: int) -> None:
        """See Sink."""
        if self._sink is not None:
            self._attempt(self._sink.close, exit_code)

    def _attempt(self, method: Callable[..., object], *arguments: Any) -> None:
        try:
            method(*arguments)
        except (Exception, SystemExit) as error:  # whatever a library raises: the record is metrics.jsonl
            self._drop(_told(error))

    def _drop(self, why: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            _say_dropped(self.name, why)


class SinkThread(Dispensable):
    """Makes a sink and calls it on a daemon thread of its own, in the order of the calls.

    No call waits for the sink: it takes what a bounded queue has for it, and is dropped where that is full.
    """

    def __init__(
        self, make: Callable[[], Sink], name: str, *, takes_rows: bool = True, resend: str = ""
    ) -> None:
        """Wait until the sink is made.

        Args:
            make: Makes the sink; what it raises is raised here.
            name: See Dispensable.
            takes_rows: Whether the sink does something with rows.
            resend: What sends rows again that the sink did not take, as a clause of the line.
        """
        self._takes_rows = takes_rows
        self._resend = resend
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue(QUEUE_SIZE)
        made: Future[Sink] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(make, made), name=_THREAD + name, daemon=True
        )
        self._thread.start()
        super().__init__(made.result(), name)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """See Sink."""
        if self._takes_rows:
            super().write(step, row)

    def close(self, exit_code: int) -> None:
        """Have the sink closed behind all that it was given. `wait_for` waits for it."""
        super().close(exit_code)
        self._put(None)

    def join(self, until: float) -> bool:
        """Wait for a closed sink until then (monotonic seconds), and return whether it has ended."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return self._sink is None or not self._thread.is_alive()

    def give_up(self, seconds: float) -> None:
        """Drop a sink whose thread has not ended within these seconds."""
        behind = self._calls.unfinished_tasks - 2  # but the close and the end of the queue
        rows = f"did not take its last {behind:,} rows and events" if behind > 0 else "did not close"
        self._drop(f"it {rows} within {seconds:.0f} s; metrics.jsonl has all rows{self._resend}")

    def _attempt(self, method: Callable[..., object], *arguments: Any) -> None:
        self._put((method, *arguments))

    def _put(self, call: tuple[Any, ...] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            behind = f"it blocks, {QUEUE_SIZE:,} rows and events behind"
            self._drop(f"{behind}; metrics.jsonl has all rows{self._resend}")

    def _drop(self, why: str) -> None:
        super()._drop(why)
        with self._calls.mutex:
            self._calls.queue.clear()
        self._calls.put_nowait(None)

    def _work(self, make: Callable[[], Sink], made: Future[Sink]) -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
            return
        try:
            while (call := self._calls.get()) is not None:
                super()._attempt(*call)
                self._calls.task_done()
        except BaseException as error:  # asyncio's CancelledError is no Exception
            self._drop(_told(error))


def wait_for(sinks: Sequence[SinkThread], at_most: float) -> None:
    """Wait for closed sinks, which end side by side, and drop those that take too long.

    Args:
        at_most: Seconds, where there are fewer than CLOSE_SECONDS.
    """
    began, seconds = time.monotonic(), min(CLOSE_SECONDS, at_most)
    late = [sink for sink in sinks if not sink.join(began + min(QUIET_SECONDS, seconds))]
    if late and seconds > QUIET_SECONDS:
        names = " and ".join(sink.name for sink in late)
        logger.info("waiting up to %.0f s for %s to take the last rows", seconds, names)
    for sink in late:
        if not sink.join(began + seconds):
            sink.give_up(seconds)


def bound_exit(exit_code: int) -> None:
    """Have this process end with that code within EXIT_SECONDS, where the thread of a sink hangs.

    A library that hangs in a call hangs in its exit handler, too: wandb waits there for its own process.
    """
    if any(thread.name.startswith(_THREAD) for thread in threading.enumerate()):
        timer = threading.Timer(EXIT_SECONDS, os._exit, [exit_code])
        timer.daemon = True
        timer.start()


def open_dispensable(name: str, make: Callable[[], Sink]) -> list[SinkThread]:
    """The sink, or none where it cannot be opened now: a server that is down must not end a run at a restart.

    Raises:
        PipelineError: what was asked for is a mistake.
    """
    try:
        return [SinkThread(make, name)]
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        _say_dropped(name, _told(error))
        return []


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _say_dropped(name: str, why: str) -> None:
    logger.warning("%s is dropped (%s); the run goes on without it", name, why)


FAILURE_LINES = 20
"""Of a traceback, in an event."""


class Sinks:
    """Every sink of the run as one; empty where nothing is written (any rank but the main process).

    As a context manager it closes them: with exit code 0, or 1 where an exception passes through, of which
    they are told.

    Args:
        step: Optimizer steps done.
    """

    def __init__(self, sinks: Sequence[Sink] = (), step: int = 0) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)
        self._step = step

    @property
    def is_empty(self) -> bool:
        """Nothing is written, or no more."""
        return not self._sinks

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Hand one row to every sink."""
        self._step = step
        for sink in self._sinks:
            sink.write(step, row)

    def tell(self, step: int, event: Event) -> None:
        """Log what happened, on every rank, and hand it to every sink.

        A rank without sinks tells its file alone: errors of any rank come to the console, and all have this.
        """
        self._step = step
        level = logging.getLevelName(event.level.upper())
        level = min(level, logging.WARNING) if self.is_empty else level
        logger.log(level, "%s", event.log_line(step), extra={"event": event.name})
        for sink in self._sinks:
            sink.tell(step, event)

    def show(self, what: Shown) -> None:
        """Hand what is neither a row nor an event to the sinks that take it. On any thread."""
        for sink in self._sinks:
            if isinstance(sink, Shows):
                sink.show(what)

    def close(self, exit_code: int, at_most: float = math.inf) -> None:
        """Close every sink, also after one of them failed to; the failure is raised at the end.

        Once: a second call does nothing.

        Args:
            at_most: Seconds, see wait_for.
        """
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            stack.callback(wait_for, [sink for sink in sinks if isinstance(sink, SinkThread)], at_most)
            for sink in reversed(sinks):  # an ExitStack calls the last one first
                stack.callback(sink.close, exit_code)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._tell_of_failure(error)
        try:
            self.close(0 if error is None else 1)
        except (OSError, PipelineError) as failure:
            if error is None:
                raise
            logger.warning("closing the run's metrics failed: %s", failure)  # the first error is the news

    def _tell_of_failure(self, error: Exception) -> None:
        """To the sinks alone: who ends the run shows it on the console."""
        is_users = isinstance(error, PipelineError)
        kind = "" if is_users else f"{type(error).__name__}: "
        lines = redact_text("".join(traceback.format_exception(error))).splitlines()[-FAILURE_LINES:]
        # What a user can cause is in the message; a mistake of ours is in the lines that led there.
        fields = {} if is_users else {"traceback": "\n".join(lines)}
        event = Event(RUN_FAILED, f"{kind}{one_line(error, 1000)}", level="error", fields=fields)
        for sink in self._sinks:
            with suppress(OSError, PipelineError):  # as a full disk, of which that very error may be
                sink.tell(self._step, event)
