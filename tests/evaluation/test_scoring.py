"""Scores of continuations: under every split those of one whole model in one process, and no step changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine.test_generate import DROPOUT, SHARDED, alone, state_of, whole_model
from parity.measure import ALONE, has_async_io
from parity.splits import GPT2, SEQUENCE_2, TENSOR_2, TWO_STAGES, Case, cases, zero
from support.resume_across_splits import Run, copy_shards, make_recipe
from support.tiny import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from pipeline.distributed.process_group import Job
from pipeline.errors import DataError, ModelError
from pipeline.evaluation.scoring import (
    Request,
    ScoredTokens,
    generate_over_ranks,
    plan_rounds,
    score_continuations,
)
from pipeline.models.generation import GenerationSettings
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
    logps_TV = plain(torch.tensor([[*context, *continuation][:-1]])).logits[0].float().log_softmax(-1)
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
    expected = [score_alone(plain, request) for request in requests]
    assert len({each.top_ids[0] for each in expected}) > 3, "the likeliest token depends on the context"
    for silent, curve, unchanged, _, scores in results:
        assert curve == silent
        assert unchanged, "training's random numbers or gradients are others"
        assert_equal(scores, expected)


EVERY_SPLIT = [case for case in cases() if case.precision == "fp32" and not case.split.adapter]


@pytest.mark.daily("sequence_2_ZeRO_3-fp32-4", "tensor_2_ZeRO_1-fp32-2")
@pytest.mark.parametrize("case", EVERY_SPLIT, ids=str)
def test_every_split_scores_as_one_whole_model_and_trains_on_as_if_it_had_not(ranks, case: Case):
    if "NVMe" in case.split.name and not has_async_io():
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")
    check_split(ranks, case.world_size, case.json, case.split.model)


@pytest.mark.parametrize("split", [SHARDED, zero(1) | TWO_STAGES], ids=["zero3", "stages"])
def test_scoring_drops_nothing_out_and_a_training_does_after_it(ranks, split):
    check_split(ranks, 2, split, DROPOUT)


ODD = GPT2 | {"max_sequence_length": POSITIONS + 1}


def score_whole_rows(job: Job):
    """Return the shards of a model with an odd number of learned positions, and scores of as many tokens."""
    engine = Run(job, make_recipe(ODD), zero(2) | SEQUENCE_2).engine
    return copy_shards(engine), score(engine, job, WHOLE_ROWS, max_tokens=POSITIONS + 1)


WHOLE_ROWS: list[Request] = [([5], list(range(POSITIONS + 1))), ([7, 8, 9], [1])]


def test_a_row_of_all_positions_is_scored_if_their_number_is_odd(ranks):
    results = ranks(2).run(score_whole_rows)
    plain = whole_model(ODD, [(shards, None) for shards, _ in results])
    for _, scores in results:
        assert_equal(scores, [score_alone(plain, request) for request in WHOLE_ROWS])


UNEVEN = {
    "ddp": ({"torch": {"parallel": "ddp"}}, 2),
    "zero3": (SHARDED, 2),
    "sequence": (zero(2) | SEQUENCE_2, 2),
    "tensor": (zero(1) | TENSOR_2, 2),
    "stages": (zero(1) | TWO_STAGES, 2),
    "ddp-4": ({"torch": {"parallel": "ddp"}}, 4),
    "zero3-4": (SHARDED, 4),
    "sequence-zero3-4": (zero(3) | SEQUENCE_2, 4),
    "tensor-zero3-4": (zero(3) | TENSOR_2, 4),
    "stages-4": (zero(1) | TWO_STAGES, 4),
}
MODEL = make_recipe(DROPOUT | {"extra": {}})


def score_sets(job: Job, split: dict[str, Any], seed: int, number: int):
    """Return the shards of an untrained model, and its scores of random sets of requests."""
    engine = Run(job, MODEL, split).engine
    generator = random.Random(seed)
    scores = []
    for _ in range(number):
        requests = make_requests(generator, generator.randint(0, 17))
        scores.append(score(engine, job, requests, generator.choice([1, 24, 60, 200, 10_000])))
    return copy_shards(engine), scores


@pytest.mark.daily("ddp-40", "zero3-40", "stages-4-40")
@pytest.mark.parametrize("number", [40, 1000])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_sets_of_requests_end_and_score_as_in_one_process(ranks, name, number):
    split, world_size = UNEVEN[name]
    results = ranks(world_size).run(score_sets, split, number, number, timeout=1500)
    engine = Run(ALONE, MODEL, SINGLE).engine
    engine.module.load_state_dict(
        whole_model(MODEL["model"], [(shards, None) for shards, _ in results]).state_dict()
    )
    generator = random.Random(number)
    for index in range(number):
        requests = make_requests(generator, generator.randint(0, 17))
        generator.choice([1, 24, 60, 200, 10_000])
        expected = score(engine, ALONE, requests)
        for _, scores in results:
            assert_equal(scores[index], expected)


def run_without_requests(job: Job):
    """Score and generate nothing on one rank alone: there is nothing to wait for."""
    engine = Run(job, MODEL, SHARDED).engine
    if job.ranks.rank == 1:
        assert score(engine, job, []) == []
        assert generate_over_ranks(engine, job, [], GenerationSettings(4), rows_per_batch=2) == []


def test_without_requests_no_rank_waits_for_another(ranks):
    ranks(2).run(run_without_requests)


@pytest.fixture(scope="module")
def single():
    return Run(ALONE, MODEL, SINGLE).engine


def test_results_are_in_the_order_of_the_requests_and_equal_ones_have_equal_scores(single):
    requests = make_requests(random.Random(0), 9)
    scores = score(single, ALONE, requests)
    for order in (range(8, -1, -1), [3, 3, 0, 7, 3]):
        permuted = score(single, ALONE, [requests[index] for index in order])
        assert_equal(permuted, [scores[index] for index in order])
    assert scores[0].logprob == pytest.approx(sum(scores[0].logprobs))


def test_progress_counts_requests_up_to_all(single):
    seen = []
    requests = make_requests(random.Random(0), 9)
    score(single, ALONE, requests, 48, on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 2
    assert seen == sorted(set(seen))
    assert seen[-1] == (9, 9)


def test_a_batch_has_no_more_logits_than_memory_allows(single, monkeypatch):
    seen = []
    monkeypatch.setattr("pipeline.evaluation.scoring.MAX_LOGITS", 2 * POSITIONS * VOCABULARY)
    requests = [([5] * POSITIONS, [6])] * 4 + [([5] * 100, [6])]
    score(single, ALONE, requests, 10_000, on_progress=lambda done, total: seen.append(done))
    assert seen == [2, 4, 5]


def test_a_request_that_is_the_likeliest_is_greedy(single):
    start = [5, 6, 7]
    (text,) = single.generate([start], GenerationSettings(6))
    unlikely = [*text[:-1], (text[-1] + 1) % VOCABULARY]
    greedy, other = score(single, ALONE, [(start, text), (start, unlikely)])
    assert greedy.is_greedy
    assert greedy.top_ids == text
    assert greedy.logprobs == greedy.top_logprobs
    assert not other.is_greedy
    assert other.logprob < greedy.logprob


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (([], [1]), r"the context of requests\[1\] is empty; give it at least one token"),
        (([1], []), r"the continuation of requests\[1\] is empty; give it at least one token"),
        (([1], [2] * 25), r"continuation of requests\[1\] has 25 tokens, but the model reads 24 at a time"),
        (
            ([1], [3, VOCABULARY]),
            rf"continuation of requests\[1\] has ids from 3 to {VOCABULARY}, expected 0 to",
        ),
        (([-1], [3]), r"the context of requests\[1\] has ids from -1 to -1, expected 0 to"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(single, request_, words):
    with pytest.raises(DataError, match=words) as caught:
        score(single, ALONE, [([1], [2]), request_])
    assert "\n" not in str(caught.value)


def test_batches_hold_so_many_tokens_the_longest_first():
    lengths = [3, 10, 4, 4, 9, 1, 2]
    rounds = list(plan_rounds(lengths, 2, lambda length: 12 // length))
    assert rounds == [[[1], [4]], [[2, 3, 0], [6, 5]]]
    assert list(plan_rounds([5, 5, 5], 2, lambda length: 100)) == [[[0, 1], [2]]]
    assert list(plan_rounds([5], 3, lambda length: 0)) == [[[0], [], []]]


def test_scores_are_those_of_lm_eval(single, tmp_path, monkeypatch):
    """Contexts that are too long are cut from the left, as by lm-eval."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM

    words = {str(index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0").save_pretrained(tmp_path)
    single.module.save_pretrained(tmp_path)
    model = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=3)
    assert model.max_length == POSITIONS
    requests = make_requests(random.Random(5), 20)
    for first, (before, after) in enumerate([(64, 1), (58, 7), (40, POSITIONS), (POSITIONS, 1), (25, 1)]):
        # Other ids in each: HFLM takes requests of equal ids for ones with equal continuations.
        ids = [index % VOCABULARY for index in range(first, first + before + after)]
        requests.append((ids[:before], ids[before:]))
    expected = model._loglikelihood_tokens([(("", ""), *each) for each in requests], disable_tqdm=True)
    scores = score(single, ALONE, requests)
    assert [each.is_greedy for each in scores] == [is_greedy for _, is_greedy in expected]
    assert [each.logprob for each in scores] == pytest.approx([sum_ for sum_, _ in expected], rel=0, abs=2e-4)


PROMPTS = [[5, 6, 7, 8, 9], [200, 3], [11], [250, 100, 17], [4, 4, 8, 1, 90, 33, 2]]
LENGTHS = [3, 8, 5, 1, 8]


def generating(job: Job, split: dict[str, Any], rows_per_batch: int):
    """Return the shards of a model, and its texts: of several lengths, and ended by a callback."""
    engine = Run(job, MODEL, split).engine
    settings = [GenerationSettings(length) for length in LENGTHS]
    texts = generate_over_ranks(engine, job, PROMPTS, settings, rows_per_batch=rows_per_batch)

    def stop_after(indices: Any) -> Any:
        """End the text after prompt i with i + 1 tokens."""
        counts = dict.fromkeys(indices, 0)

        def on_token(row: int, _: Any) -> bool:
            counts[indices[row]] += 1
            return counts[indices[row]] > indices[row]

        return on_token

    stopped = generate_over_ranks(
        engine, job, PROMPTS, GenerationSettings(8), rows_per_batch=rows_per_batch, make_callback=stop_after
    )
    return copy_shards(engine), texts, stopped


@pytest.mark.daily("1-zero3-4", "2-tensor")
@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("rows_per_batch", [1, 2, 9])
def test_dealt_prompts_have_the_texts_of_one_process(ranks, name, rows_per_batch):
    split, world_size = UNEVEN[name]
    results = ranks(world_size).run(generating, split, rows_per_batch, timeout=900)
    plain = whole_model(MODEL["model"], [(shards, None) for shards, *_ in results])
    expected = [alone(plain, prompt) for prompt in PROMPTS]
    for _, texts, stopped in results:
        assert texts == [text[:length] for text, length in zip(expected, LENGTHS, strict=True)]
        assert stopped == [text[: index + 1] for index, text in enumerate(expected)]


def refuse(job: Job):
    """Return the message about a prompt that only one rank would continue."""
    engine = Run(job, MODEL, SHARDED).engine
    prompts = [[1] * 20, [1], [2], [3]]
    with pytest.raises(ModelError) as caught:
        generate_over_ranks(engine, job, prompts, GenerationSettings(8), rows_per_batch=1)
    return str(caught.value)


def test_all_ranks_refuse_a_prompt_of_one(ranks):
    first, second = ranks(2).run(refuse)
    assert first == second
    assert "a prompt has 20 tokens and max_new_tokens is 8" in first
