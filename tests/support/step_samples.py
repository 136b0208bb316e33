"""Lists the samples that all ranks together read in an optimizer step."""

from __future__ import annotations

from itertools import islice

from pipeline.data.loader import iter_batch_indices
from pipeline.data.sampler import SampleOrder


def list_step_samples(
    order: SampleOrder, *, micro: int, accumulation: int, world: int, samples_seen: int, num_steps: int
) -> list[list[int]]:
    """Return the samples of each optimizer step, joined from the micro-batches of every rank.

    Args:
        micro: Samples per micro-batch.
        accumulation: Micro-batches per step.
        world: Number of data-parallel ranks.
    """
    ranks = []
    for rank in range(world):
        draws = iter_batch_indices(
            order,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            dp_rank=rank,
            dp_world_size=world,
            samples_seen=samples_seen,
        )
        ranks.append([draw.indices for draw in islice(draws, num_steps * accumulation)])
    return [
        [
            sample
            for micro_batch in range(step * accumulation, (step + 1) * accumulation)
            for rank in range(world)
            for sample in ranks[rank][micro_batch]
        ]
        for step in range(num_steps)
    ]
