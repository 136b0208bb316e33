"""Order of the samples: a pure function of seed and position, the same for any number of ranks.

The order is computed by index, without a shuffled list. It takes no memory and no start-up time, a run can
start at any position, and the state in a checkpoint is one integer (and one for each source, for the
metrics).
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

ROUNDS = 6


class SampleOrder(Protocol):
    """Function from positions of a run to samples."""

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices into the data set at `positions` (any shape)."""
        ...


class BatchIndices(NamedTuple):
    """Samples of one batch."""

    dataset: int
    """Number of the data set; 0 if there is only one."""
    position: int
    """Position of the first sample in the order, which seeds the batch's random numbers."""
    indices: list[int]
    """Indices of the samples in the data set."""


class ShuffledOrder:
    """Sequence of permutations of `range(num_samples)`, a different one for every epoch.

    A permutation is a Feistel network over pairs of digits in base a = ceil(sqrt(n)), keyed by seed and
    epoch. Values in [n, a * a), of which there are at most 2 * sqrt(n), pass the network again until they are
    below n (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalized Feistel and cycle
    walking).
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
        for turn in range(ROUNDS):
            drawn = scramble(right ^ (keys + np.uint64(turn))) % self._base
            left, right = right, (left + drawn) % self._base
        return left * self._base + right


class LeftOutPositions:
    """Ranges of a run's positions that no step takes; the steps before and after them are unchanged.

    A rollback adds such ranges. They are stored with the position in each checkpoint.

    Args:
        stretches: Ranges [first, last), in any order; they may overlap.
    """

    def __init__(self, stretches: Iterable[Sequence[int]] = ()) -> None:
        self.stretches = tuple(sorted({(int(first), int(last)) for first, last in stretches}))

    def start(self, position: int, size: int) -> int:
        """Return the first position at or after `position` at which `size` samples can be taken."""
        for first, last in self.stretches:
            if position + size > first and position < last:
                position = last
        return position

    def starts(self, position: int, size: int, count: int) -> NDArray[np.int64]:
        """Return the first positions (count,) of the next `count` steps of `size` samples."""
        if not any(last > position for _, last in self.stretches):
            return position + np.arange(count) * size
        found = []
        for _ in range(count):
            found.append(self.start(position, size))
            position = found[-1] + size
        return np.array(found)


NONE_LEFT_OUT = LeftOutPositions()


class EvalSampler:
    """One rank's batches of several data sets, in order, with equally many batches on every rank.

    In global micro-batch b of a data set, rank r gets the samples from (b * dp_world_size + r) * micro on. A
    rank without samples left gets sample 0, so that it takes part in the collectives of the forward pass;
    `is_real` is false for that batch.

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

    def is_real(self, draw: BatchIndices) -> bool:
        """Return whether a batch has samples of this rank, and is to be counted."""
        return draw.position < self._sizes[draw.dataset]

    def __iter__(self) -> Iterator[BatchIndices]:
        for dataset, size in enumerate(self._sizes):
            for first in range(self._first, self._first + size, self._stride):
                indices = list(range(first, min(first + self._micro_batch_size, size)))
                yield BatchIndices(dataset, first, indices or [0])


COUNTED_AT_ONCE = 1 << 16  # positions per call, for a few MB of temporary arrays


@dataclass(frozen=True)
class SourceShare:
    """Size of a source, and its share of the samples that are drawn."""

    name: str
    num_samples: int
    """Number of samples; the data set concatenates those of all sources."""
    weight: float | None = None
    """Share of the drawn samples, relative to the other weights; `None` for all sources or for none."""
    epochs: float = 1.0
    """Number of passes over the source in an epoch of the mixture, if there are no weights."""


class MixtureOrder:
    """Order of the samples of several sources, drawn by their shares and different in every epoch.

    A permutation maps a position in epoch e to a slot. Slots are divided among the sources. Slot k of a
    source is position e * share + k in the source's own order, which maps it to a sample. So all samples of a
    source are drawn before one is repeated, over as many epochs of the mixture as that takes. A single source
    has the order of ShuffledOrder. Memory and start-up time are O(number of sources).

    Args:
        sources: Sources in the order of the data set.
        seed: Seed of the permutations.

    Raises:
        DataError: There are no samples, or a source with a weight has none.
    """

    def __init__(self, sources: Sequence[SourceShare], seed: int) -> None:
        drawn = count_drawn_per_epoch(sources)
        self._describe(sources, sum(drawn))
        self._drawn = np.array(drawn, dtype=np.int64)  # (sources,) samples drawn per epoch
        self._slots = np.cumsum([0, *drawn])  # first slot of each source, and the number of slots
        self._active = [number for number, count in enumerate(drawn) if count]
        alone = len(self._active) == 1
        self._slot_order = None if alone else ShuffledOrder(self.samples_per_epoch, seed)
        self._orders = {  # different seeds, or two sources of equal size would have the same order
            number: ShuffledOrder(sources[number].num_samples, seed if alone else derive_seed(seed, number))
            for number in self._active
        }

    def _describe(self, sources: Sequence[SourceShare], samples_per_epoch: int) -> None:
        """Set the attributes that depend on the sources alone."""
        self.names = tuple(source.name for source in sources)
        self.sources = tuple((source.name, source.num_samples) for source in sources)
        self.num_samples = sum(source.num_samples for source in sources)
        self.samples_per_epoch = samples_per_epoch
        self._offsets = np.cumsum([0] + [source.num_samples for source in sources])

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices into the data set of all sources at `positions` (any shape) of the run."""
        if self._slot_order is None:
            (number,) = self._active
            return self._orders[number].samples_at(positions) + self._offsets[number]
        flat = positions.reshape(-1)
        sources, own = self._locate(flat)
        by_source = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self.names)))
        samples = np.empty_like(flat)
        for number in self._orders:
            chosen = by_source[ends[number - 1] if number else 0 : ends[number]]
            if len(chosen):
                samples[chosen] = self._orders[number].samples_at(own[chosen]) + self._offsets[number]
        return samples.reshape(positions.shape)

    def count(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the number of positions in [first, last) that draw from each source: (sources,).

        Whole epochs are computed directly; other positions are counted, some 10 million per second.
        """
        counts = np.zeros_like(self._drawn)
        if self._slot_order is None:
            counts[self._active] = last - first
            return counts
        while first < last:
            left = self.samples_per_epoch - first % self.samples_per_epoch
            if left == self.samples_per_epoch <= last - first:
                epochs = (last - first) // self.samples_per_epoch
                counts += epochs * self._drawn
                first += epochs * self.samples_per_epoch
                continue
            stop = min(last, first + left, first + COUNTED_AT_ONCE)
            sources, _ = self._locate(np.arange(first, stop))
            counts += np.bincount(sources, minlength=len(counts))
            first = stop
        return counts

    def check_counts(self, samples_seen: int, counts: Mapping[str, int]) -> None:
        """Check the sample counts in a checkpoint. Nothing to check here; see CurriculumOrder."""

    def _locate(self, flat: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each position (N,), and its position in the source's own order."""
        assert self._slot_order is not None
        slots = self._slot_order.samples_at(flat)
        sources = np.searchsorted(self._slots, slots, side="right") - 1
        return sources, flat // self.samples_per_epoch * self._drawn[sources] + slots - self._slots[sources]


def count_drawn_per_epoch(sources: Sequence[SourceShare]) -> list[int]:
    """Return the number of samples drawn from each source in an epoch, by its `epochs` or its weight.

    Shares by weight are rounded by largest remainder, so that they add up and weight 0 draws nothing.

    Raises:
        DataError: There are no samples, or a source with a weight has none.
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
                f"data.sources: {source.name} has weight {source.weight:g} and not one training sample; "
                "add documents to it, or remove it"
            )
    exact = [
        Fraction(weight or 0.0) for weight in weights
    ]  # a float product of 10**12 samples would be rounded
    whole = sum(exact)
    if whole == 0:
        raise DataError("data.sources: the weights sum to 0; give at least one source a weight above 0")
    shares = [total * weight / whole for weight in exact]
    drawn = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: drawn[number] - shares[number])
    for number in by_remainder[: total - sum(drawn)]:
        drawn[number] += 1
    return drawn


class SourceCounts:
    """Exact number of samples drawn from each source so far over all ranks, computed on every rank."""

    def __init__(self, order: MixtureOrder) -> None:
        self._order = order
        self.seek(0, None)

    def seek(self, samples_seen: int, counts: Mapping[str, int] | None) -> None:
        """Continue from a checkpoint's counts; without valid counts, the next call counts from the start."""
        self._counted = 0  # number of positions that `_counts` covers
        self._counts = np.zeros(len(self._order.names), dtype=np.int64)
        if counts and set(counts) == set(self._order.names) and sum(counts.values()) == samples_seen:
            self._order.check_counts(samples_seen, counts)
            self._counted = samples_seen
            self._counts = np.array([counts[name] for name in self._order.names], dtype=np.int64)

    def count_up_to(self, samples_seen: int) -> dict[str, int]:
        """Return the counts by source of the first `samples_seen` samples, which must not decrease."""
        self._counts = self._counts + self._order.count(self._counted, samples_seen)
        self._counted = samples_seen
        return dict(zip(self._order.names, self._counts.tolist(), strict=True))
