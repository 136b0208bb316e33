"""Intervals and warm-ups, in the units that people think in: steps, epochs, a share of the run."""

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
    """Steps between two rows of the log, two evaluations, two checkpoints; 0: only where a run ends."""

    log: int
    eval: int
    save: int


def resolve_intervals(config: RunConfig, steps_per_epoch: float) -> IntervalSteps:
    """Return the whole steps of a recipe's intervals.

    Raises:
        ConfigError: two of them do not go together in whole steps.
    """
    for keys, message in find_interval_contradictions(config, steps_per_epoch):
        raise ConfigError(f"{keys[0]}: {message}")
    log, evaluations, saves = _in_steps(config, steps_per_epoch)
    return IntervalSteps(log=log or 0, eval=evaluations or 0, save=saves or 0)


def find_interval_contradictions(
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


def _in_steps(config: RunConfig, steps_per_epoch: float | None) -> tuple[int | None, int | None, int | None]:
    """Return steps of the log, evaluations and saves. `None` for epochs that are not counted yet."""
    log, evaluations, saves = (
        StepsOrEpochs.parse(section.every) for section in (config.log, config.eval, config.checkpoint)
    )
    between, steps = evaluations.in_steps(steps_per_epoch), saves.in_steps(steps_per_epoch)
    if config.checkpoint.keep_best and evaluations.in_epochs and saves.in_epochs and steps and between:
        # Each was rounded on its own, and 4 times a quarter is more or less than the whole.
        steps = max(1, round(saves.number / evaluations.number)) * between
    return log.in_steps(steps_per_epoch), between, steps


_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(step|epoch)s?")
_EXPECTED = 'expected steps (500), a share of an epoch (0.25) or a text with its unit ("2 epochs")'


@dataclass(frozen=True)
class StepsOrEpochs:
    """A number of optimizer steps, or of passes over the training data."""

    number: float
    in_epochs: bool

    @staticmethod
    def parse(written: Any) -> StepsOrEpochs:
        """Return what a recipe's `every` means.

        Raises:
            ValueError: it is no number, negative, or its unit is not clear.
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

    def in_steps(self, steps_per_epoch: float | None) -> int | None:
        """Return the whole number of steps, at least 1 unless it is never due.

        Args:
            steps_per_epoch: `None` before the data is counted; epochs then have no steps either.
        """
        if not self.in_epochs or not self.number:
            return int(self.number)
        return None if steps_per_epoch is None else max(1, round(self.number * steps_per_epoch))


def _every(written: Any) -> Any:
    """Return it as it was written; 0 for never in any unit."""
    return written if StepsOrEpochs.parse(written).number else 0


def _warm_up(written: Any) -> Any:
    is_number = isinstance(written, int | float) and not isinstance(written, bool)
    if not is_number or written < 0 or (isinstance(written, float) and written >= 1):
        steps = "" if not is_number or not 1 <= written < 2**62 else f"; for steps write {round(written)}"
        raise ValueError(
            f"expected steps (a whole number) or a share of the run below 1 (0.03), given {written!r}{steps}"
        )
    return written or 0


_ZERO: dict[str, Any] = {"minimum": 0}
Every = Annotated[int | float | str, PlainValidator(_every), WithJsonSchema({"type": "interval", **_ZERO})]
"""Steps as a whole number, epochs as a float below 1, or a text with its unit. Kept as it was written."""
WarmUp = Annotated[int | float, PlainValidator(_warm_up), WithJsonSchema({"type": "steps or share", **_ZERO})]
"""Steps as a whole number, or a share of the run as a float below 1."""
