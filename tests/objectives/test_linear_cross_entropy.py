"""The loss without logits: value and gradients against torch's own on logits, and which models' it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.data.batches import IGNORE_INDEX
from pipeline.errors import DataError
from pipeline.objectives import CausalLM
from pipeline.objectives import linear_cross_entropy as linear
from pipeline.objectives.cross_entropies import cross_entropy_sum
from pipeline.objectives.linear_cross_entropy import (
    OutputHeads,
    compute_loss_in_head,
    linear_cross_entropy_sum,
)
from pipeline.planner import model as chunks

WIDTH = 12
# Products are rounded to their dtype; sums over chunks are not.
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
WORDS = 97


def make(tokens, words, dtype, seed=0, ignored=0.0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = (spread * torch.randn(words, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
    bias = torch.randn(words, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, words, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORE_INDEX
    return hidden, weight, bias, labels


def reference(parts, labels, scale):
    """Loss and gradients in fp64."""
    leaves = [None if part is None else part.detach().double().requires_grad_() for part in parts]
    total = F.cross_entropy(F.linear(*leaves), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    (total * scale).backward()
    return total.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


def compare(hidden, weight, bias, labels, dtype=None, scale=1.0):
    leaves = [None if part is None else part.detach().requires_grad_() for part in (hidden, weight, bias)]
    total = linear_cross_entropy_sum(*leaves, labels, dtype or hidden.dtype)
    (total * scale).backward()
    expected, gradients = reference((hidden, weight, bias), labels, scale)
    rounding = ROUNDING[dtype or hidden.dtype]
    assert total.shape == ()
    assert total.dtype == torch.promote_types(hidden.dtype, torch.float32)
    torch.testing.assert_close(total.double(), expected, rtol=rounding, atol=rounding)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if leaf is None:
            continue
        assert leaf.grad.dtype == leaf.dtype
        # A sum over tokens may cancel; each of its terms is rounded to fp32.
        cancelled = torch.finfo(torch.float32).eps * scale * int((labels != IGNORE_INDEX).sum())
        bound = rounding * (gradient.norm() + scale * 1e-9) + cancelled
        assert (leaf.grad.double() - gradient).norm() <= bound
    assert not leaves[0].grad[labels == IGNORE_INDEX].any()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40),
    words=st.integers(1, 70),
    dtype=st.sampled_from(list(ROUNDING)),
    with_bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    spread=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1000),
)
def test_it_equals_torchs_own(tokens, words, dtype, with_bias, ignored, spread, seed):
    hidden, weight, bias, labels = make(tokens, words, dtype, seed, ignored, spread)
    compare(hidden, weight, bias if with_bias else None, labels, scale=0.37)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("tokens", [15, 16, 17, 50])
def test_it_equals_torchs_own_over_several_chunks_and_blocks(monkeypatch, dtype, tokens):
    monkeypatch.setattr(chunks, "CPU_LOGITS_CHUNK", (16 * 70 * dtype.itemsize, 1))
    monkeypatch.setattr(chunks, "CPU_SOFTMAX_ELEMENTS", 3 * 70)
    compare(*make(tokens, 70, dtype, ignored=0.2), scale=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("words", [1, 97, 128])
def test_words_that_fill_up_a_layer_are_nobodys(monkeypatch, dtype, words):
    """Widths are filled up as on a GPU."""
    monkeypatch.setitem(chunks.VOCABULARY_MULTIPLES, "cpu", 64)
    monkeypatch.setattr(chunks, "CPU_LOGITS_CHUNK", (8 * words * dtype.itemsize, 1))
    compare(*make(20, words, dtype, ignored=0.2))


def test_products_in_bf16_give_gradients_of_fp32_parameters_as_under_autocast():
    compare(*make(30, 50, torch.float32), dtype=torch.bfloat16)


def test_what_needs_no_gradient_gets_none():
    hidden, weight, _, labels = make(6, 20, torch.float32)
    weight.requires_grad_()
    linear_cross_entropy_sum(hidden, weight, None, labels, torch.float32).backward()
    assert hidden.grad is None
    assert weight.grad is not None


def test_small_probabilities_and_sums_over_many_tokens_are_within_fp16():
    hidden, weight, _, labels = make(300, 50, torch.float16, spread=0.0)
    hidden[:, 0], weight[5, 0], labels[:] = 1.0, 14.0, 5  # the others' are 8e-7
    expected = reference((hidden, weight, None), labels, 1000.0)[1][1]
    weight.requires_grad_()
    (linear_cross_entropy_sum(hidden, weight, None, labels, torch.float16) * 1000.0).backward()
    torch.testing.assert_close(weight.grad.double(), expected, rtol=2e-3, atol=1e-5)
    labels[:] = 6  # a gradient of 300 times FP16_SCALE
    compare(hidden, weight, None, labels)


@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_what_a_loss_scale_makes_too_large_for_fp16_is_infinite_as_it_is_for_logits(scale):
    parts = make(30, 50, torch.float16)
    found, expected = ([part.detach().requires_grad_() for part in parts[:2]] for _ in range(2))
    (linear_cross_entropy_sum(*found, None, parts[3], torch.float16) * scale).backward()
    (cross_entropy_sum(F.linear(*expected), parts[3]) * scale).backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad.isfinite().all() == theirs.grad.isfinite().all() == (scale == 1.0)


@pytest.mark.parametrize("logit", [1e4, float("nan"), float("inf")])
def test_a_large_logit_is_exact_and_one_that_is_no_number_reaches_the_loss(logit):
    hidden, weight, _, labels = make(6, 20, torch.float32)
    hidden[:, 0], weight[:, 0] = 1.0, 0.0
    weight[3, 0], labels[:] = logit, 5
    total = linear_cross_entropy_sum(hidden, weight, None, labels, torch.float32)
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(total, expected, equal_nan=True)


@pytest.mark.slow
def test_besides_the_gradients_only_a_chunk_of_logits_and_pieces_are_allocated(monkeypatch, tmp_path):
    tokens = 192
    words = 1 << 15
    mib = 1 << 20
    monkeypatch.setattr(chunks, "CPU_LOGITS_CHUNK", (64 * words * 2, 1))
    monkeypatch.setattr(chunks, "CPU_SOFTMAX_ELEMENTS", words)
    monkeypatch.setattr(linear, "CPU_GRADIENT_ELEMENTS", 1 << 12)
    hidden = torch.randn(tokens, 32).bfloat16()
    weight = torch.randn(words, 32).bfloat16()
    labels = torch.randint(0, words, (tokens,))
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as seen:
        linear_cross_entropy_sum(hidden, weight.requires_grad_(), None, labels, torch.bfloat16)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = 0
    most = 0
    for event in events:
        if event.get("name") == "[memory]":
            held += event["args"]["Bytes"]
            most = max(most, held)
    # 4 MiB each; an fp32 copy would be 8 or 4
    chunk = 64 * words * 2 / mib
    gradient = words * 32 * 4 / mib
    packed = words * 32 * 2 / mib  # the weights as AMX multiplies them: oneDNN's own, on CPUs that have it
    assert chunk + gradient <= most / mib <= chunk + gradient + packed + 1


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient():
    hidden, weight, _, labels = make(6, 20, torch.float32)
    total = linear_cross_entropy_sum(hidden.requires_grad_(), weight, None, labels, torch.float32)
    (2 * total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * total).backward()


# --- Models ------------------------------------------------------------------------------------------


def small(kind: str, **more: Any):
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes |= {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    sizes |= {"n_embd": 32, "n_layer": 1, "n_head": 2}
    known = AutoConfig.for_model(kind)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{k: v for k, v in sizes.items() if hasattr(known, k)} | more)
    return AutoModelForCausalLM.from_config(config).eval()  # without dropout


@pytest.fixture(scope="module")
def llama():
    return small("llama")


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, WORDS, (2, 3, 10), generator=generator)
    labels[torch.rand(3, 10, generator=generator) < 0.5] = IGNORE_INDEX
    return {"input_ids": ids, "shift_labels": labels}


PLAIN = ("llama", "qwen2", "phi", "gpt2", "gemma", "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_models_gradients_are_those_of_its_logits(kind):
    model = small(kind)
    batch = tokens()
    assert OutputHeads().find(model) is model.get_output_embeddings()
    CausalLM()(model, batch).loss_sum.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=batch["input_ids"]).logits
    F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)


SCALED = {
    "cohere": {"logit_scale": 0.5},
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALED)
def test_a_model_that_changes_its_logits_keeps_them(kind):
    model = small(kind, **SCALED[kind])
    batch = tokens()
    assert OutputHeads().find(model) is None
    logits = model(input_ids=batch["input_ids"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    torch.testing.assert_close(CausalLM()(model, batch).loss_sum, expected)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        return self.inner(input_ids=input_ids)


@pytest.mark.slow
def test_other_models_keep_their_logits(llama):
    others = (Wrapped(llama), lambda **_: None, torch.compile(llama), nn.DataParallel(llama))
    assert [OutputHeads().find(other) for other in others] == [None] * 4


def test_a_model_without_an_output_layer_of_its_class_keeps_its_logits(llama, monkeypatch):
    batch = tokens()
    expected = CausalLM()(llama, batch).loss_sum
    monkeypatch.setattr(llama, "get_output_embeddings", lambda: None)
    assert OutputHeads().find(llama) is None
    torch.testing.assert_close(CausalLM()(llama, batch).loss_sum, expected)


@pytest.mark.slow
def test_a_model_is_compiled_whole_with_its_logits():
    model = small("llama")
    model.compile()
    assert OutputHeads().find(model) is None


def test_the_model_is_left_as_it_was(llama):
    batch = tokens()
    before = dict(llama._modules)
    CausalLM()(llama, batch)
    assert dict(llama._modules) == before
    assert llama(input_ids=batch["input_ids"]).logits.shape == (3, 10, WORDS)
    with pytest.raises(ZeroDivisionError), compute_loss_in_head(llama.lm_head, batch["shift_labels"]):
        raise ZeroDivisionError
    assert "forward" not in vars(llama.lm_head)


def test_a_label_beyond_the_vocabulary_is_told_before_the_model_runs(llama):
    batch = tokens()
    batch["shift_labels"][1, 2] = WORDS
    with pytest.raises(DataError, match=f"has {WORDS}, but the model has {WORDS} outputs"):
        CausalLM()(llama, batch)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [True, False])
def test_no_tensor_of_all_logits_is_made(monkeypatch, is_training):
    monkeypatch.setattr(chunks, "CPU_LOGITS_CHUNK", (8 * 1000 * 4, 1))
    model = small("llama", vocab_size=1000)
    batch = {key: value.repeat(40, 1) for key, value in tokens().items()}  # 1,200 of them
    with Largest() as largest, torch.set_grad_enabled(is_training):
        loss = CausalLM()(model, batch).loss_sum
        if is_training:
            loss.backward()
    assert largest.elements < 1200 * 1000 / 4
