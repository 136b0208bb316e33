"""Memory on a GPU: block inputs wait on the host, buffers of a sharded model lie on it (pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from support.model_with_buffer import measure_buffer_and_losses
from support.rank_pool import RankPool

from pipeline.config.model_schema import CausalLMConfig
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.objectives import CausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def gradients(**keys) -> list[torch.Tensor]:
    sizes = {"num_layers": 4, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 300}
    config = CausalLMConfig(architecture="llama", max_sequence_length=16, **sizes, **keys)
    model = apply_transforms(
        build_model(config, ModelRequest(NoSharding()), 0), config, TransformContext(torch.device("cuda"))
    )
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1)).to("cuda")
    model.to("cuda").train()
    CausalLM()(model, {"input_ids": tokens, "labels": tokens}).loss_sum.backward()
    return [p.grad for p in model.parameters()]


def test_offloaded_inputs_give_the_gradients_of_those_that_stay():
    expected = gradients(activation_checkpointing="full")
    found = gradients(activation_checkpointing="full", activation_offload=True)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_lie_where_the_model_computes(stage):
    with RankPool(1, on_gpu=True) as pool:
        device, dtype, curve = pool.run(measure_buffer_and_losses, stage)[0]
    assert (device, dtype) == ("cuda", torch.float32)
    assert curve[-1] < curve[0]
