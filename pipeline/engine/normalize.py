"""The one place that divides a loss: by the count of valid tokens (or samples) of the whole global batch.

Every token counts once, however it fell into micro-batches and ranks. A mean of means does not do that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def backward_scale(global_count: Tensor, averaged_over: int) -> Tensor:
    """What a micro-batch's loss sum is multiplied by before backward.

    Gradients are averaged over `averaged_over` ranks afterwards (data-parallel ones, times the ranks that
    share a sequence), so the sum is scaled up by their number: average over ranks of (sum x ranks / count) =
    sum of sums / count. Accumulation adds plain sums; the engine is told not to divide by its steps. A batch
    without one valid token gives a zero gradient.
    """
    return averaged_over / _or_one(global_count)


def mean_loss(loss_sum: Tensor, count: Tensor) -> Tensor:
    """The token (or sample) mean that is logged, from sums over all ranks, in fp64."""
    return loss_sum.to(torch.float64) / _or_one(count.to(torch.float64))


def whole_loss(
    sums: Mapping[str, Tensor],
    means: Mapping[str, tuple[str, str]],
    weighted: Mapping[str, float],
) -> float:
    """An evaluation's loss from the sums over all of its ranks: `loss` over `count`, and terms with counts of
    their own.

    Args:
        means, weighted: See Objective.
    """
    loss = mean_loss(sums["loss"], sums["count"])
    for name, weight in weighted.items():
        part, whole = means[name]
        loss = loss + weight * mean_loss(sums[part], sums[whole])
    return float(loss)


def further_means(sums: Mapping[str, Tensor], means: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """An objective's further metrics from its further sums over all ranks; none of what was not counted.

    Args:
        means: See Objective.means.
    """
    return {
        name: float(mean_loss(sums[part], sums[whole]))
        for name, (part, whole) in means.items()
        if sums[whole]
    }


def _or_one(count: Tensor) -> Tensor:
    """The count, which may be a sum of weights below 1; 1 where nothing was counted."""
    return torch.where(count > 0, count, 1.0)
