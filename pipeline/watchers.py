"""What looks at each logged row and may say something of it, or end the run.

A row's numbers are sums over all ranks, so every rank's watchers answer alike, without a further collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import NonFiniteLossError, PipelineError
from pipeline.events import Event

Tell = Callable[[int, Event], None]
"""Takes what happened at a step."""

# Steps in a row without a finite gradient that end a run. fp16 first searches its loss scale: 2**32 takes 32.
MAX_CONSECUTIVE_SKIPS = {"fp32": 10, "bf16": 10, "fp16": 40}


@dataclass(frozen=True)
class Stop:
    """The run ends here, without a further checkpoint, by this error and with its exit code."""

    error: PipelineError


class Watcher(Protocol):
    """Asked on every rank about every row of training."""

    def __call__(self, step: int, row: Mapping[str, float]) -> Event | Stop | None:
        """The answer depends on what all ranks are given alike: the step, the rows so far, the recipe."""
        ...


def ask(watchers: Iterable[Watcher], step: int, row: Mapping[str, float], tell: Tell) -> None:
    """Has each look at the row, and tells what it says.

    Raises:
        PipelineError: the first stop's.
    """
    for watcher in watchers:
        answer = watcher(step, row)
        if isinstance(answer, Event):
            tell(step, answer)
        elif isinstance(answer, Stop):
            raise answer.error


class NonFiniteSteps:
    """Ends a run whose steps have no finite gradient any more, or had none up to its last one.

    Args:
        precision: Of the run.
        first_step: Where this process began.
        max_steps: Where the run ends.
    """

    def __init__(self, precision: str, first_step: int, max_steps: int) -> None:
        self._precision = precision
        self._first_step = first_step
        self._max_steps = max_steps

    def __call__(self, step: int, row: Mapping[str, float]) -> Stop | None:
        """See Watcher."""
        skips = int(row.get("train/skipped_in_a_row", 0))
        too_many = MAX_CONSECUTIVE_SKIPS[self._precision]
        if step == self._max_steps and self._precision != "fp16":  # which searches its loss scale first
            too_many = min(too_many, step - self._first_step)
        if not skips or skips < too_many:
            return None
        return Stop(
            NonFiniteLossError(
                f"the last {skips} steps had an infinite or NaN gradient (loss {row['train/loss']}) and were "
                "skipped; the parameters are those of the last good step. Look at the data, lower "
                "optimizer.learning_rate, or raise schedule.warmup_steps"
            )
        )
