"""Where a run's numbers go: metrics.jsonl (the record), the console, W&B, TensorBoard, a user's own.

Which of them a recipe asks for, and how each is made.
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
class TrackerKind:
    """A kind of place for metrics that a recipe can ask for."""

    build: Callable[[TrackedRun], Sequence[Tracker]]
    """Opens what the recipe asks for; empty if it asks for nothing, or if that cannot be opened now."""
    check: Callable[[RunConfig], object] = lambda config: None
    """Raises a ConfigError if the recipe asks for what it cannot have."""


def check_trackers(config: RunConfig) -> None:
    """Refuse what a recipe asks for and cannot have, before anything is built.

    Raises:
        ConfigError: See build_trackers.
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
    """Open every tracker the recipe asks for.

    Args:
        config: The recipe; `log`, `wandb` and `notify` are read.
        run_dir: Existing directory of the run; everything is written under it.
        is_main_process: False gives an empty `Trackers`: only one process of a job writes.
        start_step: Optimizer steps done before this process. Rows of later steps are taken back.
        max_steps: Optimizer steps of the whole run.
        run_config: Configuration of the run that trackers show; they get it without secrets.
        redo_evaluation: Whether the evaluation of `start_step` comes again.

    Raises:
        ConfigError: A tracker's package is missing, its import path is wrong, or `notify` names what is not
            there.
        MetricsFileError: metrics.jsonl cannot be written.
    """
    if not is_main_process:
        return Trackers()
    trackers: list[Tracker] = []
    run_config = redact(run_config)
    with ExitStack() as undo:
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
    recorded = (line for line in iterate_record(run.record) if line["step"] >= run.start_step)
    make = partial(TensorBoardTracker, run.directory / "tensorboard", run.start_step, recorded)
    return open_optional_tracker("log.tensorboard", make)


def _check_own(config: RunConfig) -> None:
    for own in config.log.trackers:
        import_tracker(own)


def _open_own(run: TrackedRun) -> Sequence[Tracker]:
    trackers: list[Tracker] = []
    for own in run.config.log.trackers:
        make = partial(open_custom_tracker, own, run.directory, run.start_step, run.settings)
        trackers += open_optional_tracker(own.kind, make)
    return trackers


def _check_wandb(config: RunConfig) -> None:
    if config.wandb.mode in ("online", "offline"):  # auto does without
        require_package("wandb", f"wandb.mode: {config.wandb.mode}", "set wandb.mode=disabled")


def _open_wandb(run: TrackedRun) -> Sequence[Tracker]:
    """Return the tracker of Weights & Biases; none where it cannot be started."""
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
    same_run = format_shell_line(f"run_dir={run.directory.absolute()}")
    resend = f", and the same command with {same_run} sends them to W&B"
    return [TrackerThread(lambda: online, "W&B", resend=resend)]


def _open_notify(run: TrackedRun) -> Sequence[Tracker]:
    ways = build_channels(run.config.notify)
    if not ways:
        return []
    make = partial(NotifyTracker, ways, run.config.notify.level, run.directory.resolve().name)
    return [TrackerThread(make, "notify", takes_rows=False)]


def _open_console(run: TrackedRun) -> Sequence[Tracker]:
    if not run.config.log.shows_rows:
        return []
    # Not on a thread: its lines stand between those of the log, in the order of what happened.
    return [OptionalTracker(ConsoleTracker(run.max_steps), "the console")]


TRACKERS = {
    "log.tensorboard": TrackerKind(
        _open_tensorboard, lambda config: import_writer() if config.log.tensorboard else None
    ),
    "log.trackers": TrackerKind(_open_own, _check_own),
    "wandb": TrackerKind(_open_wandb, _check_wandb),
    "notify": TrackerKind(_open_notify, lambda config: build_channels(config.notify)),
    "log.console": TrackerKind(_open_console),
}
"""Key of the recipe that asks for a tracker -> how it is opened and checked, in the order in which they are
opened. `log.trackers` takes a user's own by import path."""
