"""Batches for a rank: read here or by worker processes (torch's DataLoader), in the orders of sampler.py.

Moves nothing to a device and enters no collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pipeline.data.batches import Batch, LoadedBatch, as_batch, moved, usable
from pipeline.data.bundle import Collate
from pipeline.data.mixture import MixtureOrder
from pipeline.data.random_numbers import derive_seed, own_random_numbers, seed_all, seeds_at
from pipeline.data.sampler import Draw, EvalSampler, MicroBatchSampler
from pipeline.errors import DataError, PipelineError

PREFETCH = 2  # batches a worker fetches ahead


class TrainLoader:
    """Hands out this rank's micro-batches, one optimizer step at a time, without end.

    Args:
        dataset: Map-style, at least one sample; it may be smaller than a global batch.
        collate: Makes a batch of what the data set returns for a list of indices.
        order: Of the samples.
        micro_batch_size: Samples of one micro-batch of one rank.
        gradient_accumulation_steps: Micro-batches of one rank in an optimizer step.
        dp_rank: This rank among those that split the batch.
        dp_world_size: Number of those ranks.
        seed: Fixes the random numbers that the data set draws.
        num_workers: Processes that fetch ahead; 0 fetches inside `next_group`.
        pin_memory: Copy batches to page-locked memory.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        order: MixtureOrder,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_world_size: int,
        seed: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        assert order.num_samples == len(dataset)  # type: ignore[arg-type]
        self.order = order
        self._fetch = Fetch([dataset], collate, seed, is_training=True)
        self._micro_batch_size = micro_batch_size
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._samples_seen = 0
        self._batches: Iterator[Any] | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._micro_batch_size * self._gradient_accumulation_steps * self._dp_world_size

    @property
    def samples_seen(self) -> int:
        """Samples of the steps handed out so far, over all ranks: all there is to know of a position."""
        return self._samples_seen

    def next_group(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step."""
        if self._batches is None:
            self._batches = self._start()
        group = [usable(next(self._batches)) for _ in range(self._gradient_accumulation_steps)]
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

    def _start(self) -> Iterator[Any]:
        sampler = MicroBatchSampler(
            self.order,
            micro_batch_size=self._micro_batch_size,
            gradient_accumulation_steps=self._gradient_accumulation_steps,
            dp_rank=self._dp_rank,
            dp_world_size=self._dp_world_size,
            samples_seen=self._samples_seen,
        )
        # The sampler never ends, so neither do the workers: nothing to keep them for.
        return iter(_batches(self._fetch, sampler, self._num_workers, self._pin_memory, persistent=False))


class EvalLoader:
    """Iterates over `(name, batch, is_real)`: each data set in order, as many batches on every rank.

    Forward passes may be collective (ZeRO-3), so a rank without samples left gets a batch of one sample with
    `is_real` False, to be run and not counted. The last real batch of a data set may be short.

    Args:
        datasets: Map-style, by name; at least one, and in each at least one sample.
        collate: Makes a batch of what a data set returns for a list of indices.
        total: Names of those that `eval/loss` is the mean over; none: all.
        micro_batch_size: Samples of one batch of one rank.
        dp_rank: This rank among those that split the data.
        dp_world_size: Number of those ranks.
        max_samples: Samples of a data set over all ranks at the most, the first ones; None: all.
        num_workers: Processes that fetch ahead; they stay between two passes.
        pin_memory: Copy batches to page-locked memory.

    Raises:
        DataError: a data set is empty.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]],
        collate: Collate,
        *,
        total: Iterable[str],
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        max_samples: int | None,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        assert datasets
        self.names = tuple(datasets)
        self.total = tuple(total) or self.names
        self._samplers = [
            EvalSampler(
                _length(name, dataset),
                micro_batch_size=micro_batch_size,
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                max_samples=max_samples,
                dataset=number,
            )
            for number, (name, dataset) in enumerate(datasets.items())
        ]
        # One loader over all sets: each with workers of its own would leave a crowd of idle processes.
        fetch = Fetch(list(datasets.values()), collate, 0, is_training=False)
        draws = _Chain(self._samplers)
        self._batches = _batches(fetch, draws, num_workers, pin_memory, persistent=num_workers > 0)

    def __len__(self) -> int:
        return sum(len(sampler) for sampler in self._samplers)

    def __iter__(self) -> Iterator[tuple[str, Batch, bool]]:
        batches = iter(self._batches)
        for name, sampler in zip(self.names, self._samplers, strict=True):
            for index in range(len(sampler)):
                yield name, usable(next(batches)), sampler.is_real(index)


class Fetch(Dataset[Any]):
    """Reads one batch: a data set whose index is a Draw, so that torch's workers can be handed it.

    Random numbers are a function of the seed and a position: the same in this process and in a worker,
    whenever it is fetched, and after a resume. Those of `augmented` and `__getitem__` go by the sample's own
    position, and are the same at any number of ranks; those of `__getitems__` and the collate by the batch's.
    """

    def __init__(
        self, datasets: Sequence[Dataset[Any]], collate: Collate, seed: int, *, is_training: bool
    ) -> None:
        self._datasets = datasets
        self._collate = collate
        self._seed = seed
        self._is_training = is_training

    def __getitems__(self, draw: Draw) -> LoadedBatch | PipelineError:
        try:
            return as_batch(self._collated(draw), len(draw.indices))
        except PipelineError as error:
            return error  # as a value: what a worker raises arrives with its traceback for a message

    def _collated(self, draw: Draw) -> Any:
        dataset = self._datasets[draw.dataset]
        if self._is_training and hasattr(dataset, "augmented"):
            places = enumerate(draw.indices, start=draw.position)
            return self._collate(
                [dataset.augmented(i, derive_seed(self._seed, place)) for place, i in places]
            )
        if getattr(dataset, "is_deterministic", False):
            return self._read(dataset, draw.indices)
        with own_random_numbers(self._seed, draw.position):
            return self._read(dataset, draw.indices, draw.position)

    def _read(self, dataset: Any, indices: list[int], position: int | None = None) -> Any:
        """Position: of the first one; None: nothing is drawn."""
        source = dataset
        while isinstance(source, Subset):  # it has __getitems__ whatever it is a part of
            source = source.dataset
        if hasattr(source, "__getitems__"):
            return self._collate(dataset.__getitems__(indices))
        if position is None or type(source) in (TensorDataset, list):  # which draw nothing
            return self._collate([dataset[index] for index in indices])
        samples = []
        for bits, index in zip(seeds_at(self._seed, position, len(indices)), indices, strict=True):
            seed_all(bits)
            samples.append(dataset[index])
        seed_all(derive_seed(self._seed, position, len(indices)))
        return self._collate(samples)


class _Chain:
    """The draws of several samplers, one behind the other, anew each time."""

    def __init__(self, samplers: Sequence[Iterable[Draw]]) -> None:
        self._samplers = samplers

    def __iter__(self) -> Iterator[Draw]:
        return chain.from_iterable(self._samplers)


class _InProcess:
    """Batches read in this process, when they are asked for."""

    def __init__(self, fetch: Fetch, draws: Iterable[Draw], pin_memory: bool) -> None:
        self._fetch = fetch
        self._draws = draws
        self._pin_memory = pin_memory

    def __iter__(self) -> Iterator[LoadedBatch | PipelineError]:
        for draw in self._draws:
            batch = self._fetch.__getitems__(draw)
            if self._pin_memory and isinstance(batch, LoadedBatch):
                samples, batch = batch.num_samples, moved(batch, lambda _, tensor: tensor.pin_memory())
                batch.num_samples, batch.host = samples, None
            yield batch


def _batches(
    fetch: Fetch, draws: Iterable[Draw], num_workers: int, pin_memory: bool, *, persistent: bool
) -> Iterable[Any]:
    if num_workers == 0:
        return _InProcess(fetch, draws, pin_memory)
    # Its own generator: by default each iteration draws from torch's global one, and dropout would differ.
    generator = torch.Generator()
    generator.manual_seed(0)
    return DataLoader(
        fetch,
        batch_sampler=draws,  # type: ignore[arg-type]  # one Draw for a list of indices
        collate_fn=_as_it_is,
        num_workers=num_workers,
        prefetch_factor=PREFETCH,
        persistent_workers=persistent,
        pin_memory=pin_memory,
        generator=generator,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _length(name: str, dataset: Dataset[Any]) -> int:
    length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise DataError(
            f"the evaluation data set {name!r} ({type(dataset).__name__}) is empty: expected a sample or more"
        )
    return length
