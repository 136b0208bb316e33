"""Finds what was infinite or NaN first in a step, and in which sample, by doing the step again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeline.config.batch import BatchPlan
from pipeline.data.batches import LoadedBatch, Reading, tensors
from pipeline.distributed.process_group import Job
from pipeline.engine.first_nonfinite import INPUT, FirstNonFinite, Found, sample_name
from pipeline.engine.interface import Engine, Limits
from pipeline.objectives import Batch, Objective

REFUSED = Limits(-math.inf, -math.inf)  # nothing of such a step stays


class CauseSearch:
    """Repeats a step with the weights as they are, and changes nothing of the run.

    Args:
        plan: The run's division of a batch.
        seed: Sets the random numbers to those of the step.
    """

    def __init__(
        self, engine: Engine, objective: Objective, job: Job, plan: BatchPlan, seed: Callable[[], None]
    ):
        self._engine = engine
        self._objective = objective
        self._job = job
        self._plan = plan
        self._seed = seed

    def find(self, micro_batches: Sequence[Batch]) -> Found | None:
        """Return the first infinite or NaN value over all ranks; None: all are finite. Collective."""
        found = [each for each in self._repeat(micro_batches) if each is not None]
        if not found:
            return None
        cause: Found = min(found)
        if cause.phase == INPUT or cause.is_narrowed:
            return cause
        samples = self._search_sample(micro_batches[cause.micro_batch], cause.rank)
        return cause._replace(samples=samples) if samples else cause

    def _repeat(self, micro_batches: Sequence[Batch]) -> list[Found | None]:
        """Return what each rank found in a step of these micro-batches."""
        first = FirstNonFinite(self._engine.module, micro_batches, self._job.ranks.rank)
        self._seed()
        with first.looking():
            self._engine.train_step(micro_batches, first.seen_by(self._objective), 0.0, 0, REFUSED)
        return self._job.gather_object(first.found)

    def _search_sample(self, batch: Batch, rank: int) -> tuple[str, ...]:
        """Return the sample of that rank's micro-batch that alone is not finite either; empty: none is.

        Half of the samples take the places of the other half, until one is left. So all shapes stay, and a
        batch normalisation never sees a batch of one.

        Args:
            batch: This rank's.
            rank: The one that found it.
        """
        reading = _reading_of_rows(batch)
        rows = list(range(len(reading.indices))) if reading is not None else []
        sizes, dp_ranks = zip(*self._job.gather_object((len(rows), self._engine.dp_rank)), strict=True)
        if sizes[rank] < 2:
            return ()

        def is_among(chosen: Sequence[int]) -> bool:
            """Repeat the micro-batch with these rows; ranks that share it answer alike."""
            found = self._repeat([_filled_with(batch, chosen) if rows else batch])
            return any(
                each is not None and dp_rank == self._engine.dp_rank
                for each, dp_rank in zip(found, dp_ranks, strict=True)
            )

        self._engine.divide(self._plan.micro_batch_size, 1)
        for _ in range((max(sizes) - 1).bit_length()):
            half = rows[: (len(rows) + 1) // 2]
            rows = half if is_among(half) else rows[len(half) :] or half
        name = sample_name(reading.indices[rows[0]], reading) if is_among(rows) and reading else None
        self._engine.divide(self._plan.micro_batch_size, self._plan.gradient_accumulation_steps)
        named = self._job.gather_object(name)[rank]
        return (named,) if named is not None else ()


def _reading_of_rows(batch: Batch) -> Reading | None:
    """Return what was read of the batch where each row is one of its samples, else None."""
    reading: Reading | None = getattr(batch, "reading", None)
    lengths = {len(each) for each in tensors(batch) if each.dim() > 0}
    return reading if reading is not None and lengths == {len(reading.indices)} else None


def _filled_with(batch: Batch, rows: Sequence[int]) -> LoadedBatch:
    """Return a batch of as many rows, all of them from the given ones."""
    reading: Reading = batch.reading  # type: ignore[attr-defined] # see _reading_of_rows
    number = len(reading.indices)
    taken = [rows[place % len(rows)] for place in range(number)]

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[taken] if value.dim() > 0 else value
        if isinstance(value, Mapping):
            return {key: of(each) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            is_listed = len(value) == number and not any(True for _ in tensors(value))  # such as strings
            return type(value)(value[row] for row in taken) if is_listed else type(value)(map(of, value))
        return value

    filled = LoadedBatch({key: of(value) for key, value in batch.items()}).known_as(batch)
    filled.reading = reading._replace(indices=[reading.indices[row] for row in taken])
    return filled
