"""The loss on a GPU, without logits and of them: value, gradients, memory, and no host sync."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from pipeline.objectives import VocabularyPart
from pipeline.objectives import linear_cross_entropy as linear
from pipeline.objectives.logits_cross_entropy import FusedKernels, cross_entropy_sum
from pipeline.planner import model as chunks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


# As under tensor parallelism, but that there is no other rank.
ALONE = VocabularyPart(0, 1000, lambda tensor: tensor[None], lambda tensor: tensor)


@pytest.mark.parametrize(
    ("part", "is_fused"), [(None, False), (None, True), (ALONE, False)], ids=["whole", "fused", "part"]
)
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)]
)
def test_it_equals_torchs_own_without_a_sync(dtype, rounding, part, is_fused):
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(300, 64, **make).to(dtype).requires_grad_()
    weight = torch.randn(1000, 64, **make).to(dtype).requires_grad_()
    labels = torch.randint(0, 1000, (300,), **make)
    labels[::3] = -100
    kernels = FusedKernels() if is_fused else None
    with (
        patch.object(chunks, "GPU_LOGITS_CHUNK", (128 * 1000 * dtype.itemsize, 1)),
        patch.object(chunks, "GPU_SOFTMAX_ELEMENTS", 50 * 1000),
    ):
        if kernels is not None:  # compiled before the look for syncs
            linear.linear_cross_entropy_sum(hidden, weight, None, labels, dtype, part, kernels)
        torch.cuda.set_sync_debug_mode("error")
        try:
            total = linear.linear_cross_entropy_sum(hidden, weight, None, labels, dtype, part, kernels)
            (total * 1e-2).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert kernels is None or kernels.is_compiled
    leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*leaves), labels, reduction="sum")
    (expected * 1e-2).backward()
    torch.testing.assert_close(total.double(), expected.detach(), rtol=rounding, atol=0)
    for leaf, reference in zip((hidden, weight), leaves, strict=True):
        assert (leaf.grad.double() - reference.grad).norm() < rounding * reference.grad.norm()


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)]
)
def test_compiled_kernels_of_logits_make_their_gradient_alone_without_a_sync(dtype, rounding, caplog):
    kernels = FusedKernels()
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda"}
    for tokens in (300, 1024):  # the first one is compiled for, the other one must not be
        logits = (3 * torch.randn(tokens, 50257, **make)).to(dtype).requires_grad_()
        labels = torch.randint(0, 50257, (tokens,), **make)
        labels[::3] = -100
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error" if tokens == 1024 else "default")
        try:
            total = cross_entropy_sum(logits, labels, kernels)
            (total * 1e-2).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if tokens == 1024:  # tuning the kernels, in the first call, copies what they write to
            size = logits.numel() * logits.element_size()
            assert torch.cuda.max_memory_allocated() - before < 1.05 * size
        found = logits.grad
        logits.grad = None
        expected = cross_entropy_sum(logits, labels)
        (expected * 1e-2).backward()
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(found, logits.grad, rtol=rounding, atol=1e-7)
    assert not [record for record in caplog.records if record.name.startswith("pipeline")]
