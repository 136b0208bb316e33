"""The batch equation: micro_batch_size x gradient_accumulation_steps x dp_world_size = global_batch_size."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.schema import MOST_ACCUMULATED, MOST_SAMPLES_A_STEP, MOST_SAMPLES_AT_ONCE, BatchConfig
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples are laid out. All counts are samples, steps or ranks."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_world_size: int

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_world_size

    def __str__(self) -> str:
        return (
            f"{self.micro_batch_size} (micro_batch_size) x {self.gradient_accumulation_steps} "
            f"(gradient_accumulation_steps) x {self.dp_world_size} (data-parallel ranks) = "
            f"{self.global_batch_size} (global_batch_size)"
        )


def plan_batch(batch: BatchConfig, dp_world_size: int) -> BatchPlan:
    """Completes the batch numbers for this many data-parallel ranks.

    Raises:
        ConfigError: the numbers contradict each other, do not divide, are too few, or one that follows is
            larger than it may be stated.
    """
    micro, steps, total = batch.micro_batch_size, batch.gradient_accumulation_steps, batch.global_batch_size
    if micro is None:
        if total is None:
            raise ConfigError("batch: give micro_batch_size or global_batch_size; the rest follows")
        micro = _exact(total, (steps or 1) * dp_world_size, "micro_batch_size", batch, dp_world_size)
    elif steps is None and total is not None:
        steps = _exact(total, micro * dp_world_size, "gradient_accumulation_steps", batch, dp_world_size)
    plan = BatchPlan(micro, steps or 1, dp_world_size)
    if total not in (None, plan.global_batch_size):
        raise ConfigError(
            f"batch: {plan}, but global_batch_size is given as {total}; drop one of the three and it follows"
        )
    limits = {
        "micro_batch_size": MOST_SAMPLES_AT_ONCE,
        "gradient_accumulation_steps": MOST_ACCUMULATED,
        "global_batch_size": MOST_SAMPLES_A_STEP,
    }
    for name, most in limits.items():
        if getattr(plan, name) > most:
            raise ConfigError(f"batch: {plan}; {name} is at most {most:,}: change the numbers that are given")
    return plan


def _exact(total: int, parts: int, wanted: str, batch: BatchConfig, dp_world_size: int) -> int:
    if total % parts:
        given = ", ".join(f"{key} = {value}" for key, value in batch.model_dump(exclude_none=True).items())
        lower, upper = total // parts * parts, (total // parts + 1) * parts
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"batch: {given} on {dp_world_size} data-parallel ranks gives {wanted} = {total} / {parts} = "
            f"{total / parts:.3f}, which is not whole; a global_batch_size of {near} divides"
        )
    return total // parts
