"""Intervals and warm-ups of a recipe, and the conversion of intervals to steps.

An interval is a number of steps or epochs, and a warm-up a number of steps or a share of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


@dataclass(frozen=True)
class IntervalSteps:
    """Intervals of a run in optimizer steps."""

    log: int
    """Number of steps between two rows of the log."""
    eval: int
    """Number of steps between two evaluations; 0: only before the first and after the last step."""
    save: int
    """Number of steps between two checkpoints; 0: only at the end and at a signal to stop."""


def resolve_intervals(config: RunConfig, steps_per_epoch: float) -> IntervalSteps:
    """Return the intervals of a recipe in whole steps.

    Raises:
        ConfigError: Two intervals contradict each other in whole steps.
    """
    for keys, message in find_interval_contradictions(config, steps_per_epoch):
        raise ConfigError(f"{keys[0]}: {message}")
    log_steps, eval_steps, save_steps = _convert_to_steps(config, steps_per_epoch)
    return IntervalSteps(log=log_steps or 0, eval=eval_steps or 0, save=save_steps or 0)


def find_interval_contradictions(
    config: RunConfig, steps_per_epoch: float | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys and message of each contradiction between intervals.

    Args:
        config: The recipe.
        steps_per_epoch: Steps of an epoch. `None` before the data is counted; intervals in epochs are then
            not checked.
    """
    log_steps, eval_steps, save_steps = _convert_to_steps(config, steps_per_epoch)
    histogram_steps = config.wandb.histograms_every
    if config.checkpoint.keep_best and save_steps and eval_steps is not None:
        evaluates_at_saves = eval_steps > 0 and save_steps % eval_steps == 0
        if not evaluates_at_saves:
            yield (
                ("checkpoint.keep_best", "checkpoint.every", "eval.every"),
                "checkpoint.keep_best needs an evaluation at every step that is saved; make "
                f"checkpoint.every ({save_steps}) a multiple of eval.every ({eval_steps})",
            )
    if log_steps is not None and histogram_steps % log_steps:
        yield (
            ("wandb.histograms_every", "log.every"),
            "histograms are written with a row of the log; make wandb.histograms_every "
            f"({histogram_steps}) a multiple of log.every ({log_steps})",
        )


def _convert_to_steps(
    config: RunConfig, steps_per_epoch: float | None
) -> tuple[int | None, int | None, int | None]:
    """Return the steps between rows, evaluations and saves; `None` for epochs that are not counted yet."""
    log_every = StepsOrEpochs.parse(config.log.every)
    eval_every = StepsOrEpochs.parse(config.eval.every)
    save_every = StepsOrEpochs.parse(config.checkpoint.every)
    eval_steps = eval_every.to_steps(steps_per_epoch)
    save_steps = save_every.to_steps(steps_per_epoch)
    both_in_epochs = eval_every.in_epochs and save_every.in_epochs
    if config.checkpoint.keep_best and both_in_epochs and save_steps and eval_steps:
        # Each interval was rounded on its own, so in steps four quarters of an epoch may differ from one
        # epoch.
        save_steps = max(1, round(save_every.number / eval_every.number)) * eval_steps
    return log_every.to_steps(steps_per_epoch), eval_steps, save_steps


_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(step|epoch)s?")
_EXPECTED = 'expected steps (500), a share of an epoch (0.25) or a text with its unit ("2 epochs")'


@dataclass(frozen=True)
class StepsOrEpochs:
    """An interval: a number of optimizer steps, or of passes over the training data."""

    number: float
    """Length of the interval in optimizer steps or epochs; 0 for no interval."""
    in_epochs: bool
    """Whether `number` counts epochs, not steps."""

    @staticmethod
    def parse(written: Any) -> StepsOrEpochs:
        """Return the interval that a recipe's `every` states.

        Raises:
            ValueError: The text has no number with a unit, the number is negative or not finite, or its unit
                is ambiguous.
        """
        if isinstance(written, str) and (match := _WITH_UNIT.fullmatch(written.strip().lower())):
            interval = StepsOrEpochs(float(match[1]), match[2] == "epoch")
            if interval.in_epochs or interval.number.is_integer():
                return interval
        elif isinstance(written, float) and written >= 1 and math.isfinite(written):
            raise ValueError(
                f"{written!r} may be steps or epochs; write {round(written)} or "
                f'"{written:g} epoch{"s" * (written != 1)}"'
            )
        elif isinstance(written, int | float) and not isinstance(written, bool) and written >= 0:
            return StepsOrEpochs(float(written), isinstance(written, float))
        raise ValueError(f"{_EXPECTED}, given {written!r}")

    def to_steps(self, steps_per_epoch: float | None) -> int | None:
        """Return the interval in whole steps: at least 1, or 0 if `number` is 0.

        Args:
            steps_per_epoch: Steps of an epoch. `None` before the data is counted; the result is then `None`
                for epochs.
        """
        if not self.in_epochs or not self.number:
            return int(self.number)
        return None if steps_per_epoch is None else max(1, round(self.number * steps_per_epoch))


def _validate_every(written: Any) -> Any:
    """Return a valid interval as it was written; 0 for a zero in any unit."""
    return written if StepsOrEpochs.parse(written).number else 0


def _validate_warm_up(written: Any) -> Any:
    """Return a valid warm-up as it was written: steps, or a share of the run below 1."""
    is_number = isinstance(written, int | float) and not isinstance(written, bool)
    if not is_number or written < 0 or (isinstance(written, float) and written >= 1):
        may_mean_steps = is_number and 1 <= written < 2**62
        advice = f"; for steps write {round(written)}" if may_mean_steps else ""
        raise ValueError(
            f"expected steps (a whole number) or a share of the run below 1 (0.03), given {written!r}{advice}"
        )
    return written or 0


_MIN_ZERO: dict[str, Any] = {"minimum": 0}
Every = Annotated[
    int | float | str, PlainValidator(_validate_every), WithJsonSchema({"type": "interval", **_MIN_ZERO})
]
"""Interval in a recipe: steps as a whole number, epochs as a float below 1, or a text with its unit.

The value stays as it was written, so that recipe.yaml shows it in its unit.
"""
WarmUp = Annotated[
    int | float, PlainValidator(_validate_warm_up), WithJsonSchema({"type": "steps or share", **_MIN_ZERO})
]
"""Warm-up in a recipe: steps as a whole number, or a share of the run as a float below 1."""
