"""Curricula: weights of the sources that change with the optimizer step.

As without a curriculum, the order is a pure function of the position. Each step is a block of
`samples_per_step` positions with an integer number of samples from each source, mixed by a permutation.
So the samples are the same after a resume, a rollback or a left-out batch, and with any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data_schema import DocumentsConfig, interpolate_weight
from pipeline.config.import_paths import errors_in_one_line, import_object
from pipeline.data.bundle import DataBundle
from pipeline.data.random_numbers import derive_seed
from pipeline.data.sampler import MixtureOrder, ShuffledOrder, SourceShare
from pipeline.distributed.process_group import Job
from pipeline.errors import DataError

PROBES = 64  # steps of a run at which all ranks compare their weights

WeightsAt = Callable[[int], Sequence[float]]
"""Function from the number of optimizer steps done to the weight of each source in the next step."""


class CurriculumOrder(MixtureOrder):
    """Order of the samples of several sources whose shares change from step to step.

    After each step, the number of samples from a source differs by about one from the sum of its shares. All
    samples of a source are drawn, in its own order, before one is repeated. The table of counts takes 8 bytes
    per step and source; the weights of a million steps take some seconds.

    Args:
        sources: Sources in the order of the data set.
        seed: Seed of the permutations.
        weights_at: Pure function that returns the weights of the sources at a step.
        samples_per_step: Samples of a global batch.
    """

    def __init__(
        self, sources: Sequence[SourceShare], seed: int, weights_at: WeightsAt, samples_per_step: int
    ) -> None:
        self._describe(sources, sum(source.num_samples for source in sources))
        self._weights_at = weights_at
        self._size = samples_per_step
        self._slot_order = ShuffledOrder(samples_per_step, seed)
        self._orders = {
            number: ShuffledOrder(source.num_samples, derive_seed(seed, number))
            for number, source in enumerate(sources)
            if source.num_samples
        }
        self._owed = [0.0] * len(sources)  # sum of the shares so far, minus the samples taken
        self._known = 0  # number of steps in the table
        # (steps, sources): samples taken before each step.
        self._before = np.zeros((1024, len(sources)), dtype=np.int64)

    def _locate(self, flat: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert self._slot_order is not None
        slots = self._slot_order.samples_at(flat)
        steps = flat // self._size
        self._extend(int(steps.max(initial=0)) + 1)
        before = self._before[steps]  # (N, sources)
        taken = self._before[steps + 1] - before
        ends = np.cumsum(taken, axis=1)
        sources = (slots[:, None] >= ends).sum(axis=1)
        rows = np.arange(len(flat))
        return sources, (before - ends + taken)[rows, sources] + slots

    def count(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the number of positions in [first, last) that draw from each source: (sources,)."""
        return self._count_until(last) - self._count_until(first)

    def check_counts(self, samples_seen: int, counts: Mapping[str, int]) -> None:
        """Check that the sample counts of a checkpoint follow from the current weights.

        Raises:
            DataError: The checkpoint was made with other weights.
        """
        now = dict(zip(self.names, self.count(0, samples_seen).tolist(), strict=True))
        if now != dict(counts):
            raise DataError(
                f"data.curriculum: the checkpoint counts {dict(counts)} in the first {samples_seen} samples, "
                f"and the weights now give {now}; use the weights that the run began with, or another run_dir"
            )

    def _count_until(self, position: int) -> NDArray[np.int64]:
        step, rest = divmod(position, self._size)
        self._extend(step)
        of_step = self._locate(np.arange(position - rest, position))[0]
        return self._before[step] + np.bincount(of_step, minlength=len(self.names))

    def _extend(self, step: int) -> None:
        """Extend the table to the samples taken before `step`."""
        while len(self._before) <= step:
            self._before = np.concatenate([self._before, np.zeros_like(self._before)])
        for at in range(self._known, step):
            weights = self._weights_at(at)
            whole = math.fsum(weights)  # the result of sum() depends on the version of Python
            owed = [
                before + self._size * (weight / whole)
                for before, weight in zip(self._owed, weights, strict=True)
            ]
            taken = apportion(owed, weights, self._size)
            self._owed = [share - count for share, count in zip(owed, taken, strict=True)]
            self._before[at + 1] = self._before[at] + taken
        self._known = max(self._known, step)


def apportion(owed: Sequence[float], weights: Sequence[float], size: int) -> list[int]:
    """Divide the samples of a step among the sources in integers close to `owed`.

    Args:
        owed: Fractional number of samples due to each source; the sum is `size` apart from rounding.
        weights: Weight of each source; a source with weight 0 gets no samples.
        size: Number of samples to divide.
    """
    active = [number for number, weight in enumerate(weights) if weight]
    taken = [0] * len(owed)
    for number in active:
        taken[number] = max(0, math.floor(owed[number]))
    while (left := size - sum(taken)) > 0:
        taken[max(active, key=lambda number: owed[number] - taken[number])] += 1
    for _ in range(-left):
        filled = [number for number in active if taken[number]]
        taken[min(filled, key=lambda number: owed[number] - taken[number])] -= 1
    return taken


def build_weights(config: DocumentsConfig, sources: Sequence[SourceShare]) -> WeightsAt | None:
    """Return the weight function of a recipe, or `None` if the weights are constant.

    Raises:
        DataError: `data.curriculum` names no function.
    """
    given = [source.weight for source in config.all_sources()]
    if config.curriculum is not None:
        path = config.curriculum
        function = import_object(path, DataError)
        return lambda step: _check_weights(_call_function(path, function, step, sources), sources, step)
    if any(isinstance(weight, dict) for weight in given):
        return lambda step: _check_weights(
            [interpolate_weight(weight or 0.0, step) for weight in given], sources, step
        )
    return None


def _call_function(
    path: str, function: Callable[[int], Mapping[str, float]], step: int, sources: Sequence[SourceShare]
) -> list[float]:
    """Return the weights that a user's function gives at `step`, in the order of the sources."""
    with errors_in_one_line(
        f"data.curriculum: {path}({step}), which is also called past the last step,", DataError
    ):
        weights = function(step)
    names = [source.name for source in sources]
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise DataError(
            f"data.curriculum: {path}({step}) returned {weights!r}; expected a dict with a weight for each "
            f"of {', '.join(names)}"
        )
    return [weights[name] for name in names]


def _check_weights(weights: Sequence[float], sources: Sequence[SourceShare], step: int) -> Sequence[float]:
    """Return the weights of a step unchanged if they are valid.

    Raises:
        DataError: A weight is invalid, all are 0, or a source without samples has a weight.
    """
    for source, weight in zip(sources, weights, strict=True):
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(f"the weight of {source.name} at step {step} is {weight!r}; expected 0 or above")
        if weight and not source.num_samples:
            raise DataError(
                f"data.sources: {source.name} has weight {weight:g} at step {step} and not one training "
                "sample; add documents to it, or remove it"
            )
    if not math.fsum(weights):
        raise DataError(
            f"the weights of all sources are 0 at step {step}; give at least one a weight above 0"
        )
    return weights


def build_order(data: DataBundle, seed: int, samples_per_step: int) -> MixtureOrder:
    """Return the order of the training samples, where `samples_per_step` is the global batch size."""
    if data.weights_at is None:
        return MixtureOrder(data.sources, seed)
    return CurriculumOrder(data.sources, seed, data.weights_at, samples_per_step)


def check_same_curriculum(job: Job, data: DataBundle, max_steps: int) -> None:
    """Check that all ranks compute the same weights, at PROBES steps of the run. Collective.

    Raises:
        DataError: The weights of two ranks differ, or they are invalid.
    """
    if data.weights_at is None:
        return
    steps = dict.fromkeys(number * max_steps // PROBES for number in range(PROBES))
    weights = [(step, *data.weights_at(step)) for step in steps]
    digests = job.gather_object(hashlib.blake2b(repr(weights).encode(), digest_size=16).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DataError(
                f"rank {rank} and rank 0 have different weights of the sources; data.curriculum must depend "
                "on the step alone, and every machine needs the same code"
            )
