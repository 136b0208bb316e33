"""Batches for a rank: torch's DataLoader (workers, prefetching, pinning) behind the orders of sampler.py.

Moves nothing to a device and enters no collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.data.bundle import Batch, Collate
from pipeline.data.sampler import EvalSampler, GlobalOrder, MicroBatchSampler
from pipeline.errors import DataError

PREFETCH = 2  # batches a worker fetches ahead


class TrainLoader:
    """Hands out this rank's micro-batches, one optimizer step at a time, without end.

    Args:
        dataset: Map-style, at least one sample; it may be smaller than a global batch.
        collate: Makes a batch of what the data set returns for a list of indices.
        micro_batch_size: Samples of one micro-batch of one rank.
        gradient_accumulation_steps: Micro-batches of one rank in an optimizer step.
        dp_rank: This rank among those that split the batch.
        dp_world_size: Number of those ranks.
        seed: Fixes the order of the samples.
        num_workers: Processes that fetch ahead; 0 fetches inside `next_group`.
        pin_memory: Copy batches to page-locked memory.

    Raises:
        DataError: the data set is empty.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_world_size: int,
        seed: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._micro_batch_size = micro_batch_size
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._seed = seed
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._order = GlobalOrder(_length(dataset, "training"), seed)
        self._samples_seen = 0
        self._batches: Iterator[Batch] | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._micro_batch_size * self._gradient_accumulation_steps * self._dp_world_size

    @property
    def samples_per_epoch(self) -> int:
        return self._order.num_samples

    @property
    def samples_seen(self) -> int:
        """Samples of the steps handed out so far, over all ranks: all there is to save of a loader."""
        return self._samples_seen

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._samples_seen / self.samples_per_epoch

    def next_group(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step."""
        if self._batches is None:
            self._batches = self._start()
        group = [next(self._batches) for _ in range(self._gradient_accumulation_steps)]
        self._samples_seen += self.global_batch_size
        return group

    def seek(self, samples_seen: int) -> None:
        """Go on as if `samples_seen` samples had been handed out, also by another number of ranks."""
        assert samples_seen >= 0
        self.close()
        self._samples_seen = samples_seen

    def close(self) -> None:
        """Ends the workers; the next group starts new ones where it left off."""
        self._batches = None  # the iterator's destructor stops its workers

    def _start(self) -> Iterator[Batch]:
        sampler = MicroBatchSampler(
            self._order,
            micro_batch_size=self._micro_batch_size,
            gradient_accumulation_steps=self._gradient_accumulation_steps,
            dp_rank=self._dp_rank,
            dp_world_size=self._dp_world_size,
            samples_seen=self._samples_seen,
        )
        loader = _torch_loader(
            self._dataset,
            self._collate,
            sampler,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            persistent_workers=False,  # the sampler never ends, so neither do the workers
            seed=[self._seed, self._dp_rank, self._samples_seen],
        )
        return iter(loader)


class EvalLoader:
    """Iterates over `(batch, is_real)`: the data set in order, the same number of batches on every rank.

    Forward passes may be collective (ZeRO-3), so a rank without samples left gets a batch of one sample with
    `is_real` False, to be run and not counted. The last real batch may be short.

    Args:
        dataset: Map-style, at least one sample.
        collate: Makes a batch of what the data set returns for a list of indices.
        micro_batch_size: Samples of one batch of one rank.
        dp_rank: This rank among those that split the data.
        dp_world_size: Number of those ranks.
        max_samples: Samples over all ranks at the most, the first ones; None: the whole data set.
        num_workers: Processes that fetch ahead; they stay between two passes.
        pin_memory: Copy batches to page-locked memory.

    Raises:
        DataError: the data set is empty.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        max_samples: int | None,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self._sampler = EvalSampler(
            _length(dataset, "evaluation"),
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            max_samples=max_samples,
        )
        self._loader = _torch_loader(
            dataset,
            collate,
            self._sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            seed=[0, dp_rank],
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        for index, batch in enumerate(self._loader):
            yield batch, self._sampler.is_real(index)


def _torch_loader(
    dataset: Dataset[Any],
    collate: Collate,
    sampler: MicroBatchSampler | EvalSampler,
    *,
    num_workers: int,
    pin_memory: bool,
    persistent_workers: bool,
    seed: list[int],
) -> DataLoader[Any]:
    # Its own generator: by default each iteration draws from torch's global one, and dropout would differ.
    generator = torch.Generator()
    generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        persistent_workers=persistent_workers,
        pin_memory=pin_memory,
        generator=generator,
    )


def _length(dataset: Dataset[Any], role: str) -> int:
    length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise DataError(
            f"the {role} data set ({type(dataset).__name__}) is empty: expected at least one sample"
        )
    return length
