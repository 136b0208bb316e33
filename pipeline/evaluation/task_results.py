"""Holds the results of evaluation tasks, and compares two results document by document.

A metric is a function of the quotient of two sums over documents. So each document's pair of summands is
enough for standard errors, and for a paired bootstrap over the documents that two results share. A file of
results is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import DataError, format_names
from pipeline.files import MAX_DESCRIPTION_BYTES, read_regular_file, replace_file
from pipeline.redaction import redact

AGGREGATIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda mean: mean,
    "perplexity": lambda mean: np.exp(-mean),
    "weighted_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}
"""lm-eval's name of an aggregation -> function of the documents' mean that gives the metric."""
NUM_RESAMPLES = 10_000  # of the bootstrap
Scores: TypeAlias = dict[str, tuple[float, float]]
"""Metric -> a document's summands of its numerator and of its denominator, which is 1 for a plain mean."""


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task over all its documents."""

    value: float
    """Value of the metric."""
    stderr: float | None
    """Standard error over documents; `None` if it is unknown."""
    aggregation: str | None
    """Key of AGGREGATIONS; `None` if the metric is no function of a mean over documents, such as BLEU."""


@dataclass(frozen=True)
class TaskSample:
    """A document as a person reads it, without secrets."""

    prompt: str
    """Text that the model reads."""
    target: str
    """Expected answer."""
    answer: str
    """Answer of the model: its text, its choice, or a log-likelihood."""


@dataclass(frozen=True)
class TaskResult:
    """The result of one task, or of a group of tasks, which has neither documents nor samples."""

    metrics: dict[str, TaskMetric]
    """Metrics by name. If a task has several filters, the name is `metric,filter`."""
    num_documents: int
    """Number of evaluated documents."""
    num_fewshot: int
    """Number of solved examples before each document."""
    documents: dict[str, Scores]
    """Index and hash of each evaluated document, in the order of the task -> its scores."""
    samples: list[TaskSample]
    """First documents, as text."""


@dataclass(frozen=True)
class TaskResults:
    """The results of one evaluation of a model."""

    tasks: dict[str, TaskResult]
    """Results by name of the task or group."""
    settings: dict[str, Any]
    """Description of the evaluation: model, precision, limit, chat template."""

    def as_row(self) -> dict[str, float]:
        """Return the metrics as values of a metrics row, by names such as `eval/tasks/arc_easy/acc`."""
        return {
            f"eval/tasks/{name}/{metric}": value.value
            for name, task in self.tasks.items()
            for metric, value in task.metrics.items()
        }

    def write(self, path: Path) -> None:
        """Write the results as JSON, without secrets.

        Raises:
            OSError: The file cannot be written; an older one stays.
        """
        replace_file(path, json.dumps(asdict(replace(self, settings=redact(self.settings)))) + "\n")


def read_task_results(path: Path) -> TaskResults:
    """Return the results in a file that `TaskResults.write` has written.

    Raises:
        OSError: The file cannot be read.
        DataError: The file has something else.
    """
    content = read_regular_file(path, MAX_DESCRIPTION_BYTES)
    try:
        return TypeAdapter(TaskResults).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("results", *first["loc"])))
        raise DataError(
            f"{path}: {where}: {first['msg']}; expected a file that evaluate --tasks ... --output has written"
        ) from None


def compute_stderr(scores: np.ndarray, aggregation: str) -> float | None:
    """Return the jackknife's standard error of a metric; `None` if there are fewer than two documents.

    Args:
        scores: Summands of numerator and denominator of each document, shape (documents, 2).
        aggregation: Key of AGGREGATIONS.
    """
    if len(scores) < 2:
        return None
    numerators, denominators = (scores.sum(axis=0) - scores).T  # without each document
    values = AGGREGATIONS[aggregation](numerators / denominators)
    return float(values.std() * math.sqrt(len(values) - 1))


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
    num_documents: int
    """Number of documents that both results have."""


def compare_results(earlier: TaskResults, later: TaskResults) -> list[MetricComparison]:
    """Return the comparison of each metric that both results have as a mean over documents.

    Raises:
        DataError: The results have no such metric of a document in common.
    """
    comparisons: list[MetricComparison] = []
    for name in filter(earlier.tasks.get, later.tasks):
        comparisons += _compare_task(name, earlier.tasks[name], later.tasks[name])
    if not comparisons:
        raise DataError(
            "the results have no task with the same documents and metrics: the earlier one has "
            f"{format_names(list(earlier.tasks))}, this one {format_names(list(later.tasks))}"
        )
    return comparisons


def find_prompt_differences(earlier: TaskResults, later: TaskResults) -> list[str]:
    """Return the names of the settings of prompts that differ between two results."""
    differences = []
    template = "apply_chat_template"
    if bool(earlier.settings.get(template)) != bool(later.settings.get(template)):
        differences.append(template)
    for name in filter(earlier.tasks.get, later.tasks):
        if earlier.tasks[name].num_fewshot != later.tasks[name].num_fewshot:
            differences.append(f"num_fewshot of {name}")
    return differences


def _compare_task(name: str, earlier: TaskResult, later: TaskResult) -> Iterator[MetricComparison]:
    """Yield the comparisons of a task's metrics."""
    keys = [key for key in later.documents if key in earlier.documents]
    both = [(earlier.documents[key], later.documents[key]) for key in keys]
    for metric, description in later.metrics.items():
        pairs = [(one[metric], other[metric]) for one, other in both if metric in one and metric in other]
        if description.aggregation is None or not pairs:
            continue
        scores = np.array(pairs, dtype=np.float64)  # (documents, results, numerator and denominator)
        # A document is drawn for both results alike. The seed is fixed, so equal results compare equally.
        generator = np.random.default_rng(0)
        draws = (generator.integers(len(scores), size=len(scores)) for _ in range(NUM_RESAMPLES))
        sums = np.array([scores.sum(axis=0), *(scores[draw].sum(axis=0) for draw in draws)])
        with np.errstate(all="ignore"):  # a perplexity may be infinite
            values = AGGREGATIONS[description.aggregation](sums[..., 0] / sums[..., 1])
            low, high = np.percentile(np.diff(values[1:]), [2.5, 97.5])
        before, after = values[0]
        yield MetricComparison(
            task=name,
            metric=metric,
            earlier=float(before),
            later=float(after),
            low=float(low),
            high=float(high),
            num_documents=len(pairs),
        )
