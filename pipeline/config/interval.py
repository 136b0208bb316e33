"""Intervals and warm-ups in steps, epochs or a share of the run, and their conversion to steps."""

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
    """Intervals of a run in optimizer steps. 0 means only at the end of the run."""

    log: int
    """Number of steps between two rows of the log."""
    eval: int
    """Number of steps between two evaluations."""
    save: int
    """Number of steps between two checkpoints."""


def resolve_intervals(config: RunConfig, steps_per_epoch: float) -> IntervalSteps:
    """Return the intervals of a recipe in whole steps.

    Raises:
        ConfigError: Two intervals contradict each other in whole steps.
    """
    for keys, message in find_interval_contradictions(config, steps_per_epoch):
        raise ConfigError(f"{keys[0]}: {message}")
    log, evaluations, saves = _convert_to_steps(config, steps_per_epoch)
    return IntervalSteps(log=log or 0, eval=evaluations or 0, save=saves or 0)


def find_interval_contradictions(
    config: RunConfig, steps_per_epoch: float | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys and message of each contradiction between intervals.

    Args:
        config: The recipe.
        steps_per_epoch: Steps of an epoch. `None` before the data is counted; intervals in epochs are then
            not checked.
    """
    log, evaluations, saves = _convert_to_steps(config, steps_per_epoch)
    histograms = config.wandb.histograms_every
    if (
        config.checkpoint.keep_best
        and saves
        and evaluations is not None
        and (not evaluations or saves % evaluations)
    ):
        yield (
            ("checkpoint.keep_best", "checkpoint.every", "eval.every"),
            "checkpoint.keep_best needs an evaluation at every step that is saved; make "
            f"checkpoint.every ({saves}) a multiple of eval.every ({evaluations})",
        )
    if log is not None and histograms % log:
        yield (
            ("wandb.histograms_every", "log.every"),
            "histograms are written with a row of the log; make wandb.histograms_every "
            f"({histograms}) a multiple of log.every ({log})",
        )


def _convert_to_steps(
    config: RunConfig, steps_per_epoch: float | None
) -> tuple[int | None, int | None, int | None]:
    """Return the steps between rows, evaluations and saves; `None` for epochs that are not counted yet."""
    log, evaluations, saves = (
        StepsOrEpochs.parse(section.every) for section in (config.log, config.eval, config.checkpoint)
    )
    eval_steps = evaluations.to_steps(steps_per_epoch)
    save_steps = saves.to_steps(steps_per_epoch)
    if (
        config.checkpoint.keep_best
        and evaluations.in_epochs
        and saves.in_epochs
        and save_steps
        and eval_steps
    ):
        # Each was rounded on its own, so 4 times a quarter of an epoch may differ from a whole epoch in
        # steps.
        save_steps = max(1, round(saves.number / evaluations.number)) * eval_steps
    return log.to_steps(steps_per_epoch), eval_steps, save_steps


_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(step|epoch)s?")
_EXPECTED = 'expected steps (500), a share of an epoch (0.25) or a text with its unit ("2 epochs")'


@dataclass(frozen=True)
class StepsOrEpochs:
    """An interval: a number of optimizer steps, or of passes over the training data."""

    number: float
    in_epochs: bool
    """Whether `number` counts epochs, not steps."""

    @staticmethod
    def parse(written: Any) -> StepsOrEpochs:
        """Return the interval that a recipe's `every` states.

        Raises:
            ValueError: It is not a number, is negative, or its unit is ambiguous.
        """
        if isinstance(written, str) and (match := _WITH_UNIT.fullmatch(written.strip().lower())):
            found = StepsOrEpochs(float(match[1]), match[2] == "epoch")
            if found.in_epochs or found.number.is_integer():
                return found
        elif isinstance(written, float) and written >= 1 and math.isfinite(written):
            raise ValueError(
                f"{written:g} may be steps or epochs; write {max(1, round(written))} or "
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
        steps = "" if not is_number or not 1 <= written < 2**62 else f"; for steps write {round(written)}"
        raise ValueError(
            f"expected steps (a whole number) or a share of the run below 1 (0.03), given {written!r}{steps}"
        )
    return written or 0


_ZERO: dict[str, Any] = {"minimum": 0}
Every = Annotated[
    int | float | str, PlainValidator(_validate_every), WithJsonSchema({"type": "interval", **_ZERO})
]
"""Interval in a recipe: steps as a whole number, epochs as a float below 1, or a text with its unit.

The value stays as it was written, so that recipe.yaml shows it in its unit.
"""
WarmUp = Annotated[
    int | float, PlainValidator(_validate_warm_up), WithJsonSchema({"type": "steps or share", **_ZERO})
]
"""Warm-up in a recipe: steps as a whole number, or a share of the run as a float below 1."""
