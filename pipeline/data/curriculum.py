"""Curricula: weights of the sources that change with the optimizer step.

The order stays a pure function of the position, as without one. Each step is a block of `samples_per_step`
positions with a whole number of samples from each source, and a permutation mixes them. So a resume, a
rollback, a left-out batch and any number of ranks read the same samples.
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

PROBES = 64  # steps of a run whose weights all ranks compare

WeightsAt = Callable[[int], Sequence[float]]
"""Number of optimizer steps done -> weight of each source for the next one."""


class CurriculumOrder(MixtureOrder):
    """The samples of all sources in shares that change from step to step.

    After each step, the samples of a source differ by about one from the sum of its shares. A source is gone
    through whole, in its own order, before it repeats. Memory is 8 bytes a step and source, and the weights
    of a million steps take some seconds.

    Args:
        sources: In the order they have in the data set.
        seed: Fixes the order.
        weights_at: Weights of the sources. It must be pure.
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
        self._owed = [0.0] * len(sources)  # shares so far, less the samples taken
        self._known = 0  # steps in the table
        self._before = np.zeros((1024, len(sources)), dtype=np.int64)  # (steps, sources): taken before a step

    def _places(self, flat: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
        """Count the positions in [first, last) that draw from each source: (sources,)."""
        return self._count_until(last) - self._count_until(first)

    def check_counts(self, samples_seen: int, counts: Mapping[str, int]) -> None:
        """Compare the samples of a checkpoint with those of the weights.

        Raises:
            DataError: the weights were other ones.
        """
        now = dict(zip(self.names, self.count(0, samples_seen).tolist(), strict=True))
        if now != dict(counts):
            raise DataError(
                f"data.curriculum: of the first {samples_seen} samples the checkpoint has {dict(counts)}, "
                f"and the weights now give {now}; use the weights that the run began with, or another run_dir"
            )

    def _count_until(self, position: int) -> NDArray[np.int64]:
        step, rest = divmod(position, self._size)
        self._extend(step)
        of_step = self._places(np.arange(position - rest, position))[0]
        return self._before[step] + np.bincount(of_step, minlength=len(self.names))

    def _extend(self, step: int) -> None:
        """Have the table reach the samples taken before this step."""
        while len(self._before) <= step:
            self._before = np.concatenate([self._before, np.zeros_like(self._before)])
        for at in range(self._known, step):
            weights = self._weights_at(at)
            whole = math.fsum(weights)  # the same in every version of Python, unlike sum
            owed = [
                before + self._size * (weight / whole)
                for before, weight in zip(self._owed, weights, strict=True)
            ]
            taken = apportion(owed, weights, self._size)
            self._owed = [share - count for share, count in zip(owed, taken, strict=True)]
            self._before[at + 1] = self._before[at] + taken
        self._known = max(self._known, step)


def apportion(owed: Sequence[float], weights: Sequence[float], size: int) -> list[int]:
    """Divide `size` samples among the sources as nearly as whole numbers can; weight 0 gets none.

    Args:
        owed: Samples due to each source; their sum is `size` but for rounding.
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
    """Return the weights that a recipe asks for; `None`: they do not change.

    Raises:
        DataError: `data.curriculum` names no function.
    """
    given = [source.weight for source in config.all_sources()]
    if config.curriculum is not None:
        path = config.curriculum
        function = import_object(path, DataError)
        return lambda step: _checked(_called(path, function, step, sources), sources, step)
    if any(isinstance(weight, dict) for weight in given):
        return lambda step: _checked(
            [interpolate_weight(weight or 0.0, step) for weight in given], sources, step
        )
    return None


def _called(
    path: str, function: Callable[[int], Mapping[str, float]], step: int, sources: Sequence[SourceShare]
) -> list[float]:
    """Return the weights of a user's function, in the order of the sources."""
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


def _checked(weights: Sequence[float], sources: Sequence[SourceShare], step: int) -> Sequence[float]:
    """Return the weights of a step.

    Raises:
        DataError: they are no weights, or one is of a source without samples.
    """
    for source, weight in zip(sources, weights, strict=True):
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(f"the weight of {source.name} at step {step} is {weight!r}; expected 0 or above")
        if weight and not source.num_samples:
            raise DataError(
                f"data.sources: {source.name} has weight {weight:g} at step {step} and not one training "
                "sample; add to it, or take it out"
            )
    if not math.fsum(weights):
        raise DataError(
            f"the weights of all sources are 0 at step {step}; give at least one a weight above 0"
        )
    return weights


def build_order(data: DataBundle, seed: int, samples_per_step: int) -> MixtureOrder:
    """Return the order of the training samples.

    Args:
        samples_per_step: Samples of a global batch.
    """
    if data.weights_at is None:
        return MixtureOrder(data.sources, seed)
    return CurriculumOrder(data.sources, seed, data.weights_at, samples_per_step)


def check_same_curriculum(job: Job, data: DataBundle, max_steps: int) -> None:
    """Compare some weights of a run across ranks. Collective.

    Raises:
        DataError: ranks have other weights, or these are none.
    """
    if data.weights_at is None:
        return
    steps = dict.fromkeys(number * max_steps // PROBES for number in range(PROBES))
    weights = [(step, *data.weights_at(step)) for step in steps]
    digests = job.gather_object(hashlib.blake2b(repr(weights).encode(), digest_size=16).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DataError(
                f"rank {rank} and rank 0 have other weights of sources; data.curriculum must depend on the "
                "step alone, and every machine needs the same code"
            )
