"""The steps between a model's weights and its compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.config.model_schema import CausalLMConfig, CNNConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.models import build_model, transforms
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transforms import TRANSFORMS, TransformContext, apply_transforms

HERE = TransformContext(torch.device("cpu"))
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 40}


def frozen(patterns, architecture="llama", **fields):
    """Names of what is frozen, tied ones once."""
    config = CausalLMConfig(architecture=architecture, freeze=patterns, **SIZES, **fields)
    model = apply_transforms(build_model(config, ModelRequest(NoSharding()), 0), config, HERE)
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_patterns_are_over_whole_names_of_every_kind_of_model():
    assert frozen(["model.embed_tokens.weight"]) == {"model.embed_tokens.weight"}
    both = {
        f"model.layers.{i}.{name}_layernorm.weight" for i in (0, 1) for name in ("input", "post_attention")
    }
    assert frozen(["*layernorm.weight"]) == both
    assert frozen(["lm_head.*", "model.layers.[1-9].input*"]) == {
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
    }
    assert frozen(None) == set()
    config = CNNConfig(kind="cnn", channels=4, num_classes=3, freeze=["features.0.*"])
    model = apply_transforms(build_model(config, ModelRequest(NoSharding()), 0), config, HERE)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


def test_a_tied_weight_is_frozen_by_any_of_its_names():
    for name in ("lm_head.weight", "transformer.wte.weight"):
        assert frozen([name], "gpt2") == {"transformer.wte.weight"}


def test_a_pattern_that_matches_nothing_is_told_the_nearest_names():
    with pytest.raises(ConfigError) as error:
        frozen(["lm_head.*", "model.embed_token.*"])
    assert "'model.embed_token.*' matches no parameter" in str(error.value)
    assert "nearest: model.embed_tokens.weight" in str(error.value)


def test_all_frozen_is_an_error_that_names_the_patterns():
    with pytest.raises(ModelError, match=r"model\.freeze: lm_head\.\*, model\.\* match every parameter"):
        frozen(["lm_head.*", "model.*"])


def test_gpt2s_gelu_is_one_operation_and_the_same_function():
    config = CausalLMConfig(architecture="gpt2", **SIZES)
    model = build_model(config, ModelRequest(NoSharding()), 0)
    written_out = model.transformer.h[0].mlp.act
    apply_transforms(model, config, HERE)
    at_once = [block.mlp.act for block in model.transformer.h]
    assert [(type(each), each.approximate) for each in at_once] == [(nn.GELU, "tanh")] * 2
    x = torch.linspace(-8, 8, 999, requires_grad=True)
    given = at_once[0](x)
    expected = written_out(x)
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.sum(), x)[0] for each in (given, expected)), rtol=1e-5, atol=2e-6
    )


def test_a_step_that_is_added_to_the_list_is_done_in_its_place(monkeypatch):
    seen = []

    def wrap(model, config, placement):
        seen.append([p.requires_grad for p in model.parameters()])
        return nn.Sequential(model)

    monkeypatch.setattr(transforms, "TRANSFORMS", (*TRANSFORMS[:1], wrap, *TRANSFORMS[1:]))
    config = CNNConfig(kind="cnn", channels=4, num_classes=3, freeze=["classifier.*"])
    model = apply_transforms(build_model(config, ModelRequest(NoSharding()), 0), config, HERE)
    assert isinstance(model, nn.Sequential)
    assert seen == [[True] * 4 + [False] * 2]
