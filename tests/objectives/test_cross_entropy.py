"""The blockwise cross entropy against torch's own in fp32, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.batches import IGNORE_INDEX
from pipeline.objectives.logits_cross_entropy import cross_entropy_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A gradient is rounded once to the dtype of the logits.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def reference(logits, labels, scale):
    """Value and gradient of `F.cross_entropy` on an fp32 copy."""
    leaf = logits.detach().float().requires_grad_()
    total = F.cross_entropy(leaf, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    (total * scale).backward()
    return total.detach(), leaf.grad


def compare(logits, labels, scale=1.0):
    leaf = logits.detach().requires_grad_()
    total = cross_entropy_sum(leaf, labels)
    (total * scale).backward()
    expected, gradient = reference(logits, labels, scale)
    assert total.dtype == torch.float32
    assert total.shape == ()
    assert leaf.grad.dtype == logits.dtype
    # fp32 sums over rows in another order.
    torch.testing.assert_close(total.detach(), expected, rtol=1e-5, atol=1e-5)
    tolerance = ROUNDING[logits.dtype]
    smallest = torch.finfo(logits.dtype).tiny
    torch.testing.assert_close(
        leaf.grad.float(), gradient, rtol=tolerance, atol=tolerance * 1e-2 * scale + smallest
    )
    assert torch.equal(leaf.grad[labels == IGNORE_INDEX], torch.zeros_like(leaf.grad[labels == IGNORE_INDEX]))


def make(rows, classes, dtype, seed, ignored=0.0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(rows, classes, generator=generator)).to(dtype)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORE_INDEX
    return logits, labels


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    spread=st.sampled_from([0.0, 3.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_it_equals_torchs_own(rows, classes, dtype, ignored, spread, seed):
    compare(*make(rows, classes, dtype, seed, ignored, spread))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 261, 262, 263, 600])
def test_it_equals_torchs_own_over_several_blocks(dtype, rows):
    compare(*make(rows, 1000, dtype, seed=rows, ignored=0.2), scale=0.37)


@pytest.mark.slow
def test_it_equals_torchs_own_with_a_row_larger_than_a_block():
    compare(*make(3, 300_000, torch.float32, seed=0), scale=1e-3)


def test_it_leaves_logits_and_labels_alone():
    logits, labels = make(12, 33, torch.float32, seed=3, ignored=0.5)
    before = logits.clone(), labels.clone()
    compare(logits, labels)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_reaches_the_loss(logit):
    logits, labels = make(4, 6, torch.float32, seed=0)
    logits[2, 3] = logit
    assert not cross_entropy_sum(logits, labels).isfinite()


def test_a_view_is_as_good_as_a_copy():
    logits, labels = make(12, 33, torch.float32, seed=3)
    wide = torch.cat([logits, logits], dim=1)
    compare(wide[:, :33], labels)
    compare(logits.t().contiguous().t(), labels)


def test_a_label_outside_the_classes_is_an_error():
    logits, labels = make(4, 6, torch.float32, seed=0)
    labels[1] = 6
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy_sum(logits, labels)
