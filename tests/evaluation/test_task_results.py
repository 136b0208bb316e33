"""Two results compared document by document."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.errors import DataError
from pipeline.evaluation.task_results import (
    TaskMetric,
    TaskResult,
    TaskResults,
    compare_results,
    compute_stderr,
    read_task_results,
)


def results(scores, aggregation="mean", first=0, metric="acc", task="sums"):
    """Results of one task; document i has the index `first` + i, and a number or a pair as its score."""
    pairs = [score if isinstance(score, tuple) else (score, 1.0) for score in scores]
    documents = {f"{i} hash": {metric: (float(a), float(b))} for i, (a, b) in enumerate(pairs, first)}
    value = TaskMetric(0.0, None, aggregation)
    return TaskResults({task: TaskResult({metric: value}, len(documents), 0, documents, [])}, {})


def difference(found):
    return found.later - found.earlier


def test_equal_results_have_no_difference():
    scores = np.random.default_rng(1).integers(0, 2, 50)
    (found,) = compare_results(results(scores), results(scores))
    assert (found.earlier, found.low, found.high, found.num_documents) == (found.later, 0, 0, 50)


def test_the_interval_is_that_of_the_paired_differences():
    generator = np.random.default_rng(2)
    before = generator.normal(0, 10, 400)  # documents differ much more than the results
    after = before + generator.normal(0.5, 1, 400)
    (found,) = compare_results(results(before), results(after))
    stderr = (after - before).std(ddof=1) / 20
    assert difference(found) == pytest.approx((after - before).mean())
    assert found.low == pytest.approx(difference(found) - 1.96 * stderr, abs=0.1 * stderr)
    assert found.high == pytest.approx(difference(found) + 1.96 * stderr, abs=0.1 * stderr)


def test_chance_is_not_significant_and_a_second_call_gives_the_same():
    generator = np.random.default_rng(3)
    before, after = generator.integers(0, 2, (2, 300))
    first = compare_results(results(before), results(after))
    assert first == compare_results(results(before), results(after))
    assert first[0].low < 0 < first[0].high


@pytest.mark.parametrize("aggregation", ["bits_per_byte", "weighted_perplexity"])
def test_a_ratio_is_that_of_sums_over_documents(aggregation):
    generator = np.random.default_rng(4)
    sizes = generator.integers(10, 5000, 200)
    rates = generator.normal(-1.0, 0.2, 200)
    before = list(zip(rates * sizes, sizes, strict=True))
    after = list(zip((rates + 0.1) * sizes, sizes, strict=True))
    (found,) = compare_results(results(before, aggregation), results(after, aggregation))
    mean = (rates * sizes).sum() / sizes.sum()
    expected = {
        "bits_per_byte": lambda mean: -mean / math.log(2),
        "weighted_perplexity": lambda mean: math.exp(-mean),
    }[aggregation]
    assert found.earlier == pytest.approx(expected(mean))
    assert found.later == pytest.approx(expected(mean + 0.1))
    assert found.low <= difference(found) + 1e-9
    assert found.high >= difference(found) - 1e-9
    if aggregation == "bits_per_byte":  # each document has the same difference, so there is no other
        assert found.low == pytest.approx(found.high)


def test_only_documents_of_both_results_are_compared():
    (found,) = compare_results(results([1] * 10), results([0] * 10, first=6))
    assert found.num_documents == 4
    assert (found.earlier, found.later) == (1, 0)


@pytest.mark.parametrize(
    "later",
    [
        results([1], task="other"),
        results([1], first=9),
        results([1], metric="f1"),
        results([1], aggregation=None),
    ],
)
def test_results_that_cannot_be_compared_are_told_in_one_line(later):
    with pytest.raises(
        DataError, match="no task with the same documents and metrics: the earlier one has sums"
    ):
        compare_results(results([1]), later)


def test_a_standard_error_is_the_deviation_of_resampled_documents():
    generator = np.random.default_rng(5)
    sizes = generator.integers(10, 500, 300)
    scores = np.stack([-sizes * generator.normal(1, 0.3, 300), sizes], axis=1)
    draws = scores[generator.integers(0, 300, (4000, 300))].sum(axis=1)
    means = draws[:, 0] / draws[:, 1]
    assert compute_stderr(scores, "bits_per_byte") == pytest.approx(means.std() / math.log(2), rel=0.1)
    assert compute_stderr(scores, "weighted_perplexity") == pytest.approx(np.exp(-means).std(), rel=0.1)
    assert compute_stderr(scores[:, :1] * [1, 0] + [0, 1], "mean") == pytest.approx(
        scores[:, 0].std(ddof=1) / math.sqrt(300)
    )
    assert compute_stderr(scores[:1], "mean") is None


def test_a_file_has_the_same_results_without_secrets(tmp_path):
    given = results([0.5, math.nan])
    given.settings["model"] = "https://user:hunter2secret@host/model"
    given.write(tmp_path / "a.json")
    read = read_task_results(tmp_path / "a.json")
    assert read.tasks["sums"].documents["0 hash"] == given.tasks["sums"].documents["0 hash"]
    assert math.isnan(read.tasks["sums"].documents["1 hash"]["acc"][0])
    assert "hunter2secret" not in (tmp_path / "a.json").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "expected a file that evaluate --tasks ... --output has written"),
        (b"[1", "expected a file"),
        (b"[" * 100_000, "expected a file"),
        (
            b'{"tasks": {"a": {"metrics": 3}}, "settings": {}}',
            "tasks.a.metrics: Input should be an object",
        ),
    ],
)
def test_another_file_is_told_in_one_line(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json") as raised:
        read_task_results(tmp_path / "a.json")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
