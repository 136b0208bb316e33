"""A model cut into layers is the model: same logits, same weights by name; or one line says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from pipeline.errors import ModelError
from pipeline.models.staging import LayeredModel, cut_into_layers

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
UNTIED = ("llama", "qwen2", "qwen3", "mistral", "phi", "gpt_neox", "olmo2", "mixtral")
TIED = ("gpt2", "gemma", "smollm3")


def small(kind: str, **more: Any) -> PreTrainedModel:
    known = AutoConfig.for_model(kind)
    fields = {key: value for key, value in SIZES.items() if hasattr(known, key)} | more
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()


def empty(kind: str) -> PreTrainedModel:
    known = AutoConfig.for_model(kind)
    fields = {key: value for key, value in SIZES.items() if hasattr(known, key)}
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    model.tie_weights()
    return model.eval()


def run(layered: LayeredModel, inputs: Any) -> torch.Tensor:
    for layer in layered.layers:
        inputs = layer(inputs)
    return inputs


@pytest.mark.daily("llama", "qwen2", "gpt2", "mixtral")
@torch.no_grad()
@pytest.mark.parametrize("kind", [*UNTIED, *TIED])
def test_the_layers_in_a_row_give_the_models_logits(kind):
    model = small(kind)
    layered = cut_into_layers(model)
    assert layered.is_tied == (kind in TIED)
    ids = torch.randint(0, 97, (2, 40))
    torch.testing.assert_close(run(layered, ids), model(input_ids=ids).logits)
    packed = torch.cat([torch.arange(15), torch.arange(25)])[None].repeat(2, 1)
    expected = model(input_ids=ids, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(run(layered, (ids, packed)), expected)
    torch.testing.assert_close(run(layered, ids[:, :7]), model(input_ids=ids[:, :7]).logits)


@pytest.mark.daily("llama", "gpt2")
@pytest.mark.parametrize("kind", [*UNTIED, *TIED])
def test_a_model_without_values_is_cut_and_proven_too(kind):
    model = empty(kind)
    layered = cut_into_layers(model)
    assert layered.get_weight_names() == cut_into_layers(small(kind)).get_weight_names()
    assert all(p.is_meta for p in model.parameters()), "values that were lent stay"


@torch.no_grad()
def test_a_sliding_window_shorter_than_the_sequence_slides():
    ids = torch.randint(0, 97, (1, 40))
    model = small("mistral", sliding_window=8)
    logits = run(cut_into_layers(model), ids)
    torch.testing.assert_close(logits, model(input_ids=ids).logits)
    model.config._attn_implementation = "flash_attention_2"  # a GPU's; the cut is tried on a CPU
    cut_into_layers(model)
    model.config._attn_implementation = "sdpa"
    model.config.sliding_window = None
    assert not torch.allclose(logits, model(input_ids=ids).logits), "the window made no difference"


def test_cutting_leaves_the_model_and_the_random_numbers_as_they_were():
    model = small("llama").train()
    before = torch.get_rng_state()
    cut_into_layers(model)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("opt", "its part embed_positions is unknown"),
        ("cohere", "its layers, run one after another, give other logits"),
        ("gemma2", "it caps its logits"),
        ("gemma3_text", "its blocks do not run one by one"),
    ],
)
def test_what_cannot_be_cut_is_named_with_what_works(kind, why):
    with pytest.raises(ModelError) as error:
        cut_into_layers(small(kind))
    assert f"a {kind} cannot be cut into pipeline stages, since {why}" in str(error.value)
    assert "use zero_optimization.stage 3" in str(error.value)


def test_a_model_of_ones_own_is_refused():
    with pytest.raises(ModelError, match="it is not a model of transformers"):
        cut_into_layers(nn.Linear(2, 2))
