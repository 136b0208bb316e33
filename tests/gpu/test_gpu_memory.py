"""Memory on a GPU: block inputs wait on the host, buffers of a sharded model lie on it (pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from models.test_activation_offload import gradients
from support.buffered import buffer_and_curve
from support.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_offloaded_inputs_give_the_gradients_of_those_that_stay():
    _, expected = gradients("cuda", activation_checkpointing="full")
    _, found = gradients("cuda", activation_checkpointing="full", activation_offload=True)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_lie_where_the_model_computes(stage):
    with RankPool(1, on_gpu=True) as pool:
        device, dtype, curve = pool.run(buffer_and_curve, stage)[0]
    assert (device, dtype) == ("cuda", torch.float32)
    assert curve[-1] < curve[0]
