"""Learning rate of each optimizer step, as a fraction of the peak.

The rate is a pure function of the step, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from pipeline.config.import_paths import check_signature, errors_in_one_line, import_object
from pipeline.config.optimizer_schema import ScheduleConfig
from pipeline.errors import ConfigError

MAX_TRIED_STEPS = 1000
"""Largest number of steps for which a user's own schedule is checked before training."""


def describe_missed_peak(config: ScheduleConfig, max_steps: int) -> str | None:
    """Return a warning if warm-up and decay do not fit into the run, else `None`."""
    decay = _count_decay_steps(config, max_steps) if config.kind == "wsd" else 0
    warmup = config.warmup_steps(max_steps)
    if warmup + decay <= max_steps:
        return None
    parts = f"schedule.warmup {warmup}" + (f" + decay_steps {decay}" if decay else "")
    return f"{parts} is longer than the run of {max_steps} steps; the learning rate never reaches its peak"


def learning_rate_multiplier(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based), divided by the peak.

    The first step after warm-up has the peak. A decay would reach its minimum at step `max_steps`, which is
    one step after the last one of the run.

    Raises:
        ConfigError: the user's own schedule raised an error, or returned no factor.
    """
    return LearningRate(1.0, config, max_steps)(step)


class LearningRate:
    """Computes the learning rate of each step of a run from peak and schedule.

    Args:
        peak: Highest learning rate of a built-in schedule. A user's own schedule multiplies it by any factor.
        config: Schedule section of the recipe.
        max_steps: Number of optimizer steps of the run.
    """

    def __init__(self, peak: float, config: ScheduleConfig, max_steps: int) -> None:
        self.peak = peak
        self._config = config
        self._max_steps = max_steps
        self._warmup = config.warmup_steps(max_steps)

    def __call__(self, global_step: int) -> float:
        """Return the learning rate of the step after `global_step` completed steps.

        Raises:
            ConfigError: the user's own schedule raised an error, or returned no factor.
        """
        config = self._config
        if config.kind not in SCHEDULES:
            return self.peak * _call_user_schedule(config.kind, global_step, self._max_steps)
        if global_step < self._warmup:
            return self.peak * ((global_step + 1) / (self._warmup + 1))
        return self.peak * SCHEDULES[config.kind](config, global_step, self._warmup, self._max_steps)


def _compute_constant(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    return 1.0


def _compute_wsd(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    decay = _count_decay_steps(config, max_steps)
    progress = min(1.0, max(0.0, (step - (max_steps - decay)) / decay))
    return 1.0 - (1.0 - config.min_learning_rate_ratio) * progress


def _compute_linear(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    return 1.0 - (1.0 - config.min_learning_rate_ratio) * _compute_progress(step, warmup, max_steps)


def _compute_cosine(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    low = config.min_learning_rate_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * _compute_progress(step, warmup, max_steps)))


SCHEDULES: dict[str, Callable[[ScheduleConfig, int, int, int], float]] = {
    "cosine": _compute_cosine,
    "linear": _compute_linear,
    "constant": _compute_constant,
    "wsd": _compute_wsd,
}
"""Built-in shapes after warm-up, by `schedule.kind`; any other kind is an import path.

Each maps (config, step, warm-up steps, max_steps) to a factor of the peak.
"""


def _compute_progress(step: int, warmup: int, max_steps: int) -> float:
    """Return the part of the steps after warm-up that is done, from 0 to 1."""
    return min(1.0, (step - warmup) / max(1, max_steps - warmup))


def _count_decay_steps(config: ScheduleConfig, max_steps: int) -> int:
    """Return the number of decay steps at the end of a `wsd` schedule; by default a fifth of the run."""
    return config.decay_steps or max(1, max_steps // 5)


def check_user_schedule(config: ScheduleConfig, max_steps: int) -> None:
    """Call a user's own schedule twice for steps spread over the run. Does nothing for built-in shapes.

    Raises:
        ConfigError: the schedule cannot be called, returns no factor, or returns two different factors for
            the same step.
    """
    if config.kind in SCHEDULES:
        return
    count = min(max_steps, MAX_TRIED_STEPS)
    steps = sorted({max_steps * index // count for index in range(count)} | {max_steps - 1})
    factors = {step: _call_user_schedule(config.kind, step, max_steps) for step in steps}
    for step in reversed(steps):
        second_factor = _call_user_schedule(config.kind, step, max_steps)
        if second_factor != factors[step]:
            raise ConfigError(
                f"schedule.kind: {config.kind} returned {factors[step]:g} and then {second_factor:g} for "
                f"step {step} of {max_steps}; make its result depend on its arguments only, otherwise a "
                "resumed run differs from an uninterrupted one"
            )


def _call_user_schedule(kind: str, step: int, max_steps: int) -> float:
    """Return the factor of a user's own schedule for a step.

    Raises:
        ConfigError: the schedule raised an error, or returned no factor.
    """
    with errors_in_one_line(f"schedule.kind: {kind} for step {step} of {max_steps}", ConfigError):
        returned = _import_schedule(kind)(step, max_steps)
    try:
        factor = float(returned)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"schedule.kind: {kind} returned {returned!r} for step {step} of {max_steps}; expected a finite "
            "number, 0 or more, by which optimizer.learning_rate is multiplied"
        )
    return factor


@cache
def _import_schedule(kind: str) -> Callable[[int, int], float]:
    function = import_object(kind, ConfigError)
    message = f"schedule.kind: {kind} cannot be called with (step, total_steps)"
    check_signature(function, message, ConfigError, 0, 1)
    return function


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set each parameter group's learning rate to `learning_rate` times the group's `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]
