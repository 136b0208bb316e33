"""Inputs of blocks wait for backward elsewhere: exactly they do, and no gradient changes."""

from __future__ import annotations

import pytest
import torch
from support.tiny import deepspeed_json, recipe, train_curve
from torch import nn

from pipeline.config.model_schema import CausalLMConfig
from pipeline.models import activation_checkpointing, build_model
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


@pytest.mark.parametrize("mode", ["full", 2, "selective"])
def test_what_waits_elsewhere_is_the_input_of_each_block_that_recomputes(monkeypatch, mode):
    waiting, asked_for = [], []
    there, back = activation_checkpointing.InputsOnHost._to_host, activation_checkpointing._to_device

    def to_host(self, tensor):
        kept = there(self, tensor)
        if kept is not tensor:
            assert kept.host.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
            waiting.append(tuple(tensor.shape))
        return kept

    def to_device(kept):
        asked_for.append(kept)
        return back(kept)

    monkeypatch.setattr(activation_checkpointing.InputsOnHost, "_to_host", to_host)
    monkeypatch.setattr(activation_checkpointing, "_to_device", to_device)
    _, expected = gradients(activation_checkpointing=mode)
    assert not waiting
    _, found = gradients(activation_checkpointing=mode, activation_offload=True)
    blocks = 2 if mode == 2 else 4
    assert waiting == [(2, 16, 32)] * blocks
    assert len(asked_for) >= blocks
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_the_curve_is_that_of_full_recomputation(ranks, stage):
    model = recipe()["model"] | {"activation_checkpointing": "full"}
    split = deepspeed_json(stage, "bf16")
    expected = ranks(2).run(train_curve, recipe(model=model), split, 3)
    model |= {"activation_offload": True}
    assert ranks(2).run(train_curve, recipe(model=model), split, 3) == expected
