"""Evaluation over several named sets: exact means of each and of all together, from sums."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.tiny import MaskedTokens, make_engine, recipe, settings, token_bundle

from pipeline.config.batch_plan import plan_batch
from pipeline.config.data_schema import DigitsDataConfig
from pipeline.data import prepare_data
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.torch_engine import TorchEngine
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_eval_loader

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
WEB = MaskedTokens(7, seed=1)
CODE = MaskedTokens(12, seed=2)
NEWS = MaskedTokens(5, seed=3)


def evaluated(job: Job, sets, eval_sets=(), tree=None, max_samples=None):
    tree = tree or recipe(batch={"micro_batch_size": 4})
    data = replace(token_bundle(), eval=dict(sets), eval_sets=dict(eval_sets))
    return rows_of(job, tree | {"eval": {"max_samples": max_samples}}, data)


def rows_of(job: Job, tree, data):
    config = settings(tree, None).config
    engine = make_engine(job, tree, None, data)
    loader = build_eval_loader(config, plan_batch(config.batch, engine.dp_world_size), data, engine)
    assert loader is not None
    return evaluate(engine, build_objective(config), loader, job)


def tokens(dataset):
    return sum(int((dataset[i]["shift_labels"] != -100).sum()) for i in range(len(dataset)))


def test_the_total_is_the_mean_over_all_tokens_not_over_sets():
    web = evaluated(ALONE, {"web": WEB})
    code = evaluated(ALONE, {"code": CODE})
    assert set(web) == {"eval/loss", "eval/perplexity"}  # one set: no name
    both = evaluated(ALONE, {"web": WEB, "code": CODE})
    assert list(both) == ["eval/loss", "eval/perplexity", "eval/web/loss", "eval/code/loss"]
    assert both["eval/web/loss"] == pytest.approx(web["eval/loss"], rel=1e-9)
    assert both["eval/code/loss"] == pytest.approx(code["eval/loss"], rel=1e-9)
    sums = web["eval/loss"] * tokens(WEB) + code["eval/loss"] * tokens(CODE)
    assert both["eval/loss"] == pytest.approx(sums / (tokens(WEB) + tokens(CODE)), rel=1e-9)
    assert both["eval/perplexity"] == pytest.approx(math.exp(both["eval/loss"]))


@pytest.mark.slow
def test_further_sets_are_no_part_of_the_total_unless_there_is_nothing_else():
    web = evaluated(ALONE, {"web": WEB})
    row = evaluated(ALONE, {"web": WEB}, {"news": NEWS})
    assert row["eval/loss"] == pytest.approx(web["eval/loss"], rel=1e-9)
    assert row["eval/news/loss"] != pytest.approx(web["eval/loss"], rel=1e-4)
    alone = evaluated(ALONE, {}, {"news": NEWS})
    assert alone["eval/loss"] == pytest.approx(row["eval/news/loss"], rel=1e-9)


@pytest.mark.slow
def test_max_samples_is_of_each_set():
    first = [torch.utils.data.Subset(dataset, range(3)) for dataset in (WEB, CODE)]
    expected = evaluated(ALONE, {"web": first[0], "code": first[1]})
    assert evaluated(ALONE, {"web": WEB, "code": CODE}, max_samples=3) == expected


@pytest.mark.slow
def test_without_a_held_out_sample_there_is_no_loader():
    data = replace(token_bundle(), eval={})
    tree = recipe()
    config = settings(tree, None).config
    engine = make_engine(ALONE, tree, None, data)
    assert isinstance(engine, TorchEngine)
    assert build_eval_loader(config, plan_batch(config.batch, 1), data, engine) is None


@pytest.mark.slow
def test_classes_have_an_accuracy_in_each_set():
    digits = prepare_data(DigitsDataConfig(kind="digits"))
    held_out = digits.eval["digits"]
    halves = {
        "first": torch.utils.data.Subset(held_out, range(100)),
        "second": torch.utils.data.Subset(held_out, range(100, 200)),
    }
    tree = recipe(
        model={"kind": "cnn", "channels": 4},
        objective={"kind": "classification"},
        batch={"micro_batch_size": 16},
    )
    row = rows_of(ALONE, tree, replace(digits, eval=halves))
    accuracies = [row["eval/first/accuracy"], row["eval/second/accuracy"]]
    assert row["eval/accuracy"] == pytest.approx(sum(accuracies) / 2)


def on_this_rank(job: Job):
    return evaluated(job, {"web": WEB, "code": CODE}, {"news": NEWS})


@pytest.mark.slow
def test_several_sets_are_the_same_on_two_ranks(ranks):
    """7, 12 and 5 samples in batches of 4 on two ranks: uneven in every set."""
    expected = on_this_rank(ALONE)
    for row in ranks(2).run(on_this_rank):
        assert row == pytest.approx(expected, rel=1e-6)
