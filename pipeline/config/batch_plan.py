"""The batch equation: micro_batch_size x gradient_accumulation_steps x dp_world_size = global_batch_size.

A recipe states the numbers of its batch in part; `plan_batch` completes them for a number of ranks.
"""

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
    """Division of one optimizer step's samples into micro-batches, accumulation steps and ranks."""

    micro_batch_size: int
    """Number of samples per rank in one forward and backward pass."""
    gradient_accumulation_steps: int
    """Number of micro-batches per rank in one optimizer step."""
    dp_world_size: int
    """Number of data-parallel ranks."""
    is_provisional: bool = False
    """Whether `micro_batch_size` is still to be found, since the recipe says `auto`; it is 1 until then."""

    @property
    def global_batch_size(self) -> int:
        """Number of samples of one optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_world_size

    @property
    def candidates(self) -> list[int]:
        """Micro-batch sizes up to the limit, ascending, that divide a rank's samples of an optimizer step."""
        samples = self.micro_batch_size * self.gradient_accumulation_steps
        low = [n for n in range(1, math.isqrt(samples) + 1) if samples % n == 0]
        divisors = {*low, *(samples // n for n in low)}
        return sorted(n for n in divisors if n <= MAX_MICRO_BATCH_SIZE)

    def with_micro_batch_size(self, micro_batch_size: int) -> BatchPlan:
        """Return the same global batch with another micro-batch size, one of `candidates` (not checked)."""
        samples = self.micro_batch_size * self.gradient_accumulation_steps
        return replace(
            self,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=samples // micro_batch_size,
            is_provisional=False,
        )

    def __str__(self) -> str:
        micro = f"{self.micro_batch_size}"
        steps = f"{self.gradient_accumulation_steps} "
        if self.is_provisional:
            sizes = self.candidates
            some = [*sizes] if len(sizes) <= 9 else [*sizes[:5], "...", *sizes[-3:]]
            micro = f"auto: one of [{', '.join(map(str, some))}]"
            steps = "? "
        return (
            f"{micro} (micro_batch_size) x {steps}(gradient_accumulation_steps) x {self.dp_world_size} "
            f"(data-parallel ranks) = {self.global_batch_size} (global_batch_size)"
        )


def plan_batch(batch: BatchConfig, dp_world_size: int) -> BatchPlan:
    """Complete the batch numbers for this many data-parallel ranks.

    Raises:
        ConfigError: The numbers contradict each other, do not divide evenly, or do not determine the batch;
            or a number that follows from them exceeds the limit of its key.
    """
    micro = batch.micro_batch_size
    steps = batch.gradient_accumulation_steps
    total = batch.global_batch_size
    is_provisional = False
    if micro == "auto":
        micro = 1
        if total is None:
            raise ConfigError(
                "batch: micro_batch_size is auto, which needs the number of samples of a step; "
                "give global_batch_size"
            )
        if steps is not None:
            raise ConfigError(
                f"batch: micro_batch_size is auto, so gradient_accumulation_steps ({steps}) follows from "
                f"it and global_batch_size ({total}); remove it, or give micro_batch_size as a number"
            )
        steps = _divide(total, dp_world_size, "samples per rank", batch, dp_world_size)
        is_provisional = True
    elif micro is None:
        if total is None:
            raise ConfigError("batch: give micro_batch_size or global_batch_size; the rest follows")
        micro = _divide(total, (steps or 1) * dp_world_size, "micro_batch_size", batch, dp_world_size)
    elif steps is None and total is not None:
        steps = _divide(total, micro * dp_world_size, "gradient_accumulation_steps", batch, dp_world_size)
    plan = BatchPlan(micro, steps or 1, dp_world_size, is_provisional)
    if total is not None and total != plan.global_batch_size:
        raise ConfigError(
            f"batch: {plan}, but global_batch_size is given as {total}; remove one of micro_batch_size, "
            "gradient_accumulation_steps and global_batch_size, and it is computed from the others"
        )
    limits = {
        "micro_batch_size": MAX_MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": MAX_ACCUMULATION_STEPS,
        "global_batch_size": MAX_GLOBAL_BATCH_SIZE,
    }
    for name, limit in limits.items():
        if getattr(plan, name) > limit:
            raise ConfigError(
                f"batch: {plan}; {name} must be at most {limit:,}: lower the numbers in section batch"
            )
    return plan


def _divide(total: int, parts: int, wanted: str, batch: BatchConfig, dp_world_size: int) -> int:
    """Return `total / parts`, or raise a ConfigError that names the nearest sizes that divide."""
    if total % parts:
        given = ", ".join(f"{key} = {value}" for key, value in batch.model_dump(exclude_none=True).items())
        lower = total // parts * parts
        upper = lower + parts
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"batch: {given} on {dp_world_size} data-parallel ranks gives {wanted} = {total} / {parts} = "
            f"{total / parts:.3f}, which is not an integer; use a global_batch_size of {near}"
        )
    return total // parts
