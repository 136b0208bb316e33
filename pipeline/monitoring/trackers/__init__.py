"""Trackers of a run: metrics.jsonl (the record), the console, W&B, TensorBoard, alerts, and custom ones.

This module opens the trackers that a recipe asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.command_lines import format_shell_line
from pipeline.config.optional_packages import require_package
from pipeline.config.schema import RunConfig
from pipeline.monitoring.trackers.console import ConsoleTracker
from pipeline.monitoring.trackers.interface import (
    NOTIFY,
    OptionalTracker,
    Tracker,
    Trackers,
    TrackerThread,
    import_tracker,
    open_custom_tracker,
    open_optional_tracker,
)
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, JsonlTracker, iterate_record, replay
from pipeline.monitoring.trackers.notify import NotifyTracker, build_channels
from pipeline.monitoring.trackers.tensorboard_events import TensorBoardTracker, import_writer
from pipeline.redaction import redact


@dataclass(frozen=True)
class TrackedRun:
    """Run for which trackers are opened."""

    config: RunConfig
    """The recipe."""
    directory: Path
    """Existing directory of the run."""
    start_step: int
    """Optimizer steps done before this process."""
    max_steps: int
    """Optimizer steps of the whole run."""
    settings: dict[str, Any]
    """Configuration of the run without secrets, for trackers to show."""
    record: Path
    """Path of metrics.jsonl, from which the rows after `start_step` were removed."""


@dataclass(frozen=True)
class TrackerKind:
    """Entry of TRACKERS: a kind of tracker that a recipe can ask for."""

    build: Callable[[TrackedRun], Sequence[Tracker]]
    """Function that opens the trackers; empty if the recipe asks for none or they cannot be opened now."""
    check: Callable[[RunConfig], object] = lambda config: None
    """Function that raises a ConfigError if the recipe asks for a tracker that is not available."""


def check_trackers(config: RunConfig) -> None:
    """Check that the trackers of a recipe are available, before anything is built.

    Raises:
        ConfigError: A tracker's package is missing, its import path is wrong, or `notify` names a program or
            variable that does not exist.
    """
    for kind in TRACKERS.values():
        kind.check(config)


def build_trackers(
    config: RunConfig,
    *,
    run_dir: Path,
    is_main_process: bool,
    start_step: int,
    max_steps: int,
    run_config: dict[str, Any],
    redo_evaluation: bool = False,
) -> Trackers:
    """Open every tracker that the recipe asks for.

    Args:
        config: The recipe; its sections `log`, `wandb` and `notify` are read.
        run_dir: Existing directory of the run; all files are written under it.
        is_main_process: Whether this is the main process. Other processes get an empty `Trackers`.
        start_step: Optimizer steps done before this process. Rows of later steps are removed.
        max_steps: Optimizer steps of the whole run.
        run_config: Configuration of the run for trackers to show; secrets are removed here.
        redo_evaluation: Whether the evaluation of `start_step` is repeated; if so, its row is removed.

    Raises:
        ConfigError: See check_trackers.
        MetricsFileError: metrics.jsonl cannot be read or written.
    """
    if not is_main_process:
        return Trackers()
    trackers: list[Tracker] = []
    run_config = redact(run_config)
    with ExitStack() as undo:  # closes the trackers that are open if one cannot be opened
        undo.callback(lambda: Trackers(trackers).close(1))
        record = JsonlTracker(run_dir / METRICS_FILE, start_step=start_step, redo_evaluation=redo_evaluation)
        trackers.append(record)
        run = TrackedRun(
            config=config,
            directory=run_dir,
            start_step=start_step,
            max_steps=max_steps,
            settings=run_config,
            record=record.path,
        )
        for kind in TRACKERS.values():
            trackers += kind.build(run)
        undo.pop_all()
    return Trackers(trackers, start_step)


def _open_tensorboard(run: TrackedRun) -> Sequence[Tracker]:
    if not run.config.log.tensorboard:
        return []
    lines = (line for line in iterate_record(run.record) if line["step"] >= run.start_step)
    make = partial(TensorBoardTracker, run.directory / "tensorboard", run.start_step, lines)
    return open_optional_tracker("log.tensorboard", make)


def _check_custom(config: RunConfig) -> None:
    for tracker in config.log.trackers:
        import_tracker(tracker)


def _open_custom(run: TrackedRun) -> Sequence[Tracker]:
    trackers: list[Tracker] = []
    for tracker in run.config.log.trackers:
        make = partial(open_custom_tracker, tracker, run.directory, run.start_step, run.settings)
        trackers += open_optional_tracker(tracker.kind, make)
    return trackers


def _check_wandb(config: RunConfig) -> None:
    if config.wandb.mode in ("online", "offline"):  # `auto` runs without the package
        require_package("wandb", f"wandb.mode: {config.wandb.mode}", "set wandb.mode=disabled")


def _open_wandb(run: TrackedRun) -> Sequence[Tracker]:
    """Return the tracker of Weights & Biases; an empty list if it is disabled or cannot be started."""
    if run.config.wandb.mode == "disabled":
        return []
    # Imported here because the import takes 0.4 s.
    from pipeline.monitoring.trackers.weights_and_biases import open_wandb

    tracker = open_wandb(
        run.config.wandb,
        run_name=run.config.name,
        run_dir=run.directory,
        start_step=run.start_step,
        run_config=run.settings,
        read_earlier=partial(replay, run.record, run.start_step),
    )
    if tracker is None:
        return []
    option = format_shell_line(f"run_dir={run.directory.absolute()}")
    resend = f"; the same command with {option} sends them to W&B"
    return [TrackerThread(lambda: tracker, "W&B", resend=resend)]


def _open_notify(run: TrackedRun) -> Sequence[Tracker]:
    channels = build_channels(run.config.notify)
    if not channels:
        return []
    make = partial(NotifyTracker, channels, run.config.notify.level, run.directory.resolve().name)
    return [TrackerThread(make, NOTIFY, takes_rows=False)]


def _open_console(run: TrackedRun) -> Sequence[Tracker]:
    if not run.config.log.shows_rows:
        return []
    # Not on a thread, so that the lines of rows and of the log are printed in order.
    return [OptionalTracker(ConsoleTracker(run.max_steps), "the console")]


TRACKERS = {
    "log.tensorboard": TrackerKind(
        _open_tensorboard, lambda config: import_writer() if config.log.tensorboard else None
    ),
    "log.trackers": TrackerKind(_open_custom, _check_custom),
    "wandb": TrackerKind(_open_wandb, _check_wandb),
    "notify": TrackerKind(_open_notify, lambda config: build_channels(config.notify)),
    "log.console": TrackerKind(_open_console),
}
"""Key of the recipe -> the kind of tracker that it asks for, in the order in which trackers are opened.
`log.trackers` opens custom trackers by import path."""
