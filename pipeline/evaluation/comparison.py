"""Compares two results of the same tasks by a paired bootstrap over the documents that both have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.errors import DataError, format_names
from pipeline.evaluation.task_results import AGGREGATIONS, OTHER, ScoredDocument, TaskResult, TaskResults

NUM_RESAMPLES = 10_000
MAX_COUNTS = 1 << 22  # in memory at a time: resamples x documents


@dataclass(frozen=True)
class MetricComparison:
    """The difference of a metric between two results, over the documents that both have."""

    task: str
    """Name of the task."""
    metric: str
    """Name of the metric."""
    earlier: float
    """Value of the metric in the earlier result."""
    later: float
    """Value of the metric in the later result."""
    low: float
    """Lower end of the 95 % interval of `later - earlier`."""
    high: float
    """Upper end of the 95 % interval."""
    p: float
    """Two-sided p-value: how often resampled documents turn the difference around, or make it 0."""
    num_documents: int
    """Number of documents that both results have."""
    num_unpaired: int
    """Number of documents that only one of the results has."""

    @property
    def difference(self) -> float:
        """Return the later value minus the earlier one."""
        return self.later - self.earlier


def compare_results(earlier: TaskResults, later: TaskResults) -> list[MetricComparison]:
    """Return the comparison of each metric of each task that both results have.

    Metrics that are no function of a mean over documents, and groups of tasks, are left out.

    Raises:
        DataError: The results have no task in common, or a common task has no document or metric in common.
    """
    names = [name for name in later.tasks if name in earlier.tasks and later.tasks[name].documents]
    if not names:
        raise DataError(
            f"the results have no task in common: the earlier one has {format_names(list(earlier.tasks))}, "
            f"this one {format_names(list(later.tasks))}; evaluate the same --tasks"
        )
    return [each for name in names for each in _compare_task(name, earlier.tasks[name], later.tasks[name])]


def _compare_task(name: str, earlier: TaskResult, later: TaskResult) -> Iterator[MetricComparison]:
    """Yield the comparisons of a task's metrics.

    Raises:
        DataError: The results have no document or metric in common.
    """
    earlier_documents = _index_by_hash(earlier)
    later_documents = _index_by_hash(later)
    common = [key for key in later_documents if key in earlier_documents]
    if not common:
        raise DataError(
            f"task {name}: the results have no document in common, so the task's data has changed; evaluate "
            "the earlier model again"
        )
    num_unpaired = len(earlier_documents) + len(later_documents) - 2 * len(common)
    has_metric = False
    for metric, description in later.metrics.items():
        pairs = [
            (earlier_documents[key].scores[metric], later_documents[key].scores[metric])
            for key in common
            if metric in earlier_documents[key].scores and metric in later_documents[key].scores
        ]
        if description.aggregation == OTHER or not pairs:
            continue
        has_metric = True
        function = AGGREGATIONS[description.aggregation]
        scores = np.array(pairs, dtype=np.float64)  # (documents, results, numerator and denominator)
        before, after = function(scores[..., 0].sum(axis=0) / scores[..., 1].sum(axis=0))
        differences = np.concatenate([np.diff(function(means))[:, 0] for means in _resample_means(scores)])
        low, high = np.percentile(differences, [2.5, 97.5])
        turned = min((differences <= 0).sum(), (differences >= 0).sum())
        yield MetricComparison(
            task=name,
            metric=metric,
            earlier=float(before),
            later=float(after),
            low=float(low),
            high=float(high),
            p=min(1.0, float(2 * (turned + 1) / (len(differences) + 1))),
            num_documents=len(pairs),
            num_unpaired=num_unpaired,
        )
    if not has_metric:
        raise DataError(
            f"task {name}: the results have no comparable metric in common: the earlier one has "
            f"{format_names(list(earlier.metrics))}, this one {format_names(list(later.metrics))}"
        )


def _index_by_hash(result: TaskResult) -> dict[tuple[str, int], ScoredDocument]:
    """Return the documents by hash and by number among the documents with this hash."""
    seen: Counter[str] = Counter()
    documents = {}
    for document in result.documents:
        documents[document.hash, seen[document.hash]] = document
        seen[document.hash] += 1
    return documents


def _resample_means(scores: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the means of both results over resampled documents, shape (resamples, 2).

    A document is drawn for both results alike. The seed is fixed, so equal results give equal comparisons.
    """
    num_documents = len(scores)
    generator = np.random.default_rng(0)
    chunk = max(1, min(NUM_RESAMPLES, MAX_COUNTS // num_documents))
    for start in range(0, NUM_RESAMPLES, chunk):
        size = min(chunk, NUM_RESAMPLES - start)
        counts = generator.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size)
        sums = np.tensordot(counts, scores, axes=1)  # (resamples, results, numerator and denominator)
        yield sums[..., 0] / sums[..., 1]
