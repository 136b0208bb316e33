"""Parts of one's own as docs/extending.md shows them: under each split, and after a resume, on one curve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from parity.measure import ALONE, largest_difference
from parity.splits import LLAMA
from support.exchange import BAND, HALF, SPLITS, STEPS, Run, gathered, gone_on, run_on, unbroken
from support.extending import with_accuracy
from support.tiny import recipe

from pipeline.assemble import build_eval_loader
from pipeline.distributed.process_group import Job
from pipeline.engine.normalize import further_means
from pipeline.evaluation import evaluate
from pipeline.schedule import multiplier


def two_metrics(outputs, batch):
    """The page's accuracy, and a mean of other numbers than 0 and 1."""
    loss, metrics = with_accuracy(outputs, batch)
    labels = batch["shift_labels"]
    of_label = outputs.logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    counted = labels != -100
    return loss, metrics | {"likelihood": ((of_label * counted).sum(), counted.sum())}


two_metrics.metrics = ["accuracy", "likelihood"]
two_metrics.count = with_accuracy.count

TREE = recipe(
    model=LLAMA,
    batch={"gradient_accumulation_steps": 2, "global_batch_size": 16},
    optimizer={"kind": "support.extending:Lion", "args": {"betas": [0.9, 0.98]}, "learning_rate": 2e-2},
    schedule={"kind": "support.extending:inverse_sqrt"},
    objective={"kind": "test_extending:two_metrics"},
    max_steps=STEPS,
)
PLAIN = {"torch": {"parallel": "single"}}
AT_TWO_RANKS = ("ddp", "zero2", "zero3", "pipeline-zero1")


@dataclass
class Curve:
    """What rows of a run have."""

    losses: list[float]
    metrics: list[dict[str, float]]
    """Of each step."""
    evaluation: dict[str, float]
    rates: list[float]


def curve(job: Job, tree: dict[str, Any], split: dict[str, Any]) -> Curve:
    run = Run(job, tree, split)
    metrics = []
    step = run.engine.train_step

    def watched(*arguments: Any) -> Any:
        result = step(*arguments)
        sums = {key: job.all_reduce_sum(each.double()) for key, each in result.extras.items()}
        metrics.append(further_means(sums, run.objective.means))
        return result

    run.engine.train_step = watched
    losses = run.train(0, STEPS)
    loader = build_eval_loader(run.config, run.resolved.plan, run.data, run.engine)
    rates = [multiplier(run.config.schedule, at, STEPS) for at in range(STEPS)]
    return Curve(losses, metrics, evaluate(run.engine, run.objective, loader, job), rates)


@cache
def alone() -> Curve:
    return curve(ALONE, TREE | {"batch": {"micro_batch_size": 16}}, PLAIN)


@pytest.mark.parametrize("name", AT_TWO_RANKS)
def test_curve_and_metrics_are_those_of_one_process(ranks, name):
    for got in ranks(2).run(curve, TREE, SPLITS[name].json):
        assert largest_difference(got.losses, alone().losses) < BAND
        for row, expected in zip(
            [*got.metrics, got.evaluation], [*alone().metrics, alone().evaluation], strict=True
        ):
            assert row.keys() == expected.keys()
            assert row == pytest.approx(expected, rel=1e-4)
    assert set(alone().metrics[0]) == {"accuracy", "likelihood"}
    assert {"eval/accuracy", "eval/likelihood"} <= set(alone().evaluation)


RING = ("ddp", "zero2", "pipeline-zero1", "zero3", "plain", "ddp")


@cache
def saved(ranks, name: str):
    results = run_on(ranks, SPLITS[name], unbroken, TREE)
    return results[0][0], gathered(results)


@pytest.mark.parametrize(("name", "resumed"), [*zip(RING, RING[1:], strict=False), ("zero3", "zero3")])
def test_a_run_goes_on_under_another_split(ranks, name, resumed):
    losses, source = saved(ranks, name)
    for again, *_ in run_on(ranks, SPLITS[resumed], gone_on, TREE, source, 0):
        assert largest_difference(again, losses[HALF:]) <= (0 if name == resumed else BAND)
