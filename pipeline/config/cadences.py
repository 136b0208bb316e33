"""Rows, evaluations and checkpoints of a run in whole steps, once it is known how many an epoch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config.interval import Interval
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Cadences:
    """Steps between two rows of the log, two evaluations, two checkpoints; 0: only where a run ends."""

    log: int
    eval: int
    save: int


def resolve_cadences(config: RunConfig, steps_per_epoch: float) -> Cadences:
    """Return the whole steps of a recipe's intervals.

    Raises:
        ConfigError: two of them do not go together in whole steps.
    """
    for keys, message in cadence_contradictions(config, steps_per_epoch):
        raise ConfigError(f"{keys[0]}: {message}")
    log, evaluations, saves = _in_steps(config, steps_per_epoch)
    return Cadences(log=log or 0, eval=evaluations or 0, save=saves or 0)


def cadence_contradictions(
    config: RunConfig, steps_per_epoch: float | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys and the message of intervals that do not go together, of those known in steps."""
    log, evaluations, saves = _in_steps(config, steps_per_epoch)
    keep, histograms = config.checkpoint, config.wandb.histograms_every
    if keep.keep_best and saves and evaluations is not None and (not evaluations or saves % evaluations):
        yield (
            ("checkpoint.keep_best", "checkpoint.every", "eval.every"),
            "checkpoint.keep_best chooses by an evaluation of the very step that is saved; make "
            f"checkpoint.every ({saves}) a multiple of eval.every ({evaluations})",
        )
    if log is not None and histograms % log:
        yield (
            ("wandb.histograms_every", "log.every"),
            "histograms go with a row of the log; make wandb.histograms_every "
            f"({histograms}) a multiple of log.every ({log})",
        )


def intervals_in_words(config: RunConfig, steps_per_epoch: float | None, max_steps: int | None) -> list[str]:
    """Return a line for each interval that is not written in steps: how many steps it has, if known."""
    lines = []
    every = {"log.every": config.log.every, "eval.every": config.eval.every}
    every["checkpoint.every"] = config.checkpoint.every
    for (name, written), steps in zip(every.items(), _in_steps(config, steps_per_epoch), strict=True):
        if Interval.of(written).in_epochs and written:
            epochs = f"{name} {Interval.of(written).number:g} epochs"
            counted = "counted when the data is read" if steps is None else f"{steps:,} steps"
            lines.append(f"{epochs}: {counted}")
    warmup = config.schedule.warmup
    if isinstance(warmup, float):
        steps = None if max_steps is None else config.schedule.warmup_steps(max_steps)
        counted = "counted when the data is read" if steps is None else f"{steps:,} steps"
        lines.append(f"schedule.warmup {warmup:g} of the run: {counted}")
    return lines


def _in_steps(config: RunConfig, steps_per_epoch: float | None) -> tuple[int | None, int | None, int | None]:
    """Steps of the log, evaluations and saves. `None` for epochs that are not counted yet."""
    log, evaluations, saves = (
        Interval.of(section.every) for section in (config.log, config.eval, config.checkpoint)
    )
    between, steps = evaluations.in_steps(steps_per_epoch), saves.in_steps(steps_per_epoch)
    if config.checkpoint.keep_best and evaluations.in_epochs and saves.in_epochs and steps and between:
        # Each was rounded on its own, and 4 times a quarter is more or less than the whole.
        steps = max(1, round(saves.number / evaluations.number)) * between
    return log.in_steps(steps_per_epoch), between, steps
