"""Scores of continuations: under every split those of one whole model in one process, and no step changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine.test_generate import state_of, whole_model
from parity.measure import has_async_io
from parity.splits import Case, cases
from support.resume_across_splits import Run, copy_shards, make_recipe
from support.tiny import VOCABULARY
from torch import nn

from pipeline.distributed.process_group import Job
from pipeline.evaluation.scoring import Request, ScoredTokens, score_continuations
from pipeline.objectives.model_call import ModelCall

pytestmark = pytest.mark.slow

POSITIONS = 24
TOLERANCE = 1e-5  # absolute difference of a log-probability in fp32
SINGLE = {"torch": {"parallel": "single"}}


def make_requests(generator: random.Random, number: int) -> list[Request]:
    """Return requests of all lengths that the model takes, among them ones that are equal."""
    requests = []
    for _ in range(number):
        ids = [generator.randrange(VOCABULARY) for _ in range(generator.randint(2, POSITIONS + 1))]
        cut = generator.randint(1, len(ids) - 1)
        requests.append((ids[:cut], ids[cut:]))
        if requests and generator.random() < 0.1:
            requests[-1] = generator.choice(requests)
    return requests


def score(engine: Any, job: Job, requests: list[Request], tokens_per_batch: int = 100, **more: Any):
    settings = {"max_tokens": POSITIONS, "tokens_per_batch": tokens_per_batch, **more}
    return score_continuations(engine, ModelCall(), job, requests, **settings)


@torch.no_grad()
def score_alone(plain: nn.Module, request: Request) -> ScoredTokens:
    """The scores of transformers' model, of one row without padding, by a loop over its tokens."""
    context, continuation = request
    logps_TV = plain(torch.tensor([[*context, *continuation]])).logits[0].float().log_softmax(-1)
    rows = [logps_TV[len(context) - 1 + index] for index in range(len(continuation))]
    logprobs = [float(row[token]) for row, token in zip(rows, continuation, strict=True)]
    top_ids = [int(row.argmax()) for row in rows]
    return ScoredTokens(logprobs, top_ids, [float(row.max()) for row in rows], top_ids == continuation)


def assert_equal(found: list[ScoredTokens], expected: list[ScoredTokens]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=TOLERANCE)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, rel=0, abs=TOLERANCE)
        assert one.top_ids == other.top_ids
        assert one.is_greedy == other.is_greedy


def scoring(job: Job, tree: dict[str, Any], split: dict[str, Any], requests: list[Request]):
    """Train without scoring and with it.

    Returns:
        The curve without it, the curve with it, whether scoring left random numbers and gradients unchanged,
        the shards at the end, and the scores of the trained model.
    """
    silent = Run(job, tree, split).train(0, 3)
    run = Run(job, tree, split)
    curve = []
    unchanged = True
    for step in range(3):
        curve += run.train(step, step + 1)
        random_numbers, *gradients, _ = state_of(run.engine)
        scores = score(run.engine, job, requests)
        now, *gradients_now, _ = state_of(run.engine)
        unchanged &= torch.equal(now, random_numbers)
        unchanged &= all(
            one is other if one is None else torch.equal(one, other)
            for one, other in zip(gradients, gradients_now, strict=True)
        )
    return silent, curve, unchanged, copy_shards(run.engine), scores


def check_split(ranks, world_size: int, split: dict[str, Any], model: dict[str, Any]) -> None:
    requests = make_requests(random.Random(3), 11)
    results = ranks(world_size).run(scoring, make_recipe(model), split, requests, timeout=900)
    plain = whole_model(model, results)
    greedy = [score_alone(plain, request).top_ids[0] for request in requests]
    expected = [score_alone(plain, request) for request in requests]
    assert len(set(greedy)) > 3, "the likeliest token depends on the context"
    for silent, curve, unchanged, _, scores in results:
        assert curve == silent
        assert unchanged, "training's random numbers or gradients are others"
        assert_equal(scores, expected)


EVERY_SPLIT = {str(case): case for case in cases() if case.precision == "fp32" and not case.split.adapter}


@pytest.mark.daily(
    "ZeRO_3-fp32-2", "tensor_2_ZeRO_1-fp32-2", "pipeline_2_ZeRO_1-fp32-4", "sequence_2_ZeRO_3-fp32-4"
)
@pytest.mark.parametrize("case", EVERY_SPLIT.values(), ids=str)
def test_every_split_scores_as_one_whole_model_and_trains_on_as_if_it_had_not(ranks, case: Case):
    if "NVMe" in case.split.name and not has_async_io():
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")
    check_split(ranks, case.world_size, case.json, case.split.model)
