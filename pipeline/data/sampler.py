"""Order of the samples: a pure function of seed and position, the same for any number of ranks.

A position counts the samples of a run from 0, over all ranks and epochs. The sample at a position is
computed, not looked up in a shuffled list. So the order takes no memory and no start-up time, and a run can
start at any position. A checkpoint stores the position and, for the metrics, one count for each source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.data.random_numbers import derive_seed, scramble
from pipeline.errors import DataError

NETWORK_ROUNDS = 6  # of the Feistel network; another number changes the order of every run


class SampleOrder(Protocol):
    """Maps positions of a run to samples."""

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in the data set of the samples at `positions` (any shape), in the same shape."""
        ...


class BatchIndices(NamedTuple):
    """Samples of one rank's micro-batch, before they are read."""

    dataset: int
    """Index of the data set in the loader's list, from 0."""
    position: int
    """Position of the first sample in the order, which seeds the batch's random numbers."""
    indices: list[int]
    """Indices of the samples in the data set."""


class ShuffledOrder:
    """Sequence of permutations of `range(num_samples)`, a different one for every epoch.

    A permutation of n = `num_samples` values is a Feistel network over pairs of digits in base
    a = ceil(sqrt(n)), keyed by seed and epoch. The values in [n, a * a), at most 2 * sqrt(n) of them, pass
    the network again until they are below n (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002:
    generalized Feistel and cycle walking).

    Args:
        num_samples: Number of samples, at least 1.
        seed: Seed of the permutations.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        assert num_samples >= 1
        self.num_samples = num_samples
        self._base = np.uint64(math.isqrt(num_samples - 1) + 1)
        self._seed_key = scramble(np.array([seed], dtype=np.uint64))

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sample indices at `positions` (any shape); position p is in epoch p // num_samples."""
        epochs, indices = np.divmod(positions.astype(np.uint64).reshape(-1), np.uint64(self.num_samples))
        keys = scramble(self._seed_key ^ epochs)
        samples = self._permute(indices, keys)
        outside = np.flatnonzero(samples >= self.num_samples)
        while len(outside):
            samples[outside] = self._permute(samples[outside], keys[outside])
            outside = outside[samples[outside] >= self.num_samples]
        return samples.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Pass values in [0, base * base) through the network once."""
        left, right = np.divmod(values, self._base)
        for round_number in range(NETWORK_ROUNDS):
            drawn = scramble(right ^ (keys + np.uint64(round_number))) % self._base
            left, right = right, (left + drawn) % self._base
        return left * self._base + right


class LeftOutPositions:
    """Ranges of a run's positions that no step takes.

    A step that would overlap a range begins after it. A rollback adds ranges. Each checkpoint stores them.

    Args:
        ranges: Ranges [first, last), in any order; they may overlap.

    Attributes:
        ranges: The ranges, sorted and without duplicates.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges = tuple(sorted({(int(first), int(last)) for first, last in ranges}))

    def find_start(self, position: int, size: int) -> int:
        """Return the first position at or after `position` at which a step of `size` samples can begin."""
        for first, last in self.ranges:
            if position + size > first and position < last:
                position = last
        return position

    def find_starts(self, position: int, size: int, count: int) -> NDArray[np.int64]:
        """Return the first positions (count,) of the next `count` steps of `size` samples."""
        if not any(last > position for _, last in self.ranges):
            return position + np.arange(count) * size
        starts = []
        for _ in range(count):
            start = self.find_start(position, size)
            starts.append(start)
            position = start + size
        return np.array(starts)


NONE_LEFT_OUT = LeftOutPositions()


class EvalSampler:
    """Yields the samples of one rank's batches, data set by data set; every rank gets equally many batches.

    Batch b of data-parallel rank r has the samples of a data set from
    (b * dp_world_size + r) * micro_batch_size on. A rank without samples left gets sample 0, so that it takes
    part in the collectives of the forward pass; `is_real` is false for that batch.

    Args:
        sizes: Number of samples to evaluate in each data set.
        micro_batch_size: Samples per batch and rank.
        dp_rank: Data-parallel rank.
        dp_world_size: Number of data-parallel ranks.
    """

    def __init__(
        self, sizes: Sequence[int], *, micro_batch_size: int, dp_rank: int, dp_world_size: int
    ) -> None:
        assert 0 <= dp_rank < dp_world_size
        self._sizes = sizes
        self._micro_batch_size = micro_batch_size
        self._first = dp_rank * micro_batch_size
        self._stride = dp_world_size * micro_batch_size

    def is_real(self, selection: BatchIndices) -> bool:
        """Return whether the samples of a batch are this rank's own, and count in the mean."""
        return selection.position < self._sizes[selection.dataset]

    def __iter__(self) -> Iterator[BatchIndices]:
        for dataset, size in enumerate(self._sizes):
            for first in range(self._first, self._first + size, self._stride):
                indices = list(range(first, min(first + self._micro_batch_size, size)))
                yield BatchIndices(dataset, first, indices or [0])


POSITIONS_PER_COUNT = 1 << 16  # positions counted at once, with a few MB of temporary arrays


@dataclass(frozen=True)
class SourceShare:
    """Size of a source, and its share of the samples that are drawn.

    The data set concatenates the samples of all sources.
    """

    name: str
    """Name of the source in metrics and messages."""
    num_samples: int
    """Number of different samples, over all ranks."""
    weight: float | None = None
    """Share of the drawn samples, relative to the other weights. Either all sources have a weight, or all
    have `None` and are drawn by `epochs`."""
    epochs: float = 1.0
    """Number of passes over the source in an epoch of the mixture. Ignored if there are weights."""


class MixtureOrder:
    """Order of the samples of several sources, drawn by their shares and different in every epoch.

    A permutation maps a position in epoch e to a slot of that epoch. The slots are divided among the sources:
    a source with s slots per epoch maps its slot k to position e * s + k of its own ShuffledOrder. So all
    samples of a source are drawn before one is repeated, over as many epochs of the mixture as that takes. A
    single source has the order of ShuffledOrder. Memory and start-up time are O(number of sources).

    Args:
        sources: Sources in the order of the data set.
        seed: Seed of the permutations.

    Attributes:
        names: Names of the sources.
        sources: Name and number of samples of each source.
        num_samples: Number of different samples of all sources.
        samples_per_epoch: Number of samples drawn in an epoch of the mixture.

    Raises:
        DataError: There are no samples, a source with a weight has none, or all weights are 0.
    """

    def __init__(self, sources: Sequence[SourceShare], seed: int) -> None:
        drawn = count_drawn_per_epoch(sources)
        self._set_sources(sources, sum(drawn))
        self._drawn = np.array(drawn, dtype=np.int64)  # (sources,) samples drawn per epoch
        self._slots = np.cumsum([0, *drawn])  # first slot of each source, and the number of slots
        self._active = [number for number, count in enumerate(drawn) if count]  # sources that are drawn
        is_single = len(self._active) == 1
        self._slot_order = None if is_single else ShuffledOrder(self.samples_per_epoch, seed)
        self._orders = {}
        for number in self._active:
            # With one seed for all, two sources of equal size would have the same order.
            seed_of_source = seed if is_single else derive_seed(seed, number)
            self._orders[number] = ShuffledOrder(sources[number].num_samples, seed_of_source)

    def _set_sources(self, sources: Sequence[SourceShare], samples_per_epoch: int) -> None:
        """Set the public attributes, and the offset of each source in the data set."""
        self.names = tuple(source.name for source in sources)
        self.sources = tuple((source.name, source.num_samples) for source in sources)
        self.num_samples = sum(source.num_samples for source in sources)
        self.samples_per_epoch = samples_per_epoch
        self._offsets = np.cumsum([0] + [source.num_samples for source in sources])

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in the data set of the samples at `positions` (any shape), in the same shape."""
        if self._slot_order is None:
            (number,) = self._active
            return self._orders[number].samples_at(positions) + self._offsets[number]
        flat = positions.reshape(-1)
        sources, positions_in_source = self._locate(flat)
        by_source = np.argsort(sources, kind="stable")
        bounds = np.cumsum([0, *np.bincount(sources, minlength=len(self.names))])
        samples = np.empty_like(flat)
        for number, order in self._orders.items():
            chosen = by_source[bounds[number] : bounds[number + 1]]
            if len(chosen):
                samples[chosen] = order.samples_at(positions_in_source[chosen]) + self._offsets[number]
        return samples.reshape(positions.shape)

    def count(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the number of positions in [first, last) that draw from each source: (sources,).

        Takes no time for full epochs. Other positions are counted one by one, about 10 million per second.
        """
        counts = np.zeros_like(self._drawn)
        if self._slot_order is None:
            counts[self._active] = last - first
            return counts
        while first < last:
            epoch_end = first + self.samples_per_epoch - first % self.samples_per_epoch
            epochs = (last - first) // self.samples_per_epoch
            if first % self.samples_per_epoch == 0 and epochs > 0:
                counts += epochs * self._drawn
                first += epochs * self.samples_per_epoch
                continue
            stop = min(last, epoch_end, first + POSITIONS_PER_COUNT)
            sources, _ = self._locate(np.arange(first, stop))
            counts += np.bincount(sources, minlength=len(counts))
            first = stop
        return counts

    def check_counts(self, samples_seen: int, counts: Mapping[str, int]) -> None:
        """Accept the sample counts in a checkpoint; CurriculumOrder overrides this with a check."""

    def _locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of the source at each position (N,), and the position in the source's order."""
        assert self._slot_order is not None
        slots = self._slot_order.samples_at(positions)
        sources = np.searchsorted(self._slots, slots, side="right") - 1
        epochs = positions // self.samples_per_epoch
        return sources, epochs * self._drawn[sources] + slots - self._slots[sources]


def count_drawn_per_epoch(sources: Sequence[SourceShare]) -> list[int]:
    """Return the number of samples drawn from each source in an epoch, by its `epochs` or its weight.

    With weights, an epoch has as many samples as the data set. The shares are rounded by largest remainder,
    so that they add up and weight 0 draws nothing.

    Raises:
        DataError: There are no samples, a source with a weight has none, or all weights are 0.
    """
    total = sum(source.num_samples for source in sources)
    if total == 0:
        raise DataError("the training data is empty: expected at least one sample")
    weights = [source.weight for source in sources]
    if all(weight is None for weight in weights):
        return [
            max(1, round(source.epochs * source.num_samples)) if source.num_samples else 0
            for source in sources
        ]
    for source in sources:
        if source.weight and not source.num_samples:
            raise DataError(
                f"data.sources: {source.name} has weight {source.weight:g} and no training sample; "
                "add documents to the source, or remove it"
            )
    # Fractions, because a float product of 10**12 samples would be rounded.
    exact_weights = [Fraction(weight or 0.0) for weight in weights]
    total_weight = sum(exact_weights)
    if total_weight == 0:
        raise DataError("data.sources: the weights sum to 0; give at least one source a weight above 0")
    shares = [total * weight / total_weight for weight in exact_weights]
    drawn = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: drawn[number] - shares[number])
    for number in by_remainder[: total - sum(drawn)]:
        drawn[number] += 1
    return drawn


class SourceCounts:
    """Exact number of samples drawn from each source so far over all ranks.

    Every rank computes the same counts, so no communication is needed.
    """

    def __init__(self, order: MixtureOrder) -> None:
        self._order = order
        self.seek(0, None)

    def seek(self, samples_seen: int, counts: Mapping[str, int] | None) -> None:
        """Continue from the counts in a checkpoint.

        Args:
            samples_seen: Position of the checkpoint.
            counts: Samples by source. If they are `None`, have other sources or another sum, the next call of
                `count_up_to` counts from the start.

        Raises:
            DataError: The weights of `data.curriculum` give other counts.
        """
        self._counted = 0  # number of positions that `_counts` covers
        self._counts = np.zeros(len(self._order.names), dtype=np.int64)
        if not counts:
            return
        has_same_sources = set(counts) == set(self._order.names)
        if has_same_sources and sum(counts.values()) == samples_seen:
            self._order.check_counts(samples_seen, counts)
            self._counted = samples_seen
            self._counts = np.array([counts[name] for name in self._order.names], dtype=np.int64)

    def count_up_to(self, samples_seen: int) -> dict[str, int]:
        """Return the counts by source of the first `samples_seen` samples.

        `samples_seen` must not be below the value of an earlier call, except after `seek`.
        """
        self._counts = self._counts + self._order.count(self._counted, samples_seen)
        self._counted = samples_seen
        return dict(zip(self._order.names, self._counts.tolist(), strict=True))
