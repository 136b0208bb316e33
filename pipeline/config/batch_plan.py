"""The batch equation: micro_batch_size x gradient_accumulation_steps x dp_world_size = global_batch_size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeline.config.schema import (
    MAX_ACCUMULATION_STEPS,
    MAX_GLOBAL_BATCH_SIZE,
    MAX_MICRO_BATCH_SIZE,
    BatchConfig,
)
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Layout of one optimizer step's samples. All counts are samples, steps or ranks."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_world_size: int
    is_auto: bool = False
    """`micro_batch_size: auto`, not found yet: until then it is 1."""

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_world_size

    @property
    def candidates(self) -> list[int]:
        """Micro-batch sizes that keep the global batch in whole accumulation steps. Ascending."""
        samples = self.micro_batch_size * self.gradient_accumulation_steps
        low = [n for n in range(1, math.isqrt(samples) + 1) if samples % n == 0]
        return [n for n in sorted({*low, *(samples // n for n in low)}) if n <= MAX_MICRO_BATCH_SIZE]

    def with_micro_batch_size(self, micro_batch_size: int) -> BatchPlan:
        """Return the same global batch in micro-batches of another size, one of `candidates`."""
        samples = self.micro_batch_size * self.gradient_accumulation_steps
        return replace(
            self,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=samples // micro_batch_size,
            is_auto=False,
        )

    def __str__(self) -> str:
        micro, steps = f"{self.micro_batch_size}", f"{self.gradient_accumulation_steps} "
        if self.is_auto:
            sizes = self.candidates
            some = [*sizes] if len(sizes) <= 9 else [*sizes[:5], "...", *sizes[-3:]]
            micro, steps = f"auto, one of {', '.join(map(str, some))},", ""
        return (
            f"{micro} (micro_batch_size) x {steps}(gradient_accumulation_steps) x {self.dp_world_size} "
            f"(data-parallel ranks) = {self.global_batch_size} (global_batch_size)"
        )


def plan_batch(batch: BatchConfig, dp_world_size: int) -> BatchPlan:
    """Complete the batch numbers for this many data-parallel ranks.

    Raises:
        ConfigError: The numbers contradict each other, do not divide, are too few, or one that follows is
            larger than it may be stated.
    """
    micro, steps, total = batch.micro_batch_size, batch.gradient_accumulation_steps, batch.global_batch_size
    is_auto = False
    if micro == "auto":
        micro = 1
        if total is None:
            raise ConfigError(
                "batch: micro_batch_size is auto, and nothing says what a step sees: give global_batch_size"
            )
        if steps is not None:
            raise ConfigError(
                f"batch: micro_batch_size is auto, so gradient_accumulation_steps ({steps}) follows from "
                f"it and global_batch_size ({total}); drop it, or give micro_batch_size as a number"
            )
        steps = _exact(total, dp_world_size, "what a rank sees of a step", batch, dp_world_size)
        is_auto = True
    elif micro is None:
        if total is None:
            raise ConfigError("batch: give micro_batch_size or global_batch_size; the rest follows")
        micro = _exact(total, (steps or 1) * dp_world_size, "micro_batch_size", batch, dp_world_size)
    elif steps is None and total is not None:
        steps = _exact(total, micro * dp_world_size, "gradient_accumulation_steps", batch, dp_world_size)
    plan = BatchPlan(micro, steps or 1, dp_world_size, is_auto)
    if total not in (None, plan.global_batch_size):
        raise ConfigError(
            f"batch: {plan}, but global_batch_size is given as {total}; drop one of the three and it follows"
        )
    limits = {
        "micro_batch_size": MAX_MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": MAX_ACCUMULATION_STEPS,
        "global_batch_size": MAX_GLOBAL_BATCH_SIZE,
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
