"""Which samples a rank sees, and when: a pure function of (seed, position), so a run can start anywhere.

The order is computed by index, without a shuffled list: no memory, no warm-up, no state to save but a count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.data.random_numbers import scrambled

ROUNDS = 6
BLOCK = 4096  # samples ordered at once: numpy calls cost the same for one micro-batch as for hundreds


class Order(Protocol):
    """Which sample stands at which position of the run."""

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into the data set at `positions` (any shape)."""
        ...


class Draw(NamedTuple):
    """What one batch is made of."""

    dataset: int
    """Number of the data set, where there are several."""
    position: int
    """Of the first sample in the order: it stands for the random numbers the batch may use."""
    indices: list[int]
    """Into the data set."""


class GlobalOrder:
    """A different permutation of `range(num_samples)` for every epoch, one behind the other.

    A Feistel network over pairs of digits in base a = ceil(sqrt(n)), keyed by seed and epoch; values that
    fall in [n, a * a), at most 2 * sqrt(n), are sent through again until they do not (Black & Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002: generalized Feistel and cycle walking).
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        assert num_samples >= 1
        self.num_samples = num_samples
        self._base = np.uint64(math.isqrt(num_samples - 1) + 1)
        self._seed_key = scrambled(np.array([seed], dtype=np.uint64))

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample indices at `positions` (any shape) of the run; position p lies in epoch p // num_samples."""
        epochs, indices = np.divmod(positions.astype(np.uint64).reshape(-1), np.uint64(self.num_samples))
        keys = scrambled(self._seed_key ^ epochs)
        samples = self._permute(indices, keys)
        outside = np.flatnonzero(samples >= self.num_samples)
        while len(outside):
            samples[outside] = self._permute(samples[outside], keys[outside])
            outside = outside[samples[outside] >= self.num_samples]
        return samples.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of the network over [0, base * base)."""
        left, right = np.divmod(values, self._base)
        for turn in range(ROUNDS):
            drawn = scrambled(right ^ (keys + np.uint64(turn))) % self._base
            left, right = right, (left + drawn) % self._base
        return left * self._base + right


class LeftOut:
    """Stretches of a run's positions that no step takes: the steps before and after them are unchanged.

    Args:
        stretches: [first, last) each, in any order; they may overlap.
    """

    def __init__(self, stretches: Iterable[Sequence[int]] = ()) -> None:
        self.stretches = tuple(sorted({(int(first), int(last)) for first, last in stretches}))

    def start(self, position: int, size: int) -> int:
        """Where the next `size` samples begin, from `position` on."""
        for first, last in self.stretches:
            if position + size > first and position < last:
                position = last
        return position

    def starts(self, position: int, size: int, count: int) -> NDArray[np.int64]:
        """Where the next `count` steps of `size` samples begin: (count,)."""
        if not any(last > position for _, last in self.stretches):
            return position + np.arange(count) * size
        found = []
        for _ in range(count):
            found.append(self.start(position, size))
            position = found[-1] + size
        return np.array(found)


NONE_LEFT_OUT = LeftOut()


def training_draws(
    order: Order,
    *,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    dp_rank: int,
    dp_world_size: int,
    samples_seen: int,
    left_out: LeftOut = NONE_LEFT_OUT,
) -> Iterator[Draw]:
    """What one rank's micro-batches are made of, without end, from `samples_seen` on.

    Of optimizer step s, micro-batch m belongs at positions s * global + (m * dp_world_size + dp_rank) * micro
    + [0, micro). So a step takes the same samples whatever the number of ranks and of accumulation steps.
    """
    global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
    micro_batches = np.arange(gradient_accumulation_steps) * dp_world_size + dp_rank
    offsets = micro_batches[:, None] * micro_batch_size + np.arange(micro_batch_size)  # (M, B)
    steps = max(1, BLOCK // offsets.size)
    start = samples_seen
    while True:
        firsts = left_out.starts(start, global_batch_size, steps)
        positions = (firsts[:, None, None] + offsets).reshape(-1, micro_batch_size)
        samples = order.samples_at(positions)  # (steps * M, B)
        for position, indices in zip(positions[:, 0].tolist(), samples.tolist(), strict=True):
            yield Draw(0, position, indices)
        start = int(firsts[-1]) + global_batch_size


class EvalSampler:
    """One rank's share of data sets, one behind the other and in order, with as many batches on every rank.

    Global micro-batch b of a data set gives rank r the samples from (b * dp_world_size + r) * micro on. A
    rank for which none are left gets sample 0, to take part in the collectives of the forward pass; `is_real`
    says so.

    Args:
        sizes: How many samples of each data set there are, or are looked at.
    """

    def __init__(
        self, sizes: Sequence[int], *, micro_batch_size: int, dp_rank: int, dp_world_size: int
    ) -> None:
        assert 0 <= dp_rank < dp_world_size
        self._sizes = sizes
        self._micro_batch_size = micro_batch_size
        self._first = dp_rank * micro_batch_size
        self._stride = dp_world_size * micro_batch_size

    def is_real(self, draw: Draw) -> bool:
        return draw.position < self._sizes[draw.dataset]

    def __iter__(self) -> Iterator[Draw]:
        for dataset, size in enumerate(self._sizes):
            for first in range(self._first, self._first + size, self._stride):
                indices = list(range(first, min(first + self._micro_batch_size, size)))
                yield Draw(dataset, first, indices or [0])
