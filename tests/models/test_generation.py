"""The choice of each token: allowed ids, draws, settings of each prompt, callback and log-probabilities."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from typing import Any

import pytest
import torch
from support.tiny import VOCABULARY
from torch import nn
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import DataError, ModelError
from pipeline.models import build_model
from pipeline.models.generation import (
    GeneratedToken,
    GenerationSettings,
    TokenChooser,
    compute_uniforms,
    draw,
    generate,
)
from pipeline.models.sharding import ModelRequest, NoSharding

CPU = torch.device("cpu")
POSITIONS = 24
PROMPTS = [[5, 6, 7, 8, 9], [200, 3], [11], [4, 4, 8, 1, 90, 33, 2]]
SETTINGS = [
    GenerationSettings(8, temperature=1.2, top_k=40, seed=1),
    GenerationSettings(5),
    GenerationSettings(7, temperature=0.8, top_p=0.7, seed=2, sample=3),
    GenerationSettings(8, temperature=2.0, top_k=9, top_p=0.95, min_p=0.1),
]


def make_model(kind: str = "llama") -> Any:
    """A small model whose likeliest tokens are much likelier than others."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
    section = CausalLMConfig(architecture=kind, extra={"initializer_range": 0.3}, **sizes)
    return build_model(section, ModelRequest(NoSharding(), VOCABULARY, sequence_length=POSITIONS), 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def own_settings(model):
    """Function that gives the model its own generation config during a test."""
    before = model.generation_config

    def change(**settings: Any) -> None:
        model.generation_config = GenerationConfig(**settings)

    yield change
    model.generation_config = before


@torch.no_grad()
def compute_logprobs(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the token after the ids, by a plain forward."""
    return model.eval()(torch.tensor([ids])).logits[0, -1].float().log_softmax(0)


def test_the_allowed_ids_are_those_of_transformers_warpers():
    """Rows with all combinations of settings, together, and some scores that are equal or -inf."""
    values = itertools.product((0.3, 1.0, 2.5), (0, 1, 7, 90), (1e-9, 0.3, 0.95, 1.0), (0.0, 0.02, 0.5, 1.0))
    settings = [GenerationSettings(1, temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in values]
    scores = torch.randn(len(settings), 80, generator=torch.Generator().manual_seed(0)) * 3
    scores[:, 40:50] = scores[:, 30:40]
    scores[:, 7] = -math.inf
    scores[:, 8] = -1e3  # of probability 0 in fp32
    limited = TokenChooser([[1]] * len(settings), settings, CPU).limit(scores)
    for row, of_row in enumerate(settings):
        expected = TemperatureLogitsWarper(of_row.temperature)(None, scores[row : row + 1])
        if of_row.top_k:
            expected = TopKLogitsWarper(of_row.top_k)(None, expected)
        if of_row.top_p < 1:
            expected = TopPLogitsWarper(of_row.top_p)(None, expected)
        expected = MinPLogitsWarper(of_row.min_p)(None, expected)[0]
        assert torch.equal(limited[row], expected), of_row


def test_only_the_drawn_rows_change_and_the_drawn_id_alone_stays_finite():
    settings = [GenerationSettings(2), GenerationSettings(2, temperature=1.0), GenerationSettings(2)]
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    chosen = TokenChooser([[1], [2, 3], [4]], settings, CPU)(torch.zeros(3, 3), scores.clone())
    assert torch.equal(chosen[[0, 2]], scores[[0, 2]])
    assert chosen[1].isfinite().sum() == 1
    assert not chosen.isnan().any()


def test_draws_have_the_distribution_of_the_softmax():
    """The chi-square statistic of 49 degrees of freedom is below 85.4 in 999 of 1,000 cases."""
    scores = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    probabilities = scores.double().softmax(0)
    num_draws = 20_000
    for name in ("sample", "seed", "position"):
        if name == "position":
            numbers = compute_uniforms([1, 2, 3], GenerationSettings(1, seed=5), num_draws)
        else:
            every = [GenerationSettings(1, **{name: number}) for number in range(num_draws)]
            numbers = [compute_uniforms([1, 2, 3], settings, 1)[0] for settings in every]
        drawn = draw(scores.expand(num_draws, -1), torch.tensor(numbers, dtype=torch.float64)[:, None])
        expected = probabilities * num_draws
        statistic = ((drawn.bincount(minlength=50) - expected) ** 2 / expected).sum()
        assert statistic < 85.4, name
        assert statistic > 20, "too even for draws"


def test_each_of_seed_prompt_sample_and_position_gives_another_number():
    settings = [
        GenerationSettings(1, seed=seed, sample=sample) for seed in (-1, 0, 1, 2**63) for sample in (0, 1)
    ]
    numbers = [compute_uniforms(prompt, each, 3) for prompt in ([1], [1, 1], [2]) for each in settings]
    flat = [number for row in numbers for number in row]
    assert len(set(flat)) == len(flat)
    assert all(0 <= number < 1 for number in flat)
    assert compute_uniforms([1], settings[0], 1) == numbers[0][:1]


def test_no_token_of_probability_0_is_ever_drawn():
    """The ends of the intervals are rounded, so the last number may be above the last end."""
    scores = torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
    scores[:, :3] = -math.inf
    scores[:, 23:] = -math.inf
    ends = scores.double().softmax(1).cumsum(1)[:, -1]
    assert (ends < 1 - 2.0**-53).any()
    for number, expected in ((0.0, 3), (1 - 2.0**-53, 22)):
        drawn = draw(scores, torch.full((400, 1), number, dtype=torch.float64))
        assert set(drawn.tolist()) == {expected}


def test_the_interval_of_a_token_begins_at_the_end_of_the_one_before():
    numbers = torch.tensor([[0.0], [0.24], [0.25], [0.74], [0.75]], dtype=torch.float64)
    assert draw(torch.zeros(5, 4), numbers).tolist() == [0, 0, 1, 2, 3]


def test_a_text_depends_on_its_prompt_and_settings_only(model):
    alone = [generate(model, [prompt], each, CPU)[0] for prompt, each in zip(PROMPTS, SETTINGS, strict=True)]
    assert [len(text) for text in alone] == [8, 5, 7, 8]
    for order in itertools.permutations(range(4)):
        together = generate(model, [PROMPTS[i] for i in order], [SETTINGS[i] for i in order], CPU)
        assert together == [alone[i] for i in order]
    pair = generate(model, [PROMPTS[0]] * 2, [SETTINGS[0], GenerationSettings(8, 1.2, 40, seed=2)], CPU)
    assert pair[0] == alone[0] != pair[1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_and_text_may_together_exceed_the_positions(kind, captured_warnings):
    """A row that has ended goes through the model with the others, behind its last position."""
    model = make_model(kind)
    prompts = [[11], list(range(1, POSITIONS - 1))]
    settings = [GenerationSettings(POSITIONS - 1), GenerationSettings(2, temperature=1.0)]
    alone = [generate(model, [prompt], each, CPU)[0] for prompt, each in zip(prompts, settings, strict=True)]
    assert generate(model, prompts, settings, CPU) == alone
    assert not captured_warnings()
    with pytest.raises(
        ModelError, match="a prompt has 22 tokens and max_new_tokens is 3, but the model has 24 positions"
    ):
        generate(model, prompts, GenerationSettings(3), CPU)


@pytest.fixture
def captured_warnings(recwarn, caplog, monkeypatch):
    """Function that returns the warnings so far, of transformers' logger too."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return lambda: [*recwarn.list, *(r for r in caplog.records if r.levelno >= logging.WARNING)]


def test_a_callback_sees_every_token_and_ends_its_own_row_only(model):
    whole = generate(model, PROMPTS, SETTINGS, CPU)
    seen: dict[int, list[int]] = {row: [] for row in range(4)}

    def stop(row: int, token: GeneratedToken) -> bool:
        assert token[1:] == (None, ()), "no log-probabilities are asked for"
        seen[row].append(token.id)
        return len(seen[row]) == {0: 3, 2: 1}.get(row)

    texts = generate(model, PROMPTS, SETTINGS, CPU, stop)
    assert texts == [whole[0][:3], whole[1], whole[2][:1], whole[3]]
    assert seen == dict(enumerate(texts))


def test_the_model_is_not_called_after_a_callback_has_ended_all_rows(model):
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    length = Counter()

    def stop(row: int, token: GeneratedToken) -> bool:
        length.update([row])
        return length[row] == 2 + row

    texts = generate(model, PROMPTS[:2], GenerationSettings(8), CPU, stop)
    hook.remove()
    assert [len(text) for text in texts] == [2, 3]
    assert len(calls) == 3


def test_a_callback_gets_the_end_token_and_nothing_after_it(model, own_settings):
    free = generate(model, PROMPTS, SETTINGS, CPU)
    own_settings(eos_token_id=[256, free[0][2]])
    seen = Counter()
    texts = generate(model, PROMPTS, SETTINGS, CPU, lambda row, token: bool(seen.update([row])))
    assert texts[0] == free[0][: free[0].index(free[0][2]) + 1]
    assert [seen[row] for row in range(4)] == [len(text) for text in texts]


@pytest.mark.parametrize("own", [{}, {"repetition_penalty": 1.8, "suppress_tokens": [3]}])
def test_log_probabilities_are_those_of_a_plain_forward(model, own_settings, own):
    """Neither the model's own generation config nor the settings of the request change them."""
    own_settings(**own)
    numbers = [2, None, 0, 400]
    settings = [
        GenerationSettings(s.max_new_tokens, s.temperature, s.top_k, num_logprobs=n)
        for s, n in zip(SETTINGS, numbers, strict=True)
    ]
    seen: list[list[GeneratedToken]] = [[], [], [], []]
    texts = generate(model, PROMPTS, settings, CPU, lambda row, token: bool(seen[row].append(token)))
    assert texts == generate(model, PROMPTS, settings, CPU)
    for prompt, text, tokens, number in zip(PROMPTS, texts, seen, numbers, strict=True):
        assert [token.id for token in tokens] == text
        for position, token in enumerate(tokens):
            if number is None:
                assert token[1:] == (None, ())
                continue
            expected = compute_logprobs(model, prompt + text[:position])
            assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-5)
            likeliest = expected.topk(min(number, VOCABULARY))
            assert [value for _, value in token.top] == pytest.approx(likeliest.values.tolist(), abs=1e-5)
            assert [expected[id] for id, _ in token.top] == pytest.approx(likeliest.values.tolist(), abs=1e-5)


def test_of_the_models_own_settings_only_what_it_forbids_or_makes_rarer_is_applied(
    model, own_settings, captured_warnings
):
    plain = generate(model, PROMPTS, SETTINGS, CPU)
    ignored = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 5,
        "top_p": 0.8,
        "min_p": 0.2,
        "typical_p": 0.4,
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_length": 7,
        "min_length": 20,
        "max_time": 1e-9,
        "forced_eos_token_id": 9,
        "stop_strings": ["a"],
        "cache_implementation": "static",
        "return_dict_in_generate": True,
        "guidance_scale": 2.0,
    }
    own_settings(**ignored)
    given = model.generation_config
    assert generate(model, PROMPTS, SETTINGS, CPU) == plain
    own_settings(repetition_penalty=3.0, suppress_tokens=[plain[1][0]])
    (text,) = generate(model, [PROMPTS[1]], SETTINGS[1], CPU)
    ids = list(PROMPTS[1])
    for _ in text:
        scores = compute_logprobs_as_scores(model, ids)
        scores = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([ids]), scores)
        ids.append(int(SuppressTokensLogitsProcessor([plain[1][0]])(None, scores).argmax()))
    assert text == ids[2:] != plain[1]
    own_settings(**ignored)
    generate(model, PROMPTS, SETTINGS, CPU)
    assert model.generation_config.to_dict() == given.to_dict()
    assert not captured_warnings()


@torch.no_grad()
def compute_logprobs_as_scores(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits after the ids (1, V)."""
    return model.eval()(torch.tensor([ids])).logits[:, -1].float()


def test_the_model_is_as_before_after_a_callback_has_raised(model):
    before = (model.generation_config, model.training, dict(model._forward_pre_hooks))
    model.train()

    def leave(row: int, token: GeneratedToken) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, SETTINGS, CPU, leave)
    assert model.training
    model.train(before[1])
    assert before == (model.generation_config, model.training, dict(model._forward_pre_hooks))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give 1 or more"),
        ({"temperature": -1.0}, "temperature is -1.0; give 0, or a number from 0.000001 to 1000000"),
        ({"temperature": 1e-9}, "temperature is 1e-09; give 0, or a number from 0.000001 to 1000000"),
        ({"temperature": math.nan}, "temperature is nan; give 0, or a number from 0.000001 to 1000000"),
        ({"temperature": math.inf}, "temperature is inf; give 0, or a number from 0.000001 to 1000000"),
        ({"top_k": -1}, "top_k is -1; give 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0; give a number above 0, and 1 at most"),
        ({"top_p": 1.1}, "top_p is 1.1; give a number above 0, and 1 at most"),
        ({"top_p": math.nan}, "top_p is nan; give a number above 0, and 1 at most"),
        ({"min_p": -0.1}, "min_p is -0.1; give a number from 0 to 1"),
        ({"min_p": math.nan}, "min_p is nan; give a number from 0 to 1"),
        ({"sample": -1}, "sample is -1; give 0 or more"),
        ({"num_logprobs": -1}, "num_logprobs is -1; give 0 or more, or None"),
    ],
)
def test_a_setting_out_of_range_is_refused(changes, words):
    with pytest.raises(DataError) as caught:
        GenerationSettings(**{"max_new_tokens": 8, **changes})
    assert str(caught.value) == words


def test_the_edges_of_the_ranges_are_allowed(model):
    settings = [
        GenerationSettings(4, temperature=1e-6, top_p=1e-300, seed=9),
        GenerationSettings(4, temperature=1e6, top_k=10**9, min_p=1.0),
        GenerationSettings(4, temperature=1e-6),
    ]
    texts = generate(model, [[5, 6]] * 3, settings, CPU)
    assert texts == generate(model, [[5, 6]] * 3, GenerationSettings(4), CPU)


def test_there_is_one_setting_for_all_prompts_or_one_for_each(model):
    with pytest.raises(DataError) as caught:
        generate(model, PROMPTS, SETTINGS[:3], CPU)
    assert str(caught.value) == "there are 4 prompts and 3 settings; give one for each prompt"
