"""The held-out batches of a rank. Enters no collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from pipeline.data.batches import Batch, usable
from pipeline.data.bundle import Collate
from pipeline.data.fetch import Fetch, read_batches
from pipeline.data.sampler import EvalSampler
from pipeline.errors import DataError


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
        num_words: See TrainLoader.

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
        num_words: int | None = None,
    ) -> None:
        assert datasets
        self.names = tuple(datasets)
        self.total = tuple(total) or self.names
        whole = {name: _length(name, dataset) for name, dataset in datasets.items()}
        sizes = list(whole.values())
        if max_samples is not None:
            sizes = [min(size, max_samples) for size in sizes]
        self._sampler = EvalSampler(
            sizes, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        sets, sources = (
            list(datasets.values()),
            [[(f"{name}, held out", size)] for name, size in whole.items()],
        )
        # One reader of all sets: each with workers of its own would leave a crowd of idle processes.
        self._batches = read_batches(
            Fetch(sets, collate, 0, is_training=False, sources=sources, num_words=num_words),
            self._sampler,
            num_workers,
            pin_memory=pin_memory,
            persistent=num_workers > 0,
        )

    def __iter__(self) -> Iterator[tuple[str, Batch, bool]]:
        for draw, batch in zip(self._sampler, self._batches, strict=False):
            yield self.names[draw.dataset], usable(batch), self._sampler.is_real(draw)


def _length(name: str, dataset: Dataset[Any]) -> int:
    length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise DataError(
            f"the evaluation data set {name!r} ({type(dataset).__name__}) is empty: expected a sample or more"
        )
    return length
