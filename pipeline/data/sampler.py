"""Which samples a rank sees, and when: a pure function of (seed, position), so a run can start anywhere.

The order is computed by index, without a shuffled list: no memory, no warm-up, no state to save but a count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        self.seed = seed
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


class MicroBatchSampler:
    """What one rank's micro-batches are made of, without end, from `samples_seen` on.

    Of optimizer step s, micro-batch m belongs at positions s * global + (m * dp_world_size + dp_rank) * micro
    + [0, micro). So a step takes the same samples whatever the number of ranks and of accumulation steps.
    """

    def __init__(
        self,
        order: Order,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_world_size: int,
        samples_seen: int,
    ) -> None:
        assert 0 <= dp_rank < dp_world_size
        assert samples_seen >= 0
        self.order = order
        self.samples_seen = samples_seen
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
        micro_batches = np.arange(gradient_accumulation_steps) * dp_world_size + dp_rank
        self._offsets = micro_batches[:, None] * micro_batch_size + np.arange(micro_batch_size)  # (M, B)

    def __iter__(self) -> Iterator[Draw]:
        steps = np.arange(max(1, BLOCK // self._offsets.size))
        start = self.samples_seen
        while True:
            firsts = start + steps * self.global_batch_size
            positions = (firsts[:, None, None] + self._offsets).reshape(-1, self._offsets.shape[1])
            samples = self.order.samples_at(positions)  # (steps * M, B)
            for position, indices in zip(positions[:, 0].tolist(), samples.tolist(), strict=True):
                yield Draw(0, position, indices)
            start += len(steps) * self.global_batch_size


class EvalSampler:
    """One rank's share of `range(num_samples)` in order, with as many batches on every rank.

    Global micro-batch b gives rank r the samples from (b * dp_world_size + r) * micro on. A rank for which
    none are left gets sample 0, to take part in the collectives of the forward pass; `is_real` says so.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        max_samples: int | None,
        dataset: int = 0,
    ) -> None:
        assert num_samples >= 1
        assert 0 <= dp_rank < dp_world_size
        self.dataset = dataset
        self.num_samples = num_samples if max_samples is None else min(num_samples, max_samples)
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self._num_batches = math.ceil(self.num_samples / (micro_batch_size * dp_world_size))

    def __len__(self) -> int:
        return self._num_batches

    def is_real(self, batch_index: int) -> bool:
        return self._first(batch_index) < self.num_samples

    def __iter__(self) -> Iterator[Draw]:
        for batch_index in range(len(self)):
            first = self._first(batch_index)
            indices = list(range(first, min(first + self.micro_batch_size, self.num_samples)))
            yield Draw(self.dataset, first, indices or [0])

    def _first(self, batch_index: int) -> int:
        return (batch_index * self.dp_world_size + self.dp_rank) * self.micro_batch_size
