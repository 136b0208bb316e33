"""Windows, capped scores, sinks and dropout: exact, and with nothing of T x T elements."""

from __future__ import annotations

import pytest
import torch
from test_document_attention import Largest, heads, oracle, positions_of
from test_packed_attention import each_alone, gradients, make, packed_rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.models import document_attention
from pipeline.models.activation_checkpointing import enable_activation_checkpointing
from pipeline.models.document_attention import (
    ATTENTION_NAME,
    BOUNDS_KEY,
    DocumentAttention,
    find_document_bounds,
)

pytestmark = pytest.mark.slow

ROWS = {"documents": ([5, 1, 30, 3, 9], [16, 17, 15]), "whole rows": ([48], [48])}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
ASKED = {
    "window": {"sliding_window": 7},
    "one token": {"sliding_window": 1},
    "softcap": {"softcap": 0.7},
    "sinks": {"s_aux": SINKS},
    "all": {"sliding_window": 20, "softcap": 0.7, "s_aux": SINKS},
}
MODELS = {
    "mistral": {"sliding_window": 4},
    "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "num_hidden_layers": 6},
    "gpt_oss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 2},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """So that short rows are several."""
    monkeypatch.setattr(document_attention, "QUERIES_PER_BLOCK", 8)


def make_windowed(architecture: str, attention: str | None = "auto"):
    more = MODELS.get(architecture, {})
    return make(architecture, attention, num_key_value_heads=2, pad_token_id=0, **more)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_outputs_and_gradients_are_the_definitions(rows, asked, groups):
    positions = positions_of(rows)
    given = {BOUNDS_KEY: find_document_bounds(positions)} if len(rows[0]) > 1 else {}
    ours = heads(*positions.shape, groups, torch.float32)
    exact = heads(*positions.shape, groups, torch.float64)
    asked_exactly = dict(asked)
    if "s_aux" in asked:
        ours.append(SINKS.clone().requires_grad_())
        exact.append(SINKS.double().requires_grad_())
        asked, asked_exactly = asked | {"s_aux": ours[-1]}, asked | {"s_aux": exact[-1]}
    output, _ = DocumentAttention()(nn.Identity(), *ours[:3], None, **given, **asked)
    expected = oracle(*exact[:3], positions, **asked_exactly)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    found = torch.autograd.grad((output * weights).sum(), ours)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_backward_drops_what_forward_dropped():
    """The output is linear in the values, so they times their gradients are the output."""
    query, key, value = heads(2, 48, 2, torch.float32)
    torch.manual_seed(3)
    output, _ = DocumentAttention()(nn.Identity(), query, key, value, None, dropout=0.5)
    after = torch.rand(1)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (of_value,) = torch.autograd.grad((output * weights).sum(), value)
    torch.testing.assert_close((of_value * value).sum(), (output * weights).sum(), rtol=1e-4, atol=1e-4)
    torch.manual_seed(3)
    again, _ = DocumentAttention()(nn.Identity(), query, key, value, None, dropout=0.5)
    assert torch.equal(again, output)
    assert torch.equal(torch.rand(1), after), "backward moved the run's random numbers"
    kept, _ = DocumentAttention()(nn.Identity(), query, key, value, None)
    assert not torch.allclose(kept, output)


@pytest.mark.parametrize("size", [200, 10_000])
@pytest.mark.parametrize(
    "asked",
    [{"sliding_window": 50}, {"sliding_window": 300}, {"softcap": 5.0}, {"s_aux": SINKS}, {"dropout": 0.1}],
    ids=str,
)
def test_memory_grows_with_the_row_and_not_with_its_square(asked, size, monkeypatch):
    monkeypatch.setattr(document_attention, "QUERIES_PER_BLOCK", 32)
    found = []
    for length in (512, 1024):
        positions = (torch.arange(length) % size)[None]
        with Largest() as largest:
            inputs = heads(1, length, 2, torch.float32)
            output, _ = DocumentAttention()(nn.Identity(), *inputs, None, position_ids=positions, **asked)
            output.sum().backward()
        found.append(largest.elements)
    assert found[1] <= 2 * found[0]
    assert found[1] <= 4 * 32 * (1024 + 1)


def test_keys_and_values_of_two_widths_make_no_square_either():
    """Heads as in multi-head latent attention, for which torch's kernel on a CPU makes all scores."""
    query, key, _ = heads(1, 1024, 2, torch.float32)
    value = torch.randn(1, 2, 1024, 6, requires_grad=True)
    with Largest() as largest:
        output, _ = DocumentAttention()(nn.Identity(), query, key, value, None)
        output.sum().backward()
    assert largest.elements <= 4 * document_attention.QUERIES_PER_BLOCK * 1024
    expected = oracle(*(each.double() for each in (query, key, value)), torch.arange(1024)[None])
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_and_gradients_are_those_of_transformers_eager(architecture, is_packed):
    """Results of each document alone: in one row transformers' gpt_oss lets them see each other."""
    ids, positions = packed_rows()
    ours = make_windowed(architecture).train()
    theirs = make_windowed(architecture, "eager").train()
    if is_packed:
        found = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
        expected = each_alone(theirs, ids)
    else:
        found, expected = (model(input_ids=ids, use_cache=False).logits for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(ours, found), gradients(theirs, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_recomputed_is_what_was_computed(architecture, mode):
    ids, positions = packed_rows()
    found = []
    for is_recomputed in (False, True):
        model = make_windowed(architecture).train()
        if is_recomputed:
            enable_activation_checkpointing(model, mode)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        found.append(gradients(model, logits))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss"])
def test_generation_and_padding_are_transformers_own(architecture):
    """The windows are shorter than the prompt."""
    ours = make_windowed(architecture).eval()
    theirs = make_windowed(architecture, None).eval()
    ids = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **how), theirs.generate(ids, **how))
    with torch.no_grad():
        assert torch.equal(
            ours(input_ids=ids, attention_mask=mask).logits[1, 4:],
            theirs(input_ids=ids, attention_mask=mask).logits[1, 4:],
        )
    assert ours.config._attn_implementation == ATTENTION_NAME, "a look at a mask is for that call alone"


class Calls(TorchDispatchMode):
    """Names of the operators that ran, and the arguments of one."""

    def __init__(self, of: str):
        super().__init__()
        self.of = of
        self.names = []
        self.arguments = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        if self.of in str(function):
            self.arguments = args
        return function(*args, **(kwargs or {}))


def on_a_gpu(dtype: torch.dtype, width: int = 8, **asked) -> Calls:
    """The kernels that a layer calls on a GPU, by torch's own declarations: there is no device."""
    inputs = [
        torch.empty(2, 16, number, width, device="meta", dtype=dtype).transpose(1, 2).requires_grad_()
        for number in (4, 2, 2)
    ]
    attention = DocumentAttention()
    attention._generation = 9
    bounds = asked.pop(BOUNDS_KEY, torch.empty(9, device="meta", dtype=torch.int32))
    with Calls("_varlen_attn.") as calls:
        output, _ = attention(nn.Identity(), *inputs, None, **{BOUNDS_KEY: bounds}, **asked)
        output.float().sum().backward()
    assert output.shape == (2, 16, 4, width)
    assert all(each.grad.shape == each.shape for each in inputs)
    return calls


NO_BOUNDS = torch.empty(0, device="meta", dtype=torch.int32)


@pytest.mark.parametrize("more", [{}, {BOUNDS_KEY: NO_BOUNDS}], ids=["packed", "whole rows"])
def test_flash_attention_of_a_gpu_is_given_the_window(more):
    calls = on_a_gpu(torch.bfloat16, sliding_window=5, **more)
    assert calls.arguments is not None
    window = [each for each in calls.arguments if isinstance(each, list)]
    assert window == [[4, 0]], "those 4 before it, and the token itself"
    assert not any("scaled_dot_product" in name for name in calls.names)


@pytest.mark.parametrize(
    ("dtype", "width", "asked", "kernel"),
    [
        (torch.bfloat16, 8, {"sliding_window": 16}, "_varlen_attn."),  # no longer than the row
        (torch.float32, 8, {}, "_efficient_attention_forward"),
        (torch.bfloat16, 8, {"dropout": 0.1}, "_efficient_attention_forward"),
        (torch.bfloat16, 264, {}, "_efficient_attention_forward"),
        (torch.bfloat16, 20, {}, "aten._safe_softmax."),
        (torch.float32, 8, {"sliding_window": 5}, "aten._safe_softmax."),
        (torch.bfloat16, 8, {"softcap": 2.0}, "aten.tanh."),
        (torch.bfloat16, 8, {"s_aux": SINKS.to("meta")}, "aten._softmax."),
    ],
)
def test_every_branch_of_a_gpu_is_taken_by_what_needs_it(dtype, width, asked, kernel):
    names = on_a_gpu(dtype, width, **asked).names
    assert any(kernel in name for name in names)
    kernels = ("_varlen_attn.", "_efficient_attention_forward", "aten._safe_softmax.")
    assert sum(any(each in name for name in names) for each in kernels) == (kernel in kernels)
