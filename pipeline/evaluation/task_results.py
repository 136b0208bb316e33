"""Holds the results of evaluation tasks: metrics of each task, and the scores of each document.

A metric is a function of a sum over a sum, both over documents. So each document's pair of summands is enough
to compute standard errors, and to compare two results document by document. A file of results is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import DataError
from pipeline.files import MAX_DESCRIPTION_BYTES, read_regular_file, replace_file
from pipeline.redaction import redact, redact_text

AGGREGATIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda mean: mean,
    "perplexity": lambda mean: np.exp(-mean),
    "weighted_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}
"""lm-eval's name of an aggregation -> function of the documents' mean that gives the metric."""
OTHER = "other"
"""Aggregation of a metric that is no function of a mean over documents, such as BLEU."""


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task over all its documents."""

    value: float
    """Value of the metric."""
    stderr: float | None
    """Standard error over documents; `None` if it is unknown."""
    higher_is_better: bool | None
    """Whether a higher value is better; `None` if the task does not say it."""
    aggregation: str
    """Key of AGGREGATIONS, or OTHER."""


@dataclass(frozen=True)
class ScoredDocument:
    """A document of a task with its scores."""

    id: int
    """Index of the document in the task."""
    hash: str
    """Hash of the document's fields. It identifies the document in other results."""
    scores: dict[str, tuple[float, float]]
    """Metric -> summands of its numerator and of its denominator, which is 1 for a plain mean."""


@dataclass(frozen=True)
class TaskSample:
    """A document as a person reads it."""

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
    documents: list[ScoredDocument]
    """Evaluated documents, in the order of the task."""
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
        tree = asdict(self)
        tree["settings"] = redact(tree["settings"])
        for task in tree["tasks"].values():
            task["samples"] = [
                {key: redact_text(text) for key, text in sample.items()} for sample in task["samples"]
            ]
        replace_file(path, json.dumps(tree) + "\n")


def read_task_results(path: Path) -> TaskResults:
    """Return the results in a file that `TaskResults.write` has written.

    Raises:
        DataError: The file cannot be read, or has something else.
    """
    try:
        tree = json.loads(read_regular_file(path, MAX_DESCRIPTION_BYTES))
        return TypeAdapter(TaskResults).validate_python(tree)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # ValidationError is a ValueError
        reason = str(error).partition("\n")[0]
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(
            f"{path}: {reason}; expected a file that evaluate --tasks ... --output has written"
        ) from None


def compute_stderr(scores: np.ndarray, aggregation: str) -> float | None:
    """Return the standard error of a metric by the delta method; `None` if it is unknown.

    Args:
        scores: Summands of numerator and denominator of each document, shape (documents, 2).
        aggregation: Key of AGGREGATIONS, or OTHER.
    """
    if aggregation == OTHER or len(scores) < 2:
        return None
    numerators, denominators = scores.T
    mean = numerators.sum() / denominators.sum()
    residuals = (numerators - mean * denominators) / denominators.mean()
    stderr = math.sqrt(residuals.dot(residuals) / (len(scores) - 1) / len(scores))
    function = AGGREGATIONS[aggregation]
    slope = {"mean": 1.0, "bits_per_byte": 1 / math.log(2)}.get(aggregation, function(mean))
    return float(stderr * slope)
