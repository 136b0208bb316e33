"""Where a run's numbers go: metrics.jsonl (the record), the console, Weights & Biases, TensorBoard, places of
the user's own. Several of them as one, and which of them a recipe asks for.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from pipeline.config.command_lines import shell_line
from pipeline.config.optional_packages import require
from pipeline.config.schema import RunConfig
from pipeline.errors import PipelineError, one_line
from pipeline.monitoring.events import RUN_FAILED, Event, Shown
from pipeline.monitoring.trackers.console import ConsoleSink
from pipeline.monitoring.trackers.dispensable import (
    Dispensable,
    Shows,
    Sink,
    SinkThread,
    import_sink,
    open_dispensable,
    open_own,
    wait_for,
)
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, JsonlSink, iterate_record, replay
from pipeline.monitoring.trackers.notify import NotifySink, ways_of
from pipeline.monitoring.trackers.tensorboard_events import TensorBoardSink, import_writer
from pipeline.redaction import redact, redact_text

logger = logging.getLogger(__name__)

FAILURE_LINES = 20


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


@dataclass(frozen=True)
class TrackedRun:
    """The run that trackers are opened for."""

    config: RunConfig
    directory: Path
    """Directory of the run, which exists already."""
    start_step: int
    """Optimizer steps done before this process."""
    max_steps: int
    settings: dict[str, Any]
    """The run's configuration as trackers show it, without secrets."""
    record: Path
    """Path of metrics.jsonl."""


@dataclass(frozen=True)
class Tracker:
    """A kind of place for metrics that a recipe can ask for."""

    check: Callable[[RunConfig], object]
    """Raises a ConfigError if the recipe asks for what it cannot have."""
    build: Callable[[TrackedRun], Sequence[Sink]]
    """Opens what the recipe asks for; empty if it asks for nothing, or if that cannot be opened now."""


def check_sinks(config: RunConfig) -> None:
    """Refuse what a recipe asks for and cannot have, before anything is built.

    Raises:
        ConfigError: as build_sinks.
    """
    for tracker in TRACKERS.values():
        tracker.check(config)


def build_sinks(
    config: RunConfig,
    *,
    run_dir: Path,
    is_main_process: bool,
    start_step: int,
    max_steps: int,
    run_config: dict[str, Any],
    due: Mapping[str, Collection[int]] | None = None,
    redo_evaluation: bool = False,
) -> Sinks:
    """Open every sink the recipe asks for.

    Args:
        config: The recipe; `log`, `wandb` and `notify` are read.
        run_dir: Directory of the run (exists already); everything is written under it.
        is_main_process: False gives an empty `Sinks`: only one process of a job writes.
        start_step: Optimizer steps done before this process. Rows of later steps are taken back.
        max_steps: Optimizer steps of the whole run.
        run_config: What Weights & Biases and sinks of the user's own show as the run's configuration; they
            get it without secrets.
        due: Group of metrics, `train` or `eval` -> steps up to `start_step` of which metrics.jsonl has a row;
            those that it lacks are told in one line.
        redo_evaluation: The evaluation of `start_step` comes again.

    Raises:
        ConfigError: TensorBoard is asked for and not installed; a sink's import path is wrong; `notify` names
            what is not there.
        MetricsFileError: metrics.jsonl cannot be written.
    """
    if not is_main_process:
        return Sinks()
    sinks: list[Sink] = []
    run_config = redact(run_config)
    with ExitStack() as undo:
        undo.callback(lambda: Sinks(sinks).close(1))
        record = JsonlSink(run_dir / METRICS_FILE, start_step=start_step, redo_evaluation=redo_evaluation)
        sinks.append(record)
        if (said := record.gaps(due or {})) is not None:
            logger.warning("%s %s; the run goes on without them", record.path, said)
        run = TrackedRun(config, run_dir, start_step, max_steps, run_config, record.path)
        for tracker in TRACKERS.values():
            sinks += tracker.build(run)
        undo.pop_all()
    return Sinks(sinks, start_step)


def _check_tensorboard(config: RunConfig) -> None:
    if config.log.tensorboard:
        import_writer()


def _open_tensorboard(run: TrackedRun) -> Sequence[Sink]:
    if not run.config.log.tensorboard:
        return []
    recorded = (line for line in iterate_record(run.record) if line["step"] >= run.start_step)
    make = partial(TensorBoardSink, run.directory / "tensorboard", run.start_step, recorded)
    return open_dispensable("log.tensorboard", make)


def _check_own(config: RunConfig) -> None:
    for own in config.log.sinks:
        import_sink(own)


def _open_own(run: TrackedRun) -> Sequence[Sink]:
    sinks: list[Sink] = []
    for own in run.config.log.sinks:
        make = partial(open_own, own, run.directory, run.start_step, run.settings)
        sinks += open_dispensable(own.kind, make)
    return sinks


def _check_wandb(config: RunConfig) -> None:
    if config.wandb.mode in ("online", "offline"):  # auto does without
        require("wandb", f"wandb.mode: {config.wandb.mode}", "set wandb.mode=disabled")


def _open_wandb(run: TrackedRun) -> Sequence[Sink]:
    """Return the sink of Weights & Biases; none where it cannot be started."""
    if run.config.wandb.mode == "disabled":
        return []
    # 0.4 s of imports: only where it is used.
    from pipeline.monitoring.trackers.weights_and_biases import open_wandb

    online = open_wandb(
        run.config.wandb,
        run_name=run.config.name,
        run_dir=run.directory,
        start_step=run.start_step,
        run_config=run.settings,
        earlier=partial(replay, run.record, run.start_step),
    )
    if online is None:
        return []
    same_run = shell_line(f"run_dir={run.directory.absolute()}")
    resend = f", and the same command with {same_run} sends them to W&B"
    return [SinkThread(lambda: online, "W&B", resend=resend)]


def _check_notify(config: RunConfig) -> None:
    ways_of(config.notify)


def _open_notify(run: TrackedRun) -> Sequence[Sink]:
    ways = ways_of(run.config.notify)
    if not ways:
        return []
    make = partial(NotifySink, ways, run.config.notify.level, run.directory.resolve().name)
    return [SinkThread(make, "notify", takes_rows=False)]


def _check_console(config: RunConfig) -> None:
    """Nothing: every installation has it."""


def _open_console(run: TrackedRun) -> Sequence[Sink]:
    if not run.config.log.shows_rows:
        return []
    # Open MPI hands every rank a pty, whatever its own output is. Notebooks get plain lines.
    is_terminal = False if "OMPI_COMM_WORLD_RANK" in os.environ else None
    console = Console(force_terminal=is_terminal, force_jupyter=False)
    # Not on a thread: its lines stand between those of the log, in the order of what happened.
    return [Dispensable(ConsoleSink(console, max_steps=run.max_steps), "the console")]


TRACKERS = {
    "log.tensorboard": Tracker(_check_tensorboard, _open_tensorboard),
    "log.sinks": Tracker(_check_own, _open_own),
    "wandb": Tracker(_check_wandb, _open_wandb),
    "notify": Tracker(_check_notify, _open_notify),
    "log.console": Tracker(_check_console, _open_console),
}
"""Key of the recipe that asks for a tracker -> its check and its builder, in the order in which they are
opened. `log.sinks` takes a user's own by import path."""
