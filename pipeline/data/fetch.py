"""Batches read in this process or by worker processes (torch's DataLoader). Moves nothing to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pipeline.data.batches import LoadedBatch, as_batch, moved
from pipeline.data.bundle import Collate
from pipeline.data.extents import first_wrong, note_extents
from pipeline.data.random_numbers import derive_seed, own_random_numbers, seed_all, seeds_at
from pipeline.data.sampler import Draw
from pipeline.errors import DataError, PipelineError

PREFETCH = 2  # batches a worker fetches ahead


class Fetch(Dataset[Any]):
    """Reads one batch: a data set whose index is a Draw, so that torch's workers can be handed it.

    Random numbers are a function of the seed and a position: the same in this process and in a worker,
    whenever it is fetched, and after a resume. Those of `augmented` and `__getitem__` go by the sample's own
    position, and are the same at any number of ranks; those of `__getitems__` and the collate by the batch's.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        collate: Collate,
        seed: int,
        *,
        is_training: bool,
        sources: Sequence[Sequence[tuple[str, int]]] | None = None,
        num_words: int | None = None,
    ) -> None:
        """Sources: (name, samples) of what each data set consists of."""
        self._datasets = datasets
        self._collate = collate
        self._seed = seed
        self._is_training = is_training
        self._sources = sources or [()] * len(datasets)
        self._num_words = num_words

    def __getitems__(self, draw: Draw) -> LoadedBatch | PipelineError:
        try:
            batch = as_batch(self._collated(draw), len(draw.indices))
            note_extents(batch, draw.indices, self._sources[draw.dataset])
            if self._num_words is not None:
                check_ids(batch, self._num_words)
            return batch
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


def check_ids(batch: LoadedBatch, num_words: int) -> None:
    """Looks at the ids of every batch where it is read.

    Args:
        num_words: Rows of the model's table of words.

    Raises:
        DataError: an id has no row there; names it and its sample.
    """
    if (wrong := first_wrong(batch, "input_ids", num_words, None)) is not None:
        raise DataError(
            f"'input_ids' has {wrong.value}{wrong.sample}, and the model knows {num_words} words: expected 0 "
            f"to {num_words - 1} (model.vocab_size; the tokenizer that made them must be the model's)"
        )


class _InProcess:
    """Batches read in this process, when they are asked for: 20 us faster a batch than torch's DataLoader."""

    def __init__(self, fetch: Fetch, draws: Iterable[Draw], pin_memory: bool) -> None:
        self._fetch = fetch
        self._draws = draws
        self._pin_memory = pin_memory

    def __iter__(self) -> Iterator[LoadedBatch | PipelineError]:
        for draw in self._draws:
            batch = self._fetch.__getitems__(draw)
            if self._pin_memory and isinstance(batch, LoadedBatch):
                batch = moved(batch, lambda _, tensor: tensor.pin_memory()).known_as(batch)
            yield batch


def read_batches(
    fetch: Fetch, draws: Iterable[Draw], num_workers: int, *, pin_memory: bool, persistent: bool
) -> Iterable[LoadedBatch | PipelineError]:
    """The batches of these draws, anew each time it is iterated over where `draws` can be.

    Args:
        num_workers: Processes that fetch ahead; 0 fetches in this one.
        pin_memory: Copy batches to page-locked memory.
        persistent: The workers stay between two passes.
    """
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
