"""The loss of each token without logits, against torch's on logits: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from objectives.test_linear_cross_entropy import ROUNDING, make

from pipeline.data.batches import IGNORE_INDEX
from pipeline.objectives.linear_cross_entropy import linear_token_losses
from pipeline.objectives.logits_cross_entropy import cross_entropy_per_token
from pipeline.planner import model as chunks

pytestmark = pytest.mark.slow


def leaves_of(*parts):
    return [part.detach().clone().requires_grad_() for part in parts]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("filled", [1, 64], ids=["as it is", "filled up"])
def test_it_equals_torchs_own(monkeypatch, dtype, ignored, filled):
    monkeypatch.setattr(chunks, "CPU_LOGITS_CHUNK", (16 * 70 * dtype.itemsize, 1))
    monkeypatch.setattr(chunks, "CPU_SOFTMAX_ELEMENTS", 3 * 70)
    monkeypatch.setitem(chunks.VOCABULARY_MULTIPLES, "cpu", filled)
    *parts, labels = make(50, 70, dtype, ignored=ignored)
    incoming = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = leaves_of(*parts)
    expected = leaves_of(*(part.double() for part in parts))
    losses = linear_token_losses(*found, labels, dtype)
    own = F.cross_entropy(F.linear(*expected), labels, ignore_index=IGNORE_INDEX, reduction="none")
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(losses.double(), own, rtol=rounding, atol=rounding)
    (losses * incoming).sum().backward()
    (own * incoming).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad.dtype == ours.dtype
        assert (ours.grad.double() - theirs.grad).norm() <= 2 * rounding * theirs.grad.norm() + 1e-9


def test_a_layer_that_is_not_trained_costs_no_product():
    hidden, weight, _, labels = make(6, 20, torch.float32)
    losses = linear_token_losses(hidden.requires_grad_(), weight, None, labels, torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        losses.sum().backward()
    assert weight.grad is None
    products = [event for event in seen.events() if event.name in ("aten::mm", "aten::addmm", "aten::addmm_")]
    assert len(products) == 2  # the logits once more, and the hidden states' gradient


def test_those_of_logits_take_any_incoming_gradient():
    hidden, weight, _, labels = make(30, 50, torch.float32, ignored=0.2)
    incoming = torch.randn(30)
    found = leaves_of(hidden @ weight.t())
    expected = leaves_of(hidden @ weight.t())
    (cross_entropy_per_token(found[0], labels) * incoming).sum().backward()
    own = F.cross_entropy(expected[0], labels, ignore_index=IGNORE_INDEX, reduction="none")
    (own * incoming).sum().backward()
    torch.testing.assert_close(found[0].grad, expected[0].grad)
