"""Attention on a CPU in bf16: computed in fp32, kept in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_document_attention import heads
from torch import Tensor, nn

from pipeline.models.document_attention import (
    BOUNDS_KEY,
    DocumentAttention,
    ScoreOptions,
    attend_in_blocks,
    build_empty_bounds,
    find_document_bounds,
)

pytestmark = pytest.mark.slow


def whole_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bounds = {BOUNDS_KEY: build_empty_bounds(query.device)}
    return DocumentAttention()(nn.Identity(), query, key, value, None, **bounds)[0].transpose(1, 2)


def short_documents(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Inputs of ten tokens."""
    positions = (torch.arange(query.shape[2]) % 10).expand(len(query), -1)
    bounds = {BOUNDS_KEY: find_document_bounds(positions)}
    return DocumentAttention()(nn.Identity(), query, key, value, None, **bounds)[0].transpose(1, 2)


def in_window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_in_blocks((query, key, value), None, ScoreOptions(window=7)).transpose(1, 2)


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_in_blocks((query, key, value), None, ScoreOptions(softcap=2.0)).transpose(1, 2)


WAYS = pytest.mark.parametrize("attend", [whole_rows, short_documents, in_window, capped])


@WAYS
@pytest.mark.parametrize("groups", [4, 2])
def test_it_is_fp32_attention_rounded_once(attend, groups):
    narrow = heads(2, 300, groups, torch.bfloat16)
    wide = [each.detach().float().requires_grad_() for each in narrow]
    output = attend(*narrow)
    expected = attend(*wide)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected.bfloat16())
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected).bfloat16()
    gradients = torch.autograd.grad(output, narrow, weights)
    exact = torch.autograd.grad(expected, wide, weights.float())
    # The backward knows the rounded output alone.
    for found, wanted in zip(gradients, exact, strict=True):
        assert (found - wanted).norm() < torch.finfo(torch.bfloat16).eps * wanted.norm()


@WAYS
def test_autocast_says_what_it_is_rounded_to(attend):
    wide = heads(1, 50, 4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(*wide)
    assert torch.equal(output, attend(*(each.bfloat16() for each in wide)))


@pytest.mark.parametrize("attend", [whole_rows, in_window])
def test_no_fp32_copy_is_kept_for_backward(attend):
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    query, key, value = heads(2, 300, 4, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(query, key, value)
    rows = 4 * query[..., 0].numel()  # the logarithm of the sum of exponentials, of first keys
    assert sum(kept.values()) <= 4 * query.numel() * query.element_size() + rows


def test_dropout_and_other_widths_go_through_torchs_function():
    query, key, value = heads(1, 20, 4, torch.bfloat16)
    wider = torch.cat([value, value], -1)
    expected = F.scaled_dot_product_attention(query, key, wider, is_causal=True)
    torch.testing.assert_close(whole_rows(query, key, wider), expected)
    attention = DocumentAttention()
    dropped, _ = attention(
        nn.Identity(), query, key, value, None, 0.5, cu_seq_lens_q=build_empty_bounds(query.device)
    )
    assert dropped.shape == (1, 20, 4, 8)
    assert not torch.equal(dropped.transpose(1, 2), whole_rows(query, key, value))
