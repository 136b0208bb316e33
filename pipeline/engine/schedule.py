"""Learning rate of each optimizer step: a share of the peak. Pure: the same step gives the same number."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from pipeline.config.import_paths import check_signature, errors_in_one_line, import_object
from pipeline.config.optimizer_schema import ScheduleConfig
from pipeline.errors import ConfigError

MAX_TRIED_STEPS = 1000
"""Steps of the run at which a function of the user's own is called before the first one."""


def describe_missed_peak(config: ScheduleConfig, max_steps: int) -> str | None:
    """Return one line if warm-up and decay do not fit into the run, as in a short trial, else `None`."""
    decay = _decay_steps(config, max_steps) if config.kind == "wsd" else 0
    warmup = config.warmup_steps(max_steps)
    if warmup + decay <= max_steps:
        return None
    parts = f"schedule.warmup {warmup}" + (f" + decay_steps {decay}" if decay else "")
    return f"{parts} is longer than the run of {max_steps} steps; the learning rate never reaches its peak"


def learning_rate_multiplier(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) over the peak: warm-up, then the shape.

    Warm-up reaches 1 at the step behind it; the last step (`max_steps - 1`) is one short of the minimum.

    Raises:
        ConfigError: a function of the user's own raises, or gives no factor.
    """
    return LearningRate(1.0, config, max_steps)(step)


class LearningRate:
    """The learning rate of each step of a run."""

    def __init__(self, peak: float, config: ScheduleConfig, max_steps: int) -> None:
        self.peak = peak
        self._config = config
        self._max_steps = max_steps
        self._warmup = config.warmup_steps(max_steps)

    def __call__(self, global_step: int) -> float:
        """Return the learning rate of the step after `global_step`.

        Raises:
            ConfigError: see multiplier.
        """
        config = self._config
        if config.kind not in SCHEDULES:
            return self.peak * _own_factor(config.kind, global_step, self._max_steps)
        if global_step < self._warmup:
            return self.peak * ((global_step + 1) / (self._warmup + 1))
        return self.peak * SCHEDULES[config.kind](config, global_step, self._warmup, self._max_steps)


def _constant(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    return 1.0


def _wsd(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    decay = _decay_steps(config, max_steps)
    passed = min(1.0, max(0.0, (step - (max_steps - decay)) / decay))
    return 1.0 - (1.0 - config.min_learning_rate_ratio) * passed


def _linear(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    return 1.0 - (1.0 - config.min_learning_rate_ratio) * _passed(step, warmup, max_steps)


def _cosine(config: ScheduleConfig, step: int, warmup: int, max_steps: int) -> float:
    low = config.min_learning_rate_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * _passed(step, warmup, max_steps)))


SCHEDULES: dict[str, Callable[[ScheduleConfig, int, int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
}
"""Built-in shapes after warm-up; any other kind is an import path."""


def _passed(step: int, warmup: int, max_steps: int) -> float:
    return min(1.0, (step - warmup) / max(1, max_steps - warmup))


def _decay_steps(config: ScheduleConfig, max_steps: int) -> int:
    return config.decay_steps or max(1, max_steps // 5)


def check_user_schedule(config: ScheduleConfig, max_steps: int) -> None:
    """Call a schedule of the user's own twice for steps all over the run. Built-in shapes pass.

    Raises:
        ConfigError: it cannot be called, gives no factor, or another one at the second call.
    """
    if config.kind in SCHEDULES:
        return
    count = min(max_steps, MAX_TRIED_STEPS)
    steps = sorted({max_steps * index // count for index in range(count)} | {max_steps - 1})
    factors = {step: _own_factor(config.kind, step, max_steps) for step in steps}
    for step in reversed(steps):
        if (again := _own_factor(config.kind, step, max_steps)) != factors[step]:
            raise ConfigError(
                f"schedule.kind: {config.kind} gave {factors[step]:g} and then {again:g} for step {step} of "
                f"{max_steps}; make it follow from its arguments alone, or a resumed run leaves the curve"
            )


def _own_factor(kind: str, step: int, max_steps: int) -> float:
    with errors_in_one_line(f"schedule.kind: {kind} for step {step} of {max_steps}", ConfigError):
        given = _imported(kind)(step, max_steps)
    try:
        factor = float(given)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"schedule.kind: {kind} gave {given!r} for step {step} of {max_steps}; expected a finite number, "
            "0 or more: the learning rate over optimizer.learning_rate"
        )
    return factor


@cache
def _imported(kind: str) -> Callable[[int, int], float]:
    function = import_object(kind, ConfigError)
    message = f"schedule.kind: {kind} cannot be called with (step, total_steps)"
    check_signature(function, message, ConfigError, 0, 1)
    return function


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set each group's rate: the schedule's times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]
