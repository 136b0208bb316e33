"""Names and shapes that the planner knows, against transformers' own models, made without values."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.planner.shapes import build_model_spec, read_families

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "vocab_size": 320,
    "pad_token_id": 0,
}
EXTRA = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {"attention_bias": True, "head_dim": 24},
    "olmo2": {"num_key_value_heads": 2},
    "gpt2": {"n_inner": 100},
}


def parameters(config) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", read_families())
def test_every_family_has_the_parameters_of_transformers(family):
    groups = {} if family == "gpt2" else {"num_key_value_heads": 2}
    for stated in ({"num_hidden_layers": 2}, SMALL | groups | EXTRA.get(family, {})):
        theirs = parameters(AutoConfig.for_model(family, **stated))
        ours = build_model_spec(family, stated)
        assert ours is not None
        assert {p.name: p.shape for p in ours.parameters} == theirs
        assert len(ours.parameters) == len(theirs)


@pytest.mark.parametrize("family", read_families())
def test_the_defaults_are_transformers_own(family):
    default = AutoConfig.for_model(family)
    template = read_families()[family]
    theirs = {ours: own for own, ours in template.get("standard_keys", {}).items()}
    for key, value in template["defaults"].items():
        name = theirs.get(key, key)
        assert getattr(default, name if hasattr(default, name) else key) == value, key
    assert bool(template["defaults"].get("tie_word_embeddings")) == default.tie_word_embeddings


def test_what_changes_shapes_unknown_here_is_not_guessed():
    assert build_model_spec("gpt2", {"add_cross_attention": True}) is None
    assert build_model_spec("qwen3_moe", {"decoder_sparse_step": 2}) is None
    assert build_model_spec("deepseek_v3", {}) is None
