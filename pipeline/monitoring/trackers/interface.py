"""Interface of a tracker, the group of a run's trackers, and trackers that are dropped on failure.

A failure of metrics.jsonl ends the run, since the record would have holes. Any other tracker that raises is
dropped with one log line: a run that a scheduler restarts must not end because a server is down. A wrong
import path or wrong arguments end the run before the data is prepared.
"""

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

logger = logging.getLogger(__name__)

GIT_DIFF = "git.diff"
"""File of a run directory with the uncommitted changes; a tracker may upload it."""
TRACKER_METHODS = ("write", "tell", "close")
"""Methods that every tracker has; see Tracker."""
BEST_BY_SUFFIX: dict[str, Literal["min", "max"]] = {
    "loss": "min",
    "perplexity": "min",
    "bits_per_byte": "min",
    "accuracy": "max",
    "per_second": "max",
    "mfu": "max",
}
"""Suffix of a metric's name -> whether its minimum or maximum is the best value."""


def best_direction(name: str) -> Literal["min", "max"] | None:
    """Return whether the minimum or maximum of a metric is best; `None` if neither is."""
    return next((best for end, best in BEST_BY_SUFFIX.items() if name.endswith(end)), None)


class Tracker(Protocol):
    """Destination of a run's rows and events."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Write one row.

        Args:
            step: Optimizer steps done (`global_step`). Steps decrease only after a ROLLBACK event.
            row: Metric key (`group/snake_case`) -> value, which may be infinite or NaN.
        """

    def tell(self, step: int, event: Event) -> None:
        """Write an event.

        Args:
            step: Optimizer steps done. The row of the same step may come after the event.
            event: The event.
        """

    def close(self, exit_code: int) -> None:
        """Write out buffered data and close.

        Args:
            exit_code: 0 for a run that ended normally, 128 + n for one that signal n stopped, and any other
                value for one that failed.
        """


@runtime_checkable
class SupportsShow(Protocol):
    """A tracker that also shows checkpoints, histograms and tables, which metrics.jsonl omits."""

    def show(self, what: Showable) -> None:
        """Show the object. Histograms and tables arrive after the row of their step."""


def import_tracker(config: TrackerConfig) -> Callable[..., Any]:
    """Import the class or function that the key `kind` of an entry of `log.trackers` names.

    Raises:
        ConfigError: The class does not exist, does not take the arguments of a tracker, or lacks one of
            TRACKER_METHODS.
    """
    make = import_object(config.kind, ConfigError)
    message = (
        f"log.trackers: {config.kind} cannot be called with (run_dir, start_step, run_config) and its args"
    )
    example: tuple[Any, ...] = (Path(), 0, {})  # run_dir, start_step, run_config
    check_signature(make, message, ConfigError, *example, **config.args)
    if isinstance(make, type):  # the methods of the result of a function are not known yet
        _refuse_missing(config, [name for name in TRACKER_METHODS if not hasattr(make, name)])
    return make


def open_custom_tracker(
    config: TrackerConfig, run_dir: Path, start_step: int, run_config: dict[str, Any]
) -> Tracker:
    """Create a custom tracker.

    Args:
        config: Entry of `log.trackers` in the recipe.
        run_dir: Existing directory of the run.
        start_step: Optimizer steps done before this process; rows of later steps are written again.
        run_config: Recipe, DeepSpeed JSON and number of ranks, under `recipe`, `deepspeed` and `world_size`.

    Raises:
        ConfigError: See import_tracker; or the result lacks one of TRACKER_METHODS.
    """
    make = import_tracker(config)
    with exit_as_error(f"log.trackers: {config.kind}", ConfigError):
        tracker: Tracker = make(run_dir, start_step, run_config, **config.args)
    methods = {name: getattr(tracker, name, None) for name in TRACKER_METHODS}
    _refuse_missing(config, [name for name, method in methods.items() if not callable(method)])
    return tracker


def _refuse_missing(config: TrackerConfig, missing: Sequence[str]) -> None:
    """Raise a ConfigError if methods are missing."""
    if missing:
        raise ConfigError(
            f"log.trackers: {config.kind} has no {' and no '.join(missing)}; a tracker needs "
            "write(step, row), tell(step, event) and close(exit_code), see docs/how-to/watching.md"
        )


QUEUE_SIZE = 10_000
"""Maximum number of rows and events in a tracker's queue: about 30 MB of host memory."""
CLOSE_SECONDS = 20.0
"""Seconds that all trackers together have to close at the end of a run. W&B needs up to 16 s."""
QUIET_SECONDS = 3.0
"""Seconds after which a log line names the trackers that the end of a run waits for."""
EXIT_SECONDS = 10.0
"""Seconds within which a process with a hanging tracker exits. wandb's exit handler needs up to 8 s."""
NOTIFY = "notify"
"""Name of the tracker that delivers the alerts of the section `notify`."""
_THREAD_PREFIX = "tracker "
"""Beginning of the names of tracker threads."""


class OptionalTracker:
    """A tracker that is dropped when it raises for the first time.

    A dropped tracker gets no more calls. It is not closed, since `close` might wait forever to write out the
    data that failed.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        """Wrap a tracker.

        Args:
            tracker: The tracker.
            name: Name of the tracker in log lines.
        """
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
        """See SupportsShow."""
        if isinstance(self._tracker, SupportsShow):
            self._attempt(self._tracker.show, what)

    def close(self, exit_code: int) -> None:
        """See Tracker."""
        if self._tracker is not None:
            self._attempt(self._tracker.close, exit_code)

    def _attempt(self, method: Callable[..., object], *arguments: Any) -> None:
        try:
            method(*arguments)
        except (Exception, SystemExit) as error:  # whatever a library raises: metrics.jsonl has the row
            self._drop(_format_error(error))

    def _drop(self, why: str) -> None:
        tracker = self._tracker
        self._tracker = None
        if tracker is not None:
            _log_dropped(self.name, why)


class TrackerThread(OptionalTracker):
    """Creates a tracker and calls it on a daemon thread, in the order of the calls.

    Calls go into a bounded queue and never wait for the tracker. A tracker whose queue is full is dropped.
    Without the thread, the watchdog would take a server that hangs for a minute for a hang of training, and
    end the job.
    """

    def __init__(
        self, make: Callable[[], Tracker], name: str, *, takes_rows: bool = True, resend: str = ""
    ) -> None:
        """Start the thread and wait until the tracker is created.

        Args:
            make: Creates the tracker, on the thread; its errors are raised here.
            name: See OptionalTracker.
            takes_rows: Whether the tracker uses rows; otherwise they are not queued.
            resend: End of the log line about missing rows, beginning with "; ": how to send them again.
        """
        self._takes_rows = takes_rows
        self._resend = resend
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue(QUEUE_SIZE)
        made: Future[Tracker] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, made), name=_THREAD_PREFIX + name, daemon=True
        )
        self._thread.start()
        super().__init__(made.result(), name)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """See Tracker."""
        if self._takes_rows:
            super().write(step, row)

    def close(self, exit_code: int) -> None:
        """Queue the close behind all earlier calls, without waiting; see `wait_for_trackers`."""
        super().close(exit_code)
        self._put(None)

    def join(self, deadline: float) -> bool:
        """Wait for a closed tracker, and return whether it has ended or was dropped.

        Args:
            deadline: Time until which to wait, by `time.monotonic`.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._tracker is None or not self._thread.is_alive()

    def give_up(self, seconds: float) -> None:
        """Drop a tracker whose thread has not ended, with a log line.

        Args:
            seconds: Seconds that were waited for it.
        """
        behind = self._calls.unfinished_tasks - 2  # without `close` and the `None` that ends the thread
        problem = f"did not take its last {behind:,} rows and events" if behind > 0 else "did not close"
        self._drop(f"it {problem} within {seconds:.0f} s; metrics.jsonl has all rows{self._resend}")

    def _attempt(self, method: Callable[..., object], *arguments: Any) -> None:
        self._put((method, *arguments))

    def _put(self, call: tuple[Any, ...] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop(
                f"it hangs and is {QUEUE_SIZE:,} rows and events behind; metrics.jsonl has all rows"
                f"{self._resend}"
            )

    def _drop(self, why: str) -> None:
        super()._drop(why)
        with self._calls.mutex:
            self._calls.queue.clear()
        self._calls.put_nowait(None)  # ends the thread once its current call returns

    def _run(self, make: Callable[[], Tracker], made: Future[Tracker]) -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
            return
        try:
            while (call := self._calls.get()) is not None:
                super()._attempt(*call)
                self._calls.task_done()
        except BaseException as error:  # asyncio.CancelledError does not derive from Exception
            self._drop(_format_error(error))


def wait_for_trackers(trackers: Sequence[TrackerThread], at_most: float) -> None:
    """Wait for closed trackers, and drop those that take too long.

    Args:
        trackers: Trackers whose `close` was called.
        at_most: Maximum seconds to wait for all of them together; CLOSE_SECONDS if that is less.
    """
    began = time.monotonic()
    seconds = min(CLOSE_SECONDS, at_most)
    late = [tracker for tracker in trackers if not tracker.join(began + min(QUIET_SECONDS, seconds))]
    if late and seconds > QUIET_SECONDS:
        names = " and ".join(tracker.name for tracker in late)
        logger.info("waiting up to %.0f s for %s to take the last rows", seconds, names)
    for tracker in late:
        if not tracker.join(began + seconds):
            tracker.give_up(seconds)


def limit_exit_time(exit_code: int) -> None:
    """Start a timer that ends this process after EXIT_SECONDS if the thread of a tracker still runs.

    A library that hangs in a call also hangs in its exit handler: wandb waits there for its own process.

    Args:
        exit_code: Exit code of the process.
    """
    if any(thread.name.startswith(_THREAD_PREFIX) for thread in threading.enumerate()):
        timer = threading.Timer(EXIT_SECONDS, os._exit, [exit_code])
        timer.daemon = True
        timer.start()


def open_optional_tracker(name: str, make: Callable[[], Tracker]) -> list[TrackerThread]:
    """Return the tracker on its thread, or an empty list and a log line if it cannot be opened now.

    A server that is down must not end a run that a scheduler restarts.

    Args:
        name: Name of the tracker in log lines.
        make: Creates the tracker.

    Raises:
        PipelineError: The recipe is wrong.
    """
    try:
        return [TrackerThread(make, name)]
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        _log_dropped(name, _format_error(error))
        return []


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {summarize_error(error)}"


def _log_dropped(name: str, why: str) -> None:
    logger.warning("%s is dropped (%s); the run continues without it", name, why)


FAILURE_LINES = 20
"""Maximum number of lines of a traceback in an event: the last ones."""


class Trackers:
    """All trackers of the run as one tracker; empty on every rank but the main process.

    As a context manager it closes the trackers with exit code 0. If an exception passes through, it closes
    them with 1. If that is an `Exception`, it first sends them the event RUN_FAILED.

    Args:
        trackers: Trackers of the run.
        step: Optimizer steps done, for a failure before the first row.
    """

    def __init__(self, trackers: Sequence[Tracker] = (), step: int = 0) -> None:
        self._trackers: tuple[Tracker, ...] = tuple(trackers)
        self._step = step
        self.may_notify: Callable[[Exception], bool] = lambda error: True
        """Whether the section `notify` gets a failure; False if the end of the process sends the alert."""

    @property
    def is_empty(self) -> bool:
        """Return whether there are no trackers, or they are closed."""
        return not self._trackers

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Write one row to every tracker."""
        self._step = step
        for tracker in self._trackers:
            tracker.write(step, row)

    def tell(self, step: int, event: Event) -> None:
        """Log an event, on every rank, and send it to every tracker.

        A rank without trackers logs errors as warnings, so that only the main process shows them on the
        console.
        """
        self._step = step
        level = logging.getLevelName(event.level.upper())
        level = min(level, logging.WARNING) if self.is_empty else level
        logger.log(level, "%s", event.log_line(step), extra={"event": event.name})
        for tracker in self._trackers:
            tracker.tell(step, event)

    def show(self, what: Showable) -> None:
        """Pass an object to the trackers that show such objects. May be called on any thread."""
        for tracker in self._trackers:
            if isinstance(tracker, SupportsShow):
                tracker.show(what)

    def close(self, exit_code: int, at_most: float = math.inf) -> None:
        """Close every tracker, even if closing one fails. A second call does nothing.

        Args:
            exit_code: See Tracker.close.
            at_most: Maximum seconds to wait; see wait_for_trackers.

        Raises:
            MetricsFileError: metrics.jsonl could not be closed. It is raised after all trackers are closed.
        """
        trackers = self._trackers
        self._trackers = ()
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
            self._send_failure(error)
        try:
            self.close(0 if error is None else 1)
        except (OSError, PipelineError) as failure:
            if error is None:
                raise
            logger.warning("closing the run's metrics failed: %s", failure)  # `error` is raised instead

    def _send_failure(self, error: Exception) -> None:
        """Send the failure to the trackers, without logging it: the caller shows it on the console."""
        message = summarize_error(error, 1000)
        fields = {}
        # The message of a PipelineError is enough; any other error needs the end of its traceback.
        if not isinstance(error, PipelineError):
            message = f"{type(error).__name__}: {message}"
            lines = redact_text("".join(traceback.format_exception(error))).splitlines()[-FAILURE_LINES:]
            fields["traceback"] = "\n".join(lines)
        event = Event(RUN_FAILED, message, level="error", fields=fields)
        for tracker in self._trackers:
            if isinstance(tracker, TrackerThread) and tracker.name == NOTIFY and not self.may_notify(error):
                continue
            with suppress(OSError, PipelineError):  # such as a full disk, which may be the error itself
                tracker.tell(self._step, event)
