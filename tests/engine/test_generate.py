"""Text while training: under every split what one whole model of transformers writes, and no step changes."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
import xxhash
from parity.measure import ALONE, has_async_io
from parity.splits import BUFFERED, CPU, GPT2, LLAMA, NVME, SEQUENCE_2, TENSOR_2, TWO_STAGES, WIDE, zero
from support.resume_across_splits import BF16, GatheredShards, Run, assemble_tensors, copy_shards, make_recipe
from support.tiny import VOCABULARY
from torch import nn
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.config.model_schema import CausalLMConfig
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.errors import DataError, ModelError
from pipeline.models import build_model
from pipeline.models.generation import GeneratedToken, GenerationSettings, generate
from pipeline.models.sharding import ModelRequest, NoSharding

pytestmark = pytest.mark.slow

DROPOUT = LLAMA | {"extra": {"attention_dropout": 0.2}}
DROPOUT_GPT2 = {key: value for key, value in GPT2.items() if key != "extra"} | {"max_sequence_length": 24}
# A forward leaves nothing gathered for the next one.
SHARDED = zero(
    3,
    stage3_param_persistence_threshold=0,
    stage3_max_reuse_distance=0,
    stage3_prefetch_bucket_size=0,
)
SPLITS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "ddp": ({"torch": {"parallel": "ddp"}}, 2, DROPOUT),
    "zero0": (zero(0), 2, DROPOUT_GPT2),
    "zero1": (zero(1), 2, DROPOUT),
    "zero2-cpu": (zero(2, offload_optimizer=CPU), 2, DROPOUT),
    "zero3": (SHARDED, 2, DROPOUT),
    "zero3-persistent": (zero(3), 2, DROPOUT_GPT2),
    "zero3-cpu": (zero(3, offload_optimizer=CPU, offload_param=CPU), 2, DROPOUT),
    "zero3-nvme": (zero(3, offload_optimizer=NVME, offload_param=BUFFERED), 2, WIDE),
    "zero3-hpz": (zero(3, zero_hpz_partition_size=2), 4, DROPOUT),
    "tensor": (zero(1) | TENSOR_2, 2, DROPOUT),
    "tensor-tied": (zero(1) | TENSOR_2, 2, LLAMA | {"extra": {"tie_word_embeddings": True}}),
    "tensor-zero3": (zero(3) | TENSOR_2, 4, DROPOUT),
    "sequence": (zero(2) | SEQUENCE_2, 2, LLAMA),
    "sequence-zero3": (zero(3) | SEQUENCE_2, 4, LLAMA),
    "stages": (zero(1) | TWO_STAGES, 2, DROPOUT),
    "stages-data": (zero(0) | TWO_STAGES, 4, DROPOUT_GPT2),
    "stages-tied": (zero(1) | TWO_STAGES, 2, GPT2),
}
HALF = {"zero3": SHARDED | BF16, "stages": zero(1) | TWO_STAGES | BF16}
# Of unequal lengths, so that rows are padded; those of the second data-parallel rank are others, and more.
PROMPTS = ([[5, 6, 7, 8, 9], [200, 3]], [[11], [250, 100, 17], [4, 4, 8, 1, 90, 33, 2]])
GREEDY = GenerationSettings(8)
DRAWN = GenerationSettings(8, temperature=0.9, top_k=20, top_p=0.9, min_p=0.1, seed=7, sample=2)
# A data-parallel rank's first prompt and its text fill the model. It has ended long before the other's first,
# and the forwards go on, as they do for the other's second prompt.
LONG = list(range(1, 22))
UNEVEN = (
    ([LONG], [GenerationSettings(3, num_logprobs=2, gather=False)]),
    (
        [[11], LONG],
        [
            replace(DRAWN, max_new_tokens=20, num_logprobs=1, gather=False),
            GenerationSettings(2, gather=False),
        ],
    ),
)
STOPPED_AFTER = 18


def own_prompts(engine: Engine) -> list[list[int]]:
    return PROMPTS[engine.dp_rank % 2]


def generate_uneven(engine: Engine) -> tuple[list[list[int]], list[list[GeneratedToken]]]:
    """The texts of the rank's uneven prompts, and the tokens that a callback saw before it ended them."""
    prompts, settings = UNEVEN[engine.dp_rank % 2]
    seen: list[list[GeneratedToken]] = [[] for _ in prompts]

    def see(row: int, token: GeneratedToken) -> bool:
        seen[row].append(token)
        return len(seen[row]) == STOPPED_AFTER

    return engine.generate(prompts, settings, see), seen


def state_of(engine: Engine) -> list[Any]:
    gradients = [None if p.grad is None else p.grad.clone() for p in engine.module.parameters()]
    return [torch.get_rng_state(), *gradients, engine.module.training]


def writing(job: Job, tree: dict[str, Any], split: dict[str, Any]):
    """Train without generating and with it.

    Returns:
        The curve without generation, the curve with it, whether generation left the state unchanged, the
        shards at the end, and the generated texts: for each rank's own prompts and for shared ones.
    """
    silent = Run(job, tree, split).train(0, 3)
    run = Run(job, tree, split)
    engine = run.engine
    curve = []
    unchanged = True
    texts: dict[str, Any] = {}
    for step in range(3):
        curve += run.train(step, step + 1)
        if step == 1:  # at ZeRO 3 an evaluation may leave parameters gathered, for a backward
            engine.eval_step(run.loader.next_group()[0], run.objective)
            engine.module.train()
        before = state_of(engine)
        for gather in (True, False):
            greedy = GenerationSettings(8, gather=gather)
            texts[f"own, {gather}"] = engine.generate(own_prompts(engine), greedy)
        texts["greedy"] = engine.generate(PROMPTS[0], GREEDY)
        texts["drawn"] = engine.generate(PROMPTS[0], DRAWN)
        texts["uneven"] = generate_uneven(engine)
        unchanged &= all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(before, state_of(engine), strict=True)
        )
    texts["prompts"] = own_prompts(engine)
    # The first rank comes to an end early; where forwards are collective the others still need it.
    engine.module.generation_config.eos_token_id = texts["greedy"][0][2]
    few = PROMPTS[0][:1] if engine.dp_rank % 2 == 0 else PROMPTS[1]
    for gather in (True, False):
        texts[f"ended, {gather}"] = engine.generate(few, GenerationSettings(8, gather=gather))
    return silent, curve, unchanged, copy_shards(engine), texts


def whole_model(model: dict[str, Any], results, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' own, in one process, with the weights that the ranks hold together."""
    request = ModelRequest(NoSharding(), vocab_size=VOCABULARY, sequence_length=None)
    plain = build_model(CausalLMConfig(**model), request, 1).eval()
    held = assemble_tensors(GatheredShards({}, [shard for *_, shards, _ in results for shard in shards]))
    for name, parameter in plain.named_parameters():
        parameter.data = torch.from_numpy(held[name, "weight"]).view_as(parameter).to(dtype)
    return plain


@torch.no_grad()
def alone(plain: nn.Module, prompt: list[int]) -> list[int]:
    """The text that transformers writes after one prompt, without padding."""
    ids = torch.tensor([prompt])
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return plain.generate(ids, **how)[0, len(prompt) :].tolist()


@torch.no_grad()
def drawn(plain: nn.Module, prompt: list[int], settings: GenerationSettings) -> list[int]:
    """The text that transformers' warpers and a hash give after one prompt, without padding or cache."""
    warpers = [TemperatureLogitsWarper(settings.temperature or 1.0), TopKLogitsWarper(settings.top_k or 1)]
    warpers += [TopPLogitsWarper(settings.top_p), MinPLogitsWarper(settings.min_p)]
    ids = list(prompt)
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, STOPPED_AFTER))
    digest = xxhash.xxh3_128_hexdigest(struct.pack(f"<{len(prompt)}q", *prompt))
    for position in range(settings.max_new_tokens):
        scores = plain(torch.tensor([ids])).logits[:, -1].float()
        if settings.temperature == 0:
            ids.append(int(scores.argmax()))
            continue
        for warper in warpers:
            scores = warper(None, scores)
        key = f"{settings.seed} {settings.sample} {digest} {position}"
        number = xxhash.xxh3_64_intdigest(key.encode()) / 2**64
        probabilities = scores[0].double().softmax(0).tolist()
        ends = itertools.accumulate(probabilities)
        ids.append(next(id for id, end in enumerate(ends) if number < end))
    return until(ids[len(prompt) :], plain.generation_config.eos_token_id)


def until(text: list[int], end: int) -> list[int]:
    return text[: text.index(end) + 1] if end in text else text


@pytest.mark.daily("zero3", "sequence", "stages")
@pytest.mark.parametrize("name", SPLITS)
def test_every_split_writes_what_one_whole_model_writes_and_trains_on_as_if_it_had_not(ranks, name):
    if "nvme" in name and not has_async_io():
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")
    split, world_size, model = SPLITS[name]
    results = ranks(world_size).run(writing, make_recipe(model), split, timeout=900)
    plain = whole_model(model, results)
    expected = [alone(plain, prompt) for prompt in PROMPTS[0]]
    assert len({tuple(text) for text in expected}) == len(expected), "an answer to the prompt"
    for silent, curve, unchanged, _, texts in results:
        assert curve == silent
        assert unchanged, "training's random numbers, gradients or mode are others"
        assert texts["greedy"] == expected
        own = [alone(plain, prompt) for prompt in texts["prompts"]]
        few = own[:1] if texts["prompts"] == PROMPTS[0] else own
        for gather in (True, False):
            assert texts[f"own, {gather}"] == own
            assert texts[f"ended, {gather}"] == [until(text, expected[0][2]) for text in few]
        assert texts["drawn"] == [drawn(plain, prompt, DRAWN) for prompt in PROMPTS[0]]
        assert texts["drawn"] != texts["greedy"]
        check_uneven(plain, *UNEVEN[texts["prompts"] == PROMPTS[1]], *texts["uneven"])


@torch.no_grad()
def check_uneven(
    plain: nn.Module,
    prompts: list[list[int]],
    settings: list[GenerationSettings],
    texts: list[list[int]],
    seen: list[list[GeneratedToken]],
) -> None:
    """Compare texts, and the log-probabilities that the callback saw, with those of the whole model."""
    for prompt, of_prompt, text, tokens in zip(prompts, settings, texts, seen, strict=True):
        assert text == drawn(plain, prompt, of_prompt)
        assert [token.id for token in tokens] == text
        if of_prompt.num_logprobs is None:
            assert all(token.logprob is None for token in tokens)
            continue
        logprobs = plain(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for token, expected in zip(tokens, logprobs, strict=True):
            assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-5)
            values = [value for _, value in token.top]
            assert values == pytest.approx(expected.topk(of_prompt.num_logprobs).values.tolist(), abs=1e-5)


@torch.no_grad()
def regret(plain: nn.Module, prompt: list[int], text: list[int]) -> float:
    """Largest distance of a word's logit from the likeliest one's."""
    logits = plain(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
    return float((logits.amax(-1) - logits.gather(-1, torch.tensor(text)[:, None])[:, 0]).max())


@pytest.mark.nightly
@pytest.mark.parametrize("name", HALF)
def test_in_bf16_every_word_is_the_likeliest_after_its_prompt(ranks, name):
    """One row and many are multiplied by different kernels of oneDNN.

    If two words are equally likely within bf16, either is right.
    """
    results = ranks(2).run(writing, make_recipe(DROPOUT), HALF[name], timeout=900)
    plain = whole_model(DROPOUT, results, torch.bfloat16)
    for silent, curve, unchanged, _, texts in results:
        assert curve == silent
        assert unchanged, "training's random numbers, gradients or mode are others"
        assert all(texts[key] == results[0][-1][key] for key in ("greedy", "drawn"))
        own = texts["prompts"]
        end = results[0][-1]["greedy"][0][2]
        few = own[:1] if own == PROMPTS[0] else own
        asked = {"greedy": PROMPTS[0]}
        for gather in (True, False):
            asked |= {f"own, {gather}": own, f"ended, {gather}": few}
            for text in texts[f"ended, {gather}"]:
                assert end not in text[:-1]
                assert text[-1] == end or len(text) == 8
        for key, prompts in asked.items():
            # Logits have a standard deviation of 0.12; bf16 is 0.002 off.
            regrets = [regret(plain, *both) for both in zip(prompts, texts[key], strict=True)]
            assert max(regrets) < 0.01, key


def drawn_apart(job: Job):
    """Tokens that both ranks of a tensor group sample if the second one has other logits."""
    engine = Run(job, make_recipe(LLAMA), zero(1) | TENSOR_2).engine
    head = engine.module.lm_head
    expected = engine.generate(PROMPTS[0], DRAWN)
    head.register_forward_hook(lambda *called: called[-1].flip(-1) if job.ranks.rank else called[-1])
    return expected, engine.generate(PROMPTS[0], DRAWN)


def test_a_tensor_group_goes_by_its_first_ranks_logits(ranks):
    for expected, written in ranks(2).run(drawn_apart):
        assert written == expected


def alone_engine(**model: Any) -> Engine:
    return Run(ALONE, make_recipe(LLAMA | model), {"torch": {"parallel": "single"}}).engine


def test_one_process_writes_what_transformers_writes_and_stops_at_an_end():
    engine = alone_engine()
    expected = alone(engine.module.eval(), PROMPTS[0][0])
    engine.module.generation_config.eos_token_id = [255, expected[3]]
    (short,) = engine.generate([PROMPTS[0][0]], GREEDY)
    assert short == expected[: expected.index(expected[3]) + 1]
    with_another = engine.generate(PROMPTS[0], GREEDY)
    assert with_another[0] == short, "what stands behind the end is not written"


@pytest.mark.parametrize(
    ("prompts", "changes", "error", "words"),
    [
        ([], {}, DataError, "prompts is empty"),
        ([[1], []], {}, DataError, r"prompts\[1\] is empty"),
        ([[1, VOCABULARY]], {}, DataError, f"ids from 1 to {VOCABULARY}"),
        ([[-1]], {}, DataError, "ids from -1"),
        ([[1] * 20], {}, ModelError, "20 tokens and max_new_tokens is 8, but the model has 24"),
        ([[1]], {"max_new_tokens": 0}, DataError, "max_new_tokens is 0"),
        ([[1]], {"temperature": -1.0}, DataError, "temperature is -1.0"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(prompts, changes, error, words):
    engine = alone_engine()
    with pytest.raises(error, match=words) as caught:
        engine.generate(prompts, GenerationSettings(**{"max_new_tokens": 8, **changes}))
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_write_says_so():
    engine = alone_engine()
    engine.module.__class__ = nn.Module  # any that has no `generate`
    with pytest.raises(ModelError, match="has no method `generate`"):
        engine.generate([[1]], GREEDY)


def test_a_generate_on_top_of_transformers_is_kept_in_step_too():
    """The signature does not matter: a rank that ended alone would leave the others waiting."""
    model = build_model(CausalLMConfig(**LLAMA), ModelRequest(NoSharding(), vocab_size=VOCABULARY), 0)
    inner = model.generate
    given = {}

    def on_top(**how):
        given.update(how)
        return inner(**(how | {"synced_gpus": False}))

    model.generate = on_top
    (written,) = generate(model, [[5, 6]], GREEDY, torch.device("cpu"), is_forward_collective=True)
    assert given["synced_gpus"] is True
    assert len(written) == 8
