"""Histograms of weights and gradients, counted on their device.

The edges of the bins are fixed powers of 2. A value's exponent gives its bin, so no search is needed. Counts
of shards add up to the counts of the full tensors, and histograms of two runs can be compared. All histograms
of a step cost one all-reduce and one asynchronous copy to the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.shards import WEIGHT, Shard
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.monitoring.events import Histograms
from pipeline.monitoring.row_queue import DeferredValue

# Exponents of the smallest and largest edge. Smaller magnitudes count in the bin of 0, larger ones in the
# outermost bin of their sign.
LOWEST_EXPONENT = -40
HIGHEST_EXPONENT = 10
_BINS_PER_SIGN = HIGHEST_EXPONENT - LOWEST_EXPONENT
BINS = 2 * _BINS_PER_SIGN + 1
"""Number of bins: the bin of 0, and equally many for each sign."""
_MAGNITUDES = 2.0 ** np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
EDGES = np.concatenate([-_MAGNITUDES[::-1], _MAGNITUDES])
"""Edges of the bins in ascending order, (BINS + 1,). The two smallest magnitudes enclose the bin of 0."""
CHUNK_SIZE = 2**22  # values counted at a time: limits temporary memory, and fp32 counts stay exact


class HistogramMeter:
    """Counts weights and gradients every few steps. Collective: all ranks make the same calls."""

    def __init__(self, engine: Engine, job: Job, every: int):
        """Gather the parameter names of all ranks. Collective.

        Args:
            engine: Engine whose parameters are counted.
            job: Process group of the run.
            every: Number of steps between two histograms.
        """
        self._engine = engine
        self._job = job
        self._every = every
        local_names = list(dict.fromkeys(shard.name for shard in engine.shards() if _is_counted(shard)))
        names = sorted({*chain(*job.gather_object(local_names))})
        self._index_of = {name: index for index, name in enumerate(names)}
        self._gradients: Tensor | None = None
        """Counts of the gradients, (parameters, BINS), in a step whose histograms are due; else `None`."""

    def watch_step(self, step: int) -> AbstractContextManager[None]:
        """Return a context manager around a training step that counts its gradients if histograms are due.

        A hook of the engine counts the gradients before the optimizer's step. At that point they are sharded
        like the weights, in every engine.
        """
        self._gradients = None
        if step % self._every:
            return nullcontext()
        gradients = self._create_counts()
        self._gradients = gradients
        return self._engine.observe_gradients(lambda shard: self._add_counts(gradients, shard))

    def finish_step(self, step: int) -> DeferredValue[Histograms] | None:
        """Count the weights after a step, and return the histograms of the step; `None` if none are due.

        Collective.
        """
        gradients = self._gradients
        self._gradients = None
        if gradients is None:
            return None
        weights = self._create_counts()
        for shard in self._engine.shards():
            if _is_counted(shard):
                self._add_counts(weights, shard)
        both = self._job.all_reduce_sum(torch.stack([weights, gradients]))

        def build(host: dict[str, Tensor]) -> Histograms:
            counts = host["both"].to(torch.int64).numpy()
            weights, gradients = (dict(zip(self._index_of, each, strict=True)) for each in counts)
            has_gradients = any(each.any() for each in gradients.values())
            return Histograms(step, EDGES, weights, gradients if has_gradients else {})

        return DeferredValue({"both": both}, build)

    def _create_counts(self) -> Tensor:
        return torch.zeros(len(self._index_of), BINS, dtype=torch.int64, device=self._engine.device)

    def _add_counts(self, counts: Tensor, shard: Shard) -> None:
        assert shard.values is not None
        counts[self._index_of[shard.name]] += count_bins(shard.values).to(counts.device, non_blocking=True)


def _is_counted(shard: Shard) -> bool:
    return shard.kind == WEIGHT and not shard.is_frozen


@torch.no_grad()
def count_bins(values: Tensor) -> Tensor:
    """Return the number of values in each bin of EDGES: (BINS,), int64, on the device of the values.

    Infinite values and NaN are not counted.

    Args:
        values: One-dimensional tensor, (values,).
    """
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device)
    for chunk in values.split(CHUNK_SIZE):
        exact = chunk.float()
        # Signed number of the bin; 0 is the bin of 0. The exponent is exact: no rounding into another bin.
        number = (torch.frexp(exact).exponent - LOWEST_EXPONENT).clamp(0, _BINS_PER_SIGN) * exact.sign()
        number = torch.where(exact.isfinite(), number, 2.0 * BINS)  # outside of all bins
        counts += torch.histc(number, BINS, -_BINS_PER_SIGN - 0.5, _BINS_PER_SIGN + 0.5).to(torch.int64)
    return counts
