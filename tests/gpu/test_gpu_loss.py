"""The loss without logits on a GPU: value and gradients over several chunks, and no host sync."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from pipeline.objectives import VocabularyPart
from pipeline.objectives import linear_cross_entropy as linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


# As under tensor parallelism, but that there is no other rank.
ALONE = VocabularyPart(0, 1000, lambda tensor: tensor[None], lambda tensor: tensor)


@pytest.mark.parametrize("part", [None, ALONE], ids=["whole", "part"])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)]
)
def test_it_equals_torchs_own_without_a_sync(dtype, rounding, part):
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(300, 64, **make).to(dtype).requires_grad_()
    weight = torch.randn(1000, 64, **make).to(dtype).requires_grad_()
    labels = torch.randint(0, 1000, (300,), **make)
    labels[::3] = -100
    with patch.object(linear, "GPU_CHUNK", 128 * 1000), patch.object(linear, "GPU_BLOCK", 50 * 1000):
        torch.cuda.set_sync_debug_mode("error")
        try:
            total = linear.linear_cross_entropy_sum(hidden, weight, None, labels, dtype, part)
            (total * 1e-2).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*leaves), labels, reduction="sum")
    (expected * 1e-2).backward()
    torch.testing.assert_close(total.double(), expected.detach(), rtol=rounding, atol=0)
    for leaf, reference in zip((hidden, weight), leaves, strict=True):
        assert (leaf.grad.double() - reference.grad).norm() < rounding * reference.grad.norm()
