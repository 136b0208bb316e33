"""Attention by document: exact, without anything of T x T elements, and only where a model asks no more."""

from __future__ import annotations

import logging

import pytest
import torch
from test_packed_attention import make
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.models.attention import choose_attention
from pipeline.models.document_attention import (
    BOUNDS_KEY,
    QUERIES_PER_BLOCK,
    DocumentAttention,
    find_document_bounds,
)

CPU = torch.device("cpu")
ROWS = {
    "uneven": ([5, 1, 70, 3, 40, 1, 80], [64, 65, 71]),
    "tokens": ([1] * 40, [39, 1]),
    "one is the row": ([200], [199, 1]),
    "whole rows": ([50], [50]),
    "short rows": ([3, 4], [7], [1, 6]),
}


def positions_of(rows) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def heads(rows: int, length: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as a model has them: a view of (B, T, heads, width)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, length, number, 8) for number in (4, groups, groups)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [each.transpose(1, 2).requires_grad_() for each in drawn]


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    sliding_window: int = 1 << 20,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention by its definition, in fp64 and with a mask of (B, T, T)."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    document = (positions == 0).cumsum(1)
    place = torch.arange(positions.shape[1])
    is_seen = (document[:, :, None] == document[:, None]).tril()
    is_seen = is_seen & (place[:, None] - place < sliding_window)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.exp() * is_seen[:, None]
    total = weights.sum(-1, keepdim=True) + (0 if s_aux is None else s_aux.exp().view(-1, 1, 1))
    return ((weights / total) @ value).transpose(1, 2)


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_outputs_and_gradients_are_the_definitions(rows, groups, is_told):
    positions = positions_of(rows)
    given = {"position_ids": positions} | ({BOUNDS_KEY: find_document_bounds(positions)} if is_told else {})
    ours = heads(*positions.shape, groups, torch.float32)
    exact = heads(*positions.shape, groups, torch.float64)
    output, _ = DocumentAttention()(nn.Identity(), *ours, None, **given)
    expected = oracle(*exact, positions)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    gradients = torch.autograd.grad((output * weights).sum(), ours)
    for found, wanted in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_bounds_have_few_sizes_and_say_where_documents_begin():
    rows = ([3, 2], [1, 4])
    assert find_document_bounds(positions_of(rows)).tolist() == [0, 3, 5, 6, 10]
    sizes = {len(find_document_bounds(positions_of([[n, 2048 - n]]))) for n in range(1, 2048, 100)}
    assert sizes == {2048 // 256 + 1}, "another number of documents would be compiled for"


class Peak(TorchDispatchMode):
    """Largest number of bytes that operators' results had at once."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.bytes = max(self.bytes, sum(size for _, size in self._storages.values()))
        return result


@pytest.mark.parametrize("s_aux", [None, torch.zeros(4)], ids=["plain", "sinks"])
def test_dropout_needs_no_more_memory_than_the_scores_before_it(s_aux):
    query, key, value = (each.detach() for each in heads(1, 2048, 4, torch.float32))
    peaks = []
    for dropout in (0.0, 0.1):
        with Peak() as peak:
            arguments = {"dropout": dropout, "softcap": 5.0, "s_aux": s_aux}
            DocumentAttention()(nn.Identity(), query, key, value, None, **arguments)
        peaks.append(peak.bytes)
    of_block = 4 * QUERIES_PER_BLOCK * 2048 * 4
    assert peaks[1] < peaks[0] + of_block / 2


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator gave."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.slow
@pytest.mark.parametrize("size", [20, 300, 10_000])
def test_memory_grows_with_the_row_and_not_with_its_square(size):
    found = []
    for length in (1024, 2048):
        positions = (torch.arange(length) % size)[None]
        with Largest() as largest:
            inputs = heads(1, length, 2, torch.float32)
            output, _ = DocumentAttention()(nn.Identity(), *inputs, None, position_ids=positions)
            output.sum().backward()
        found.append(largest.elements)
        assert largest.elements <= length * 4 * 8
    assert found[1] == 2 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "mixtral", "gpt_neox", "biogpt"])
def test_models_of_plain_attention_are_served(architecture, caplog):
    with caplog.at_level(logging.DEBUG):
        make(architecture, num_key_value_heads=4)
    assert "attention: by document" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "fields", "why"),
    [
        ("zaya", {}, "layers of hybrid"),
        ("bart", {}, "changes the model's logits"),
        ("bloom", {}, "computes attention itself"),
        ("llama4_text", {"head_dim": 8, "num_local_experts": 2}, "layers of chunked_attention"),
    ],
)
def test_models_that_ask_more_keep_transformers_attention(architecture, fields, why, caplog):
    model = make(architecture, None, **({"num_key_value_heads": 4, "pad_token_id": 0} | fields))
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO):
        choose_attention(model, True, CPU)
    assert model.config._attn_implementation == before
    assert f"attention: transformers' {before}, since " in caplog.text
    assert why in caplog.text


@pytest.mark.slow
def test_training_on_padded_rows_computes_again_what_it_computed(caplog):
    """The mask of a forward is known no more when its backward computes the block again."""
    ids = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    gradients = []
    for attention in ("auto", "sdpa"):
        model = make("llama", attention).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with caplog.at_level(logging.INFO):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        (logits.sin() * mask[..., None]).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert caplog.text.count("batches have an attention_mask") == 1


@pytest.mark.slow
def test_the_trial_has_a_window_that_shows(monkeypatch, caplog):
    """The model's own is longer than the trial's documents."""
    attend = DocumentAttention.__call__

    def without(*given, sliding_window, **rest):
        return attend(*given, **rest)

    monkeypatch.setattr(DocumentAttention, "__call__", without)
    with caplog.at_level(logging.INFO):
        choose_attention(make("mistral", None, sliding_window=4096, num_key_value_heads=4), True, CPU)
    assert "attention by document changes the model's logits" in caplog.text
