"""Interface of a tracker, several as one, and trackers that are dropped if they fail or block."""

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
from typing import Any, Literal, Protocol, runtime_checkable

from pipeline.config.import_paths import check_signature, exit_as_error, import_object
from pipeline.config.schema import TrackerConfig
from pipeline.errors import ConfigError, PipelineError, summarize_error
from pipeline.monitoring.events import RUN_FAILED, Event, Showable
from pipeline.redaction import redact_text

GIT_DIFF = "git.diff"
"""File of a run directory with the changes since the commit; a tracker may upload it."""
TRACKER_METHODS = ("write", "tell", "close")
BEST_BY_SUFFIX: dict[str, Literal["min", "max"]] = {
    "loss": "min",
    "perplexity": "min",
    "accuracy": "max",
    "per_second": "max",
    "mfu": "max",
}
"""End of a metric's name -> which of its values is the best."""


def best_direction(name: str) -> Literal["min", "max"] | None:
    """Return which value of a metric is the best; `None` if none is."""
    return next((best for end, best in BEST_BY_SUFFIX.items() if name.endswith(end)), None)


class Tracker(Protocol):
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
class SupportsShow(Protocol):
    """A tracker that takes what is neither a row nor an event, too. metrics.jsonl has none of it."""

    def show(self, what: Showable) -> None:
        """Take it. Histograms come behind their row."""


def import_tracker(config: TrackerConfig) -> Callable[..., Any]:
    """Return the class that `kind` names.

    Raises:
        ConfigError: There is none, or it does not take the arguments of a tracker.
    """
    make = import_object(config.kind, ConfigError)
    message = (
        f"log.trackers: {config.kind} cannot be called with (run_dir, start_step, run_config) and its args"
    )
    check_signature(make, message, ConfigError, Path(), 0, {}, **config.args)
    missing = [name for name in TRACKER_METHODS if isinstance(make, type) and not hasattr(make, name)]
    if missing:
        raise ConfigError(_lacks(config, missing))
    return make


def open_custom_tracker(
    config: TrackerConfig, run_dir: Path, start_step: int, run_config: dict[str, Any]
) -> Tracker:
    """Make a user's own tracker.

    Args:
        run_dir: Existing directory of the run.
        start_step: Optimizer steps done before this process; rows of later steps come again.
        run_config: Recipe, DeepSpeed JSON and number of ranks.

    Raises:
        ConfigError: See import_tracker; or the result is no tracker.
    """
    make = import_tracker(config)
    with exit_as_error(f"log.trackers: {config.kind}", ConfigError):
        tracker: Tracker = make(run_dir, start_step, run_config, **config.args)
    missing = [name for name in TRACKER_METHODS if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(_lacks(config, missing))
    return tracker


def _lacks(config: TrackerConfig, missing: list[str]) -> str:
    return (
        f"log.trackers: {config.kind} has no {' and no '.join(missing)}; a tracker has write(step, row), "
        "tell(step, event) and close(exit_code), see docs/your-own-tracker.md"
    )


logger = logging.getLogger(__name__)

QUEUE_SIZE = 10_000
"""Most rows and events that a tracker may be behind: some 30 MB of the host's memory."""
CLOSE_SECONDS = 20.0
"""Seconds that all trackers together have at the end of a run. W&B needs up to 16 of them."""
QUIET_SECONDS = 3.0
"""Seconds until a line says which tracker the run waits for."""
EXIT_SECONDS = 10.0
"""Seconds in which a process with a hanging tracker exits. wandb's exit handler needs up to 8 of them."""
_THREAD = "tracker "


class OptionalTracker:
    """A tracker that is dropped when it raises for the first time.

    It is not closed then: a close may wait for ever to write out what failed.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        """Wrap a tracker, with its name for the line of the log."""
        self.name = name
        self._tracker: Tracker | None = tracker

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """See Tracker."""
        if self._tracker is not None:
            self._attempt(self._tracker.write, step, dict(row))

    def tell(self, step: int, event: Event) -> None:
        """See Tracker."""
        if self._tracker is not None:
            self._attempt(self._tracker.tell, step, event)

    def show(self, what: Showable) -> None:
        """See Shows."""
        if isinstance(self._tracker, SupportsShow):
            self._attempt(self._tracker.show, what)

    def close(self, exit_code: int) -> None:
        """See Tracker."""
        if self._tracker is not None:
            self._attempt(self._tracker.close, exit_code)

    def _attempt(self, method: Callable[..., object], *arguments: Any) -> None:
        try:
            method(*arguments)
        except (Exception, SystemExit) as error:  # whatever a library raises: the record is metrics.jsonl
            self._drop(_told(error))

    def _drop(self, why: str) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            _say_dropped(self.name, why)


class TrackerThread(OptionalTracker):
    """Makes a tracker and calls it on a daemon thread, in the order of the calls.

    No call waits for the tracker: calls go into a bounded queue. A tracker whose queue is full is dropped.
    """

    def __init__(
        self, make: Callable[[], Tracker], name: str, *, takes_rows: bool = True, resend: str = ""
    ) -> None:
        """Wait until the tracker is made.

        Args:
            make: Makes the tracker; what it raises is raised here.
            name: See OptionalTracker.
            takes_rows: Whether the tracker does something with rows.
            resend: Clause of the line that says how to send rows again.
        """
        self._takes_rows = takes_rows
        self._resend = resend
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue(QUEUE_SIZE)
        made: Future[Tracker] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(make, made), name=_THREAD + name, daemon=True
        )
        self._thread.start()
        super().__init__(made.result(), name)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """See Tracker."""
        if self._takes_rows:
            super().write(step, row)

    def close(self, exit_code: int) -> None:
        """Have the tracker closed behind all that it was given. `wait_for` waits for it."""
        super().close(exit_code)
        self._put(None)

    def join(self, until: float) -> bool:
        """Wait for a closed tracker until then (monotonic seconds), and return whether it has ended."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return self._tracker is None or not self._thread.is_alive()

    def give_up(self, seconds: float) -> None:
        """Drop a tracker whose thread has not ended within these seconds."""
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

    def _work(self, make: Callable[[], Tracker], made: Future[Tracker]) -> None:
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


def wait_for_trackers(trackers: Sequence[TrackerThread], at_most: float) -> None:
    """Wait for closed trackers, and drop those that take longer than `at_most` or CLOSE_SECONDS."""
    began, seconds = time.monotonic(), min(CLOSE_SECONDS, at_most)
    late = [tracker for tracker in trackers if not tracker.join(began + min(QUIET_SECONDS, seconds))]
    if late and seconds > QUIET_SECONDS:
        names = " and ".join(tracker.name for tracker in late)
        logger.info("waiting up to %.0f s for %s to take the last rows", seconds, names)
    for tracker in late:
        if not tracker.join(began + seconds):
            tracker.give_up(seconds)


def limit_exit_time(exit_code: int) -> None:
    """Have this process end with that code within EXIT_SECONDS, where the thread of a tracker hangs.

    A library that hangs in a call hangs in its exit handler, too: wandb waits there for its own process.
    """
    if any(thread.name.startswith(_THREAD) for thread in threading.enumerate()):
        timer = threading.Timer(EXIT_SECONDS, os._exit, [exit_code])
        timer.daemon = True
        timer.start()


def open_optional_tracker(name: str, make: Callable[[], Tracker]) -> list[TrackerThread]:
    """Return the tracker, or none if it cannot be opened now.

    A server that is down must not end a run at a restart.

    Raises:
        PipelineError: what was asked for is a mistake.
    """
    try:
        return [TrackerThread(make, name)]
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        _say_dropped(name, _told(error))
        return []


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {summarize_error(error)}"


def _say_dropped(name: str, why: str) -> None:
    logger.warning("%s is dropped (%s); the run goes on without it", name, why)


FAILURE_LINES = 20
"""Of a traceback, in an event."""


class Trackers:
    """Every tracker of the run as one; empty where nothing is written (any rank but the main process).

    As a context manager it closes them: with exit code 0, or 1 where an exception passes through, of which
    they are told.

    Args:
        step: Optimizer steps done.
    """

    def __init__(self, trackers: Sequence[Tracker] = (), step: int = 0) -> None:
        self._trackers: tuple[Tracker, ...] = tuple(trackers)
        self._step = step

    @property
    def is_empty(self) -> bool:
        """Whether nothing is written, or no more."""
        return not self._trackers

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Hand one row to every tracker."""
        self._step = step
        for tracker in self._trackers:
            tracker.write(step, row)

    def tell(self, step: int, event: Event) -> None:
        """Log what happened, on every rank, and hand it to every tracker.

        A rank without trackers logs errors to its file alone: the main process shows them on the console.
        """
        self._step = step
        level = logging.getLevelName(event.level.upper())
        level = min(level, logging.WARNING) if self.is_empty else level
        logger.log(level, "%s", event.log_line(step), extra={"event": event.name})
        for tracker in self._trackers:
            tracker.tell(step, event)

    def show(self, what: Showable) -> None:
        """Hand what is neither a row nor an event to the trackers that take it. On any thread."""
        for tracker in self._trackers:
            if isinstance(tracker, SupportsShow):
                tracker.show(what)

    def close(self, exit_code: int, at_most: float = math.inf) -> None:
        """Close every tracker, also after one of them failed to; the failure is raised at the end.

        Once: a second call does nothing.

        Args:
            at_most: Seconds, see wait_for.
        """
        trackers, self._trackers = self._trackers, ()
        with ExitStack() as stack:
            stack.callback(
                wait_for_trackers,
                [tracker for tracker in trackers if isinstance(tracker, TrackerThread)],
                at_most,
            )
            for tracker in reversed(trackers):  # an ExitStack calls the last one first
                stack.callback(tracker.close, exit_code)

    def __enter__(self) -> Trackers:
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
        """To the trackers alone: who ends the run shows it on the console."""
        is_users = isinstance(error, PipelineError)
        kind = "" if is_users else f"{type(error).__name__}: "
        lines = redact_text("".join(traceback.format_exception(error))).splitlines()[-FAILURE_LINES:]
        # What a user can cause is in the message; a mistake of ours is in the lines that led there.
        fields = {} if is_users else {"traceback": "\n".join(lines)}
        event = Event(RUN_FAILED, f"{kind}{summarize_error(error, 1000)}", level="error", fields=fields)
        for tracker in self._trackers:
            with suppress(OSError, PipelineError):  # as a full disk, of which that very error may be
                tracker.tell(self._step, event)
