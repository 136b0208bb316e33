"""Optimizer step -> share of the peak learning rate. Pure: the same step gives the same number."""

from __future__ import annotations

import math

from pipeline.config.optimizer_schema import ScheduleConfig


def remark(config: ScheduleConfig, max_steps: int) -> str | None:
    """One line where warm-up and decay do not fit into the run (a trial run of a few steps), else None."""
    decay = _decay_steps(config, max_steps) if config.kind == "wsd" else 0
    warmup = config.warmup_steps(max_steps)
    if warmup + decay <= max_steps:
        return None
    parts = f"schedule.warmup {warmup}" + (f" + decay_steps {decay}" if decay else "")
    return f"{parts} is longer than the run of {max_steps} steps; the learning rate never reaches its peak"


def multiplier(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """The learning rate of optimizer step `step` (0-based) over the peak: warm-up, then the shape.

    Warm-up reaches 1 at the step behind it; the last step (`max_steps - 1`) is one short of the minimum.
    """
    warmup = config.warmup_steps(max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    low = config.min_learning_rate_ratio
    if config.kind == "constant":
        return 1.0
    if config.kind == "wsd":
        decay = _decay_steps(config, max_steps)
        passed = min(1.0, max(0.0, (step - (max_steps - decay)) / decay))
        return 1.0 - (1.0 - low) * passed
    passed = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    if config.kind == "linear":
        return 1.0 - (1.0 - low) * passed
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * passed))


def _decay_steps(config: ScheduleConfig, max_steps: int) -> int:
    return config.decay_steps or max(1, max_steps // 5)
