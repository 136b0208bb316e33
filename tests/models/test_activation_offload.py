"""Inputs of blocks wait for backward in host memory, and no gradient changes."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.config.model_schema import CausalLMConfig
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, Whole
from pipeline.models.transforms import Placement, transform
from pipeline.objectives import CausalLM

SIZES = {"num_layers": 4, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 300}


def gradients(device="cpu", **keys) -> tuple[nn.Module, list[torch.Tensor]]:
    config = CausalLMConfig(architecture="llama", max_sequence_length=16, **SIZES, **keys)
    model = transform(build_model(config, ModelRequest(Whole()), 0), config, Placement(torch.device(device)))
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    model.to(device).train()
    CausalLM()(model, {"input_ids": tokens, "labels": tokens}).loss_sum.backward()
    return model, [p.grad for p in model.parameters()]


def test_on_a_cpu_there_is_nowhere_else_to_wait():
    """tests/engine/test_fake_cuda.py and tests/gpu/test_gpu_memory.py have a device."""
    _, expected = gradients(activation_checkpointing="full")
    _, found = gradients(activation_checkpointing="full", activation_offload=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
