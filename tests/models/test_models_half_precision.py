"""Layers written for fp32 under autocast, with parameters in half precision and buffers as they were made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from pipeline.models.transforms import prepare_for_half_precision

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)


class LayerNorm32(nn.LayerNorm):
    """Kept in fp32 by its author."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).type_as(x)


class Own(nn.BatchNorm2d):
    """A subclass."""


IMAGE = (6, 8, 5, 5)
ROW = (6, 7, 8)
LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (6, 8)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), IMAGE),
    "a subclass": (lambda: Own(8, momentum=None), IMAGE),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(8), (6, 8, 2, 2, 2)),
    "no parameters": (lambda: nn.BatchNorm2d(8, affine=False), IMAGE),
    "no statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False), IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), IMAGE),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(8), ROW),
    "LayerNorm in fp32": (lambda: LayerNorm32(8), ROW),
    "RMSNorm": (lambda: nn.RMSNorm(8), ROW),
    "LSTM": (lambda: nn.LSTM(8, 4, 2, bidirectional=True, batch_first=True), ROW),
    "GRU": (lambda: nn.GRU(8, 4, batch_first=True), ROW),
    "MultiheadAttention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), ROW),
    "Conv2d": (lambda: nn.Conv2d(8, 4, 3), IMAGE),
    "PReLU": (lambda: nn.PReLU(8), IMAGE),
    "spectral_norm, older": (lambda: spectral_norm(nn.Linear(8, 4)), ROW),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), ROW),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 4)), ROW),
}


def halved(layer, dtype):
    """A model as DeepSpeed leaves it: parameters cast, buffers not."""
    for p in layer.parameters():
        p.data = p.data.to(dtype)
    prepare_for_half_precision(layer, CPU)
    return layer


def result(layer, x):
    """(output, input gradient, parameter gradients, buffers), of a training and an evaluating forward."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (y.float() * slope).sum().backward()
    layer.eval()
    held_out = layer(x)
    held_out = held_out[0] if isinstance(held_out, tuple) else held_out
    tensors = [y, held_out, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
    return [tensor.detach().float() for tensor in tensors]


@pytest.mark.parametrize("given", ["half", "fp32"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_it_computes_in_fp32(name, dtype, given):
    """Whether what comes in is in half precision, or a buffer made it fp32."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    layer = make()
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(p.to(dtype))
    layer = halved(layer, dtype)
    names = list(plain.state_dict())
    dtypes = [buffer.dtype for buffer in plain.buffers()]
    expected = result(plain, x.float())
    with torch.autocast("cpu", dtype):
        found = result(layer, x if given == "half" else x.float())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * (1 + float(b.abs().max())))
    assert list(layer.state_dict()) == names
    assert [buffer.dtype for buffer in layer.buffers()] == dtypes
    assert all(p.dtype == p.grad.dtype == dtype for p in layer.parameters())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_running_statistics_are_those_of_fp32(dtype):
    """A small deviation around a large mean, which half precision could not even hold."""
    x = (100 + 0.5 * torch.randn(64, 4, 5, 5)).to(dtype)
    layer = halved(nn.BatchNorm2d(4, momentum=1.0), dtype)
    with torch.autocast("cpu", dtype):
        assert layer(x).dtype == dtype
    exact = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer.running_mean.double(), exact.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), exact.var(1), rtol=1e-4, atol=0)


def test_a_packed_sequence_and_a_state_of_its_own_go_into_a_recurrent_layer():
    layer = halved(nn.LSTM(8, 4, batch_first=True), torch.bfloat16)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 8), torch.tensor([5, 3]), batch_first=True)
    state = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, (hidden, _) = layer(packed, state)
    assert out.data.dtype == hidden.dtype == torch.bfloat16
    assert out.data.shape == (8, 4)
