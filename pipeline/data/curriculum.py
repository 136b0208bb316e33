"""Curricula: weights of the sources that change with the optimizer step.

The order is a pure function of the position, as it is without a curriculum. Each step has `samples_per_step`
positions, with an integer number of samples from each source, mixed by a permutation. So a position has the
same sample after a resume, a rollback or a left-out batch, and with any number of ranks.
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

STEPS_COMPARED = 64  # steps of a run at which all ranks compare their weights

WeightsAt = Callable[[int], Sequence[float]]
"""Function from the number of completed optimizer steps to the weight of each source in the next step."""


class CurriculumOrder(MixtureOrder):
    """Order of the samples of several sources whose shares change from step to step.

    After each step, the number of samples drawn from a source so far differs by about one from the sum of its
    shares. All samples of a source are drawn, in its own order, before one is repeated. The table of counts
    takes 8 bytes per step and source. Computing the weights of a million steps takes some seconds.

    Args:
        sources: Sources in the order of the data set.
        seed: Seed of the permutations.
        weights_at: Pure function that returns the weights of the sources at a step.
        samples_per_step: Samples of a global batch, over all ranks.
    """

    def __init__(
        self, sources: Sequence[SourceShare], seed: int, weights_at: WeightsAt, samples_per_step: int
    ) -> None:
        self._set_sources(sources, sum(source.num_samples for source in sources))
        self._weights_at = weights_at
        self._samples_per_step = samples_per_step
        self._slot_order = ShuffledOrder(samples_per_step, seed)
        self._orders = {
            number: ShuffledOrder(source.num_samples, derive_seed(seed, number))
            for number, source in enumerate(sources)
            if source.num_samples
        }
        # Sum of each source's fractional shares in the steps of the table, minus the samples drawn.
        self._owed = [0.0] * len(sources)
        self._steps_in_table = 0
        # (steps, sources): samples drawn before each step; grows with the steps that are read.
        self._drawn_before = np.zeros((1024, len(sources)), dtype=np.int64)

    def _locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of the source at each position (N,), and the position in the source's order."""
        assert self._slot_order is not None
        slots = self._slot_order.samples_at(positions)
        steps = positions // self._samples_per_step
        self._extend_table(int(steps.max(initial=0)) + 1)
        before = self._drawn_before[steps]  # (N, sources)
        in_step = self._drawn_before[steps + 1] - before
        ends = np.cumsum(in_step, axis=1)  # (N, sources): end of each source's slots in the step
        sources = (slots[:, None] >= ends).sum(axis=1)
        rows = np.arange(len(positions))
        return sources, (before - ends + in_step)[rows, sources] + slots

    def count(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the number of positions in [first, last) that draw from each source: (sources,)."""
        return self._count_until(last) - self._count_until(first)

    def check_counts(self, samples_seen: int, counts: Mapping[str, int]) -> None:
        """Check that the sample counts of a checkpoint follow from the current weights.

        Raises:
            DataError: The checkpoint was made with other weights.
        """
        expected = dict(zip(self.names, self.count(0, samples_seen).tolist(), strict=True))
        if expected != dict(counts):
            raise DataError(
                f"data.curriculum: the checkpoint counts {dict(counts)} in the first {samples_seen} samples, "
                f"and the weights now give {expected}; use the weights that the run began with, or another "
                "run_dir"
            )

    def _count_until(self, position: int) -> NDArray[np.int64]:
        """Return the number of positions before `position` that draw from each source: (sources,)."""
        step, rest = divmod(position, self._samples_per_step)
        self._extend_table(step)
        sources, _ = self._locate(np.arange(position - rest, position))
        return self._drawn_before[step] + np.bincount(sources, minlength=len(self.names))

    def _extend_table(self, step: int) -> None:
        """Extend the table up to the samples drawn before `step`."""
        while len(self._drawn_before) <= step:
            self._drawn_before = np.concatenate([self._drawn_before, np.zeros_like(self._drawn_before)])
        for number in range(self._steps_in_table, step):
            weights = self._weights_at(number)
            total_weight = math.fsum(weights)  # the result of sum() depends on the version of Python
            owed = [
                carried + self._samples_per_step * (weight / total_weight)
                for carried, weight in zip(self._owed, weights, strict=True)
            ]
            drawn = apportion(owed, weights, self._samples_per_step)
            self._owed = [share - count for share, count in zip(owed, drawn, strict=True)]
            self._drawn_before[number + 1] = self._drawn_before[number] + drawn
        self._steps_in_table = max(self._steps_in_table, step)


def apportion(owed: Sequence[float], weights: Sequence[float], size: int) -> list[int]:
    """Divide the samples of a step among the sources in integers close to `owed`.

    Args:
        owed: Fractional number of samples due to each source; the sum is `size` apart from rounding.
        weights: Weight of each source; a source with weight 0 gets no samples.
        size: Number of samples to divide.

    Returns:
        Number of samples from each source; the sum is `size`.
    """
    active = [number for number, weight in enumerate(weights) if weight]
    counts = [0] * len(owed)
    for number in active:
        counts[number] = max(0, math.floor(owed[number]))
    excess = sum(counts) - size
    for _ in range(-excess):
        counts[max(active, key=lambda number: owed[number] - counts[number])] += 1
    for _ in range(excess):
        reducible = [number for number in active if counts[number]]
        counts[min(reducible, key=lambda number: owed[number] - counts[number])] -= 1
    return counts


def build_weights(config: DocumentsConfig, sources: Sequence[SourceShare]) -> WeightsAt | None:
    """Return the weight function of a recipe, or `None` if the weights are constant.

    Raises:
        DataError: `data.curriculum` names no function. The returned function raises it for invalid weights.
    """
    schedules = [source.weight for source in config.all_sources()]
    if config.curriculum is not None:
        import_path = config.curriculum
        function = import_object(import_path, DataError)

        def call_user_function(step: int) -> Sequence[float]:
            weights = _call_function(import_path, function, step, sources)
            return _check_weights(weights, sources, step, "data.curriculum")

        return call_user_function
    if any(isinstance(schedule, dict) for schedule in schedules):

        def interpolate_weights(step: int) -> Sequence[float]:
            weights = [interpolate_weight(schedule or 0.0, step) for schedule in schedules]
            return _check_weights(weights, sources, step, "data.sources")

        return interpolate_weights
    return None


def _call_function(
    import_path: str,
    function: Callable[[int], Mapping[str, float]],
    step: int,
    sources: Sequence[SourceShare],
) -> list[float]:
    """Return the weights that a user's function gives at `step`, in the order of the sources.

    Raises:
        DataError: The function raises an exception, or does not return a weight for each source.
    """
    with errors_in_one_line(
        f"data.curriculum: {import_path}({step}), which is also called past the last step,", DataError
    ):
        weights = function(step)
    names = [source.name for source in sources]
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise DataError(
            f"data.curriculum: {import_path}({step}) returned {weights!r}; expected a dict with a weight for "
            f"each of {', '.join(names)}"
        )
    return [weights[name] for name in names]


def _check_weights(
    weights: Sequence[float], sources: Sequence[SourceShare], step: int, key: str
) -> Sequence[float]:
    """Return the weights of a step unchanged if they are valid.

    Args:
        weights: Weight of each source.
        sources: The sources.
        step: Step of the weights, for messages.
        key: Key of the recipe that gives the weights, for messages.

    Raises:
        DataError: A weight is not a finite number of at least 0, all are 0, or a source without samples has a
            weight above 0.
    """
    for source, weight in zip(sources, weights, strict=True):
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(
                f"{key}: the weight of {source.name} at step {step} is {weight!r}; expected a number of at "
                "least 0"
            )
        if weight and not source.num_samples:
            raise DataError(
                f"{key}: {source.name} has weight {weight:g} at step {step} and no training sample; "
                "add documents to the source, or remove it"
            )
    if not math.fsum(weights):
        raise DataError(
            f"{key}: the weights of all sources are 0 at step {step}; give at least one a weight above 0"
        )
    return weights


def build_order(data: DataBundle, seed: int, samples_per_step: int) -> MixtureOrder:
    """Return the order of the training samples, a CurriculumOrder if the weights change with the step.

    Args:
        data: The run's data.
        seed: Seed of the order.
        samples_per_step: Global batch size in samples.

    Raises:
        DataError: There are no samples, a source with a weight has none, or all weights are 0.
    """
    if data.weights_at is None:
        return MixtureOrder(data.sources, seed)
    return CurriculumOrder(data.sources, seed, data.weights_at, samples_per_step)


def check_same_curriculum(job: Job, data: DataBundle, max_steps: int) -> None:
    """Check that all ranks compute the same weights, at STEPS_COMPARED steps of the run. Collective.

    Raises:
        DataError: The weights of two ranks differ (raised on every rank), or they are invalid.
    """
    if data.weights_at is None:
        return
    steps = dict.fromkeys(number * max_steps // STEPS_COMPARED for number in range(STEPS_COMPARED))
    weights = [(step, *data.weights_at(step)) for step in steps]
    digests = job.gather_object(hashlib.blake2b(repr(weights).encode(), digest_size=16).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DataError(
                f"rank {rank} and rank 0 have different weights of the sources; data.curriculum must depend "
                "on the step alone, and every machine needs the same code"
            )
