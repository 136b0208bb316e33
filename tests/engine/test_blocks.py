"""Blocks under engines: compiled once between whatever hooks there are, gathered at once by ZeRO 3."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from parity.splits import TWO_STAGES, zero
from support.tiny import TOLERANCES, make_engine, recipe, token_bundle, train_curve
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from pipeline.distributed.process_group import Job
from pipeline.engine.zero3 import _require_input_gradient
from pipeline.errors import ModelError
from pipeline.models.blocks import compile_blocks, find_leaf_blocks
from pipeline.training import assemble

MODEL = recipe()["model"] | {"num_layers": 4}
SPLITS = {
    "ddp": {"torch": {"parallel": "ddp", "bucket_cap_mb": 0.01}},  # a block's gradients are 40 kB
    **{f"ZeRO {stage}": zero(stage) for stage in range(4)},
    "pipeline 2": zero(1) | TWO_STAGES,
}


def compiled_curve(job: Job, model: dict[str, Any], split: dict[str, Any]) -> tuple[Any, int]:
    """The curve, and how often something was compiled; the graphs run as they are."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "compile_blocks", partial(compile_blocks, backend=keep))
        curve = train_curve(job, recipe(model=model), split | {"compile": {"enabled": True}}, 3)
    return curve, len(graphs)


@pytest.mark.slow
@pytest.mark.daily("full-ZeRO 3")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_all_blocks_are_compiled_once_and_no_number_changes(ranks, mode, split):
    """DDP's buckets, smaller than a block, would cut it; so would a hook inside."""
    model = MODEL | {"activation_checkpointing": mode}
    expected = ranks(2).run(train_curve, recipe(model=model), SPLITS[split], 3)
    for (curve, number), wanted in zip(
        ranks(2).run(compiled_curve, model, SPLITS[split]), expected, strict=True
    ):
        assert number == 1
        for column, band in enumerate(TOLERANCES["fp32"]):
            pairs = zip(curve, wanted, strict=True)
            assert max(abs(a[column] / b[column] - 1) for a, b in pairs) < band


def hooked(job: Job) -> list[str]:
    engine = make_engine(job, recipe(), zero(3), token_bundle())
    names = [name for name, module in engine.module.named_modules() if module._forward_pre_hooks]
    engine.close()
    return names


@pytest.mark.slow
def test_zero_3_has_its_hooks_on_whole_blocks(ranks):
    (names,) = ranks(1).run(hooked)
    assert [name for name in names if "layers." in name] == ["model.layers.0", "model.layers.1"]
    assert {"lm_head", "model.embed_tokens", "model.norm"} < set(names)


def test_blocks_that_are_not_transformers_own_may_be_called_with_anything():
    class Own(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self):
            super().__init__(PreTrainedConfig())
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2))

    assert list(find_leaf_blocks(Own())) == []
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    (blocks,) = find_leaf_blocks(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **small)))
    assert len(blocks) == 2


def test_a_block_has_hidden_states_by_position_that_require_a_gradient():
    class Block(nn.Module):
        def forward(self, hidden, mask=None):
            return hidden

    x = torch.ones(2)
    mask = torch.ones(2, dtype=torch.bool)
    block = Block()
    learns = torch.ones(2, requires_grad=True)
    assert _require_input_gradient(block, (learns,), {"mask": mask}) is None
    (given, beside), named = _require_input_gradient(block, (x, mask), {})
    assert (given.requires_grad, x.requires_grad, beside is mask, named) == (True, False, True, {})
    for hidden in (learns, x):
        (given,), named = _require_input_gradient(block, (), {"hidden": hidden, "mask": mask})
        assert given.requires_grad
        assert (given is learns) == (hidden is learns)
        assert list(named) == ["mask"]
    for wrong in (((mask,), {}), ((), {"mask": mask})):
        with pytest.raises(ModelError, match="the first input of Block is no floating-point tensor"):
            _require_input_gradient(block, *wrong)
    with torch.no_grad():
        assert _require_input_gradient(block, (x,), {}) is None


@pytest.mark.slow
def test_blocks_over_frozen_embeddings_train(ranks):
    """Nothing that their first one is given requires a gradient."""
    tree = recipe(model=MODEL | {"num_layers": 2, "freeze": ["model.embed_tokens.weight"]})
    curves = [ranks(1).run(train_curve, tree, split, 3)[0] for split in (zero(3), zero(0))]
    for column, band in enumerate(TOLERANCES["fp32"]):
        assert max(abs(a[column] / b[column] - 1) for a, b in zip(*curves, strict=True)) < band
