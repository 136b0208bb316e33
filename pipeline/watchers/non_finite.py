"""Steps without a finite gradient or loss: told, and the end of a run that has nothing else."""

from __future__ import annotations

import math
from itertools import compress

from pipeline.errors import NonFiniteLossError, stretches
from pipeline.events import Event
from pipeline.watchers import Seen, Stop

# Steps in a row without a finite gradient that end a run. fp16 first searches its loss scale: 2**32 takes 32.
MAX_CONSECUTIVE_SKIPS = {"fp32": 10, "bf16": 10, "fp16": 40}


class NonFinite:
    """Tells of the steps that were skipped since the row before, and of a loss that is none.

    In fp16 the loss scale is found in this way: steps of a finite loss are news, but no alert until the scale
    cannot fall any further.

    Args:
        lowest_scale: The fp16 loss scale below which DeepSpeed does not go, or the fixed one; else None.
    """

    def __init__(self, lowest_scale: float | None) -> None:
        self._lowest_scale = lowest_scale

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        skipped, scale = sum(seen.skipped), seen.row.get("train/loss_scale")
        bad = (
            [bool(each) for each in seen.skipped] if skipped else [not math.isfinite(x) for x in seen.losses]
        )
        if True not in bad:
            return None
        steps = list(range(step - len(bad) + 1, step + 1))
        named = f"step{'s' * (sum(bad) > 1)} {stretches(set(compress(steps, bad)), steps)}"
        first = float(steps[bad.index(True)])
        told = {"at_step": first, "steps": float(seen.steps), "skipped": float(skipped)}
        if not skipped:
            line = f"the loss of {named} is infinite or NaN, the gradient is not"
            advice = "look at what the objective gives for these batches, and at how they are masked"
            return Event("non_finite", line, advice, fields=told)
        line = f"{named} skipped: the gradient was infinite or NaN"
        advice = "look at the data, lower optimizer.learning_rate, or raise schedule.warmup"
        if scale is None:
            return Event("non_finite", line, advice, fields=told)
        told["scale"] = scale
        if self._lowest_scale is not None and scale <= self._lowest_scale:
            line = f"{line}, and the fp16 loss scale cannot fall below {scale:g}"
            return Event("loss_scale_floor", line, f"use bf16; or {advice}", fields=told)
        line = f"{line}; the fp16 loss scale is now {scale:g}"
        if not all(map(math.isfinite, compress(seen.losses, bad))):  # which no loss scale multiplies
            line = f"{line}, and the loss itself is infinite or NaN"
            return Event("non_finite", line, advice, fields=told)
        return Event("non_finite", line, level="info", fields=told)


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

    def __call__(self, step: int, seen: Seen) -> Stop | None:
        """See Watcher."""
        skips = int(seen.row.get("train/skipped_in_a_row", 0))
        too_many = MAX_CONSECUTIVE_SKIPS[self._precision]
        if step == self._max_steps and self._precision != "fp16":  # which searches its loss scale first
            too_many = min(too_many, step - self._first_step)
        if not skips or skips < too_many:
            return None
        return Stop(
            NonFiniteLossError(
                f"the last {skips} steps had an infinite or NaN gradient (loss {seen.row['train/loss']}) and "
                "were skipped; the parameters are those of the last good step. Look at the data, lower "
                "optimizer.learning_rate, or raise schedule.warmup"
            )
        )
