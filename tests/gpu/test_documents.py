"""Variable-length attention on a CUDA device gives what a CPU gives, and waits for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.models.document_attention import (
    BOUNDS_KEY,
    DocumentAttention,
    build_empty_bounds,
    find_document_bounds,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = ((5, 1, 90, 160), (256,), (*[1] * 56, 200))


def attended(device: str, dtype: torch.dtype, groups: int, bounds: torch.Tensor, weights: torch.Tensor):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(3, 256, heads, 64, generator=generator) for heads in (4, groups, groups)]
    inputs = [each.to(dtype).to(device).transpose(1, 2).requires_grad_() for each in drawn]
    bounds = bounds.to(device)
    weights = weights.to(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = DocumentAttention()(nn.Identity(), *inputs, None, **{BOUNDS_KEY: bounds})
        (output.float() * weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [each.float().cpu() for each in (output, *(i.grad for i in inputs))]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 2e-5)]
)
def test_documents_of_a_row_are_kept_apart_as_on_a_cpu(dtype, allowed, groups, is_packed):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    bounds = find_document_bounds(positions) if is_packed else build_empty_bounds(torch.device("cpu"))
    weights = torch.linspace(-1, 1, 3 * 256 * 4 * 64).view(3, 256, 4, 64)
    expected = attended("cpu", torch.float32, groups, bounds, weights)
    for found, wanted in zip(attended("cuda", dtype, groups, bounds, weights), expected, strict=True):
        assert (found - wanted).abs().max() <= allowed * wanted.abs().max()


def test_positions_alone_are_right_too():
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    drawn = torch.randn(3, 4, 256, 64)
    own, told = (
        DocumentAttention()(nn.Identity(), *[drawn.bfloat16().cuda()] * 3, None, **given)[0]
        for given in (
            {"position_ids": positions.cuda()},
            {BOUNDS_KEY: find_document_bounds(positions).cuda()},
        )
    )
    assert torch.equal(own, told)


def test_dropout_and_odd_widths_are_served():
    """The document mask in the kernel that is not flash attention's."""
    positions = torch.arange(64).repeat(2, 4)
    given = {BOUNDS_KEY: find_document_bounds(positions).cuda()}
    query = torch.randn(2, 4, 256, 20, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output, _ = DocumentAttention()(nn.Identity(), query, query, query, None, dropout=0.1, **given)
    output.float().square().sum().backward()
    assert output.isfinite().all()
    assert query.grad.isfinite().all()
