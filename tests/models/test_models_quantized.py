"""A base in 4 bits: that it is, in so many bytes, the same one everywhere, and what is trained over it."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from parity.measure import ALONE, differences, largest_difference, train
from parity.splits import SEQUENCE_2, zero
from safetensors.torch import load_file, save_file
from support.base_model import write_base_model
from support.tiny import deepspeed_json, make_engine, recipe, token_bundle

from pipeline.config.model_schema import AdapterConfig, CausalLMConfig
from pipeline.errors import ConfigError
from pipeline.models import build_model
from pipeline.models.adapters import build_peft_config, find_adapter_layers, measure_reduced_base
from pipeline.models.quantized import QuantizedBasePlacement, find_quantized_layers, pack_nf4, unpack_nf4
from pipeline.models.sharding import DevicePlacement, ModelRequest

PLAIN = {"torch": {"parallel": "single"}}
LORA = {"rank": 4, "alpha": 8.0}
WIDE = recipe()["model"] | {"hidden_size": 64, "intermediate_size": 128}
STEPS = 5

pytestmark = pytest.mark.slow


def asked(**adapter):
    return recipe(model=WIDE, adapter=LORA | {"quantize": "nf4"} | adapter)


@pytest.fixture(scope="module")
def alone():
    return train(ALONE, asked(), PLAIN, STEPS)


def test_the_loss_is_near_that_over_the_exact_base_and_not_the_same(alone):
    exact = train(ALONE, recipe(model=WIDE, adapter=LORA), PLAIN, STEPS)
    assert 1e-5 < largest_difference(alone.losses, exact.losses) < 0.05
    assert alone.losses[-1] < alone.losses[0]


@pytest.mark.daily("sequence", "ZeRO 2 in bf16")
@pytest.mark.parametrize(
    ("split", "allowed"),
    [
        ({"torch": {"parallel": "ddp"}}, 1e-6),
        (zero(0), 1e-6),
        (zero(1), 1e-6),
        (zero(2), 1e-6),
        (zero(1) | SEQUENCE_2, 1e-6),
        (zero(2) | {"bf16": {"enabled": True}}, 1e-3),
    ],
    ids=["ddp", "ZeRO 0", "ZeRO 1", "ZeRO 2", "sequence", "ZeRO 2 in bf16"],
)
def test_two_ranks_have_the_curve_of_one(ranks, alone, split, allowed):
    loss, _, evaluation = differences(ranks(2).run(train, asked(), split, STEPS)[0], alone)
    assert max(loss, evaluation) < allowed


def test_dora_has_one_curve_too(ranks):
    one = train(ALONE, asked(kind="dora"), PLAIN, STEPS)
    two = ranks(2).run(train, asked(kind="dora"), zero(2), STEPS)[0]
    assert max(differences(two, one)) < 1e-6


def test_a_weight_takes_half_a_byte_and_its_scales():
    tree = asked()
    tree["model"] = WIDE | {"hidden_size": 256, "intermediate_size": 512, "num_layers": 1}
    engine = make_engine(ALONE, tree, PLAIN, token_bundle())
    values, num_bytes = measure_reduced_base(engine.module)
    assert values == 4 * 256**2 + 3 * 256 * 512
    # Of each block of 64 a scale in a byte, of 256 of those one in fp32; and of each layer the two tables.
    tables = 7 * 4 * (256 + 16 + 1)
    assert num_bytes == values / 2 + values / 64 + 4 * values / 64 / 256 + tables
    whole = make_engine(ALONE, recipe(adapter=LORA, model=tree["model"]), PLAIN, token_bundle())
    assert engine.num_parameters == whole.num_parameters
    held = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    every = sum(p.numel() * p.element_size() for p in whole.module.parameters())
    assert every - held == 4 * values - values / 2
    assert not any(
        p.requires_grad for _, p in find_adapter_layers(engine.module) for p in p.base_layer.parameters()
    )


def packed_layers(job, tree, split):
    """Codes and scales by name."""
    engine = make_engine(job, tree, split, token_bundle())
    return {
        name: (layer.weight.data, layer.weight.quant_state)
        for name, layer in find_quantized_layers(engine.module)
    }


def test_what_is_quantized_are_the_files_values_in_any_precision(ranks, tmp_path):
    model = make_engine(ALONE, recipe(model=WIDE), PLAIN, token_bundle()).module
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, tmp_path / "all.safetensors")
    tree = asked(modules_to_save=["layers.0.mlp.up_proj"])
    from_file = tree | {"model": tree["model"] | {"weights": str(tmp_path / "all.safetensors")}}
    drawn = packed_layers(ALONE, tree, PLAIN)
    read = packed_layers(ALONE, from_file, PLAIN)
    in_bf16 = ranks(2).run(packed_layers, from_file, deepspeed_json(2, "bf16"))
    assert len(drawn) == 2 * 7 - 1
    assert not any("layers.0.mlp.up_proj" in name or "lm_head" in name for name in drawn)
    for name, (codes, state) in drawn.items():
        values = dequantize_4bit(codes, state)
        assert (values - model.get_submodule(name).weight).norm() / values.norm() < 0.11
        for others in (read, *in_bf16):
            assert torch.equal(others[name][0], codes)
            assert torch.equal(others[name][1].absmax, state.absmax)


def test_a_pretrained_weight_gives_up_its_memory_once_it_is_read(tmp_path):
    folder = write_base_model(tmp_path, hidden_size=64)
    asked_for = CausalLMConfig(kind="causal_lm", pretrained=str(folder)), AdapterConfig(quantize="nf4")
    sharding = QuantizedBasePlacement(
        DevicePlacement(torch.device("cpu"), torch.float32), asked_for[1], asked_for[0]
    )
    model = build_model(asked_for[0], ModelRequest(sharding), 0)
    own = load_file(folder / "model.safetensors")
    layers = sharding.find_frozen_layers(model)
    assert len(layers) == 14
    for name, parameter in model.named_parameters():
        is_quantized = name.removesuffix(".weight") in layers
        assert parameter.is_meta == is_quantized
        if is_quantized:
            assert torch.equal(sharding.get_packed(parameter), pack_nf4(own[name]))
        else:
            assert torch.equal(parameter, own[name])


def test_a_layer_that_the_given_adapter_trained_whole_has_to_be_named(tmp_path):
    path = "model.layers.0.self_attn.q_proj"
    build_peft_config(AdapterConfig(**LORA)).save_pretrained(tmp_path)
    other = path.replace("q_proj", "k_proj")
    tensors = {f"{other}.lora_A.weight": (4, 64), f"{other}.lora_B.weight": (64, 4)}
    tensors[f"{path}.weight"] = (64, 64)
    named = {f"base_model.model.{name}": torch.zeros(shape) for name, shape in tensors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=rf"has trained {path} whole.* adapter\.modules_to_save"):
        make_engine(ALONE, asked(weights=str(tmp_path)), PLAIN, token_bundle())


@pytest.mark.parametrize("shape", [(48, 80), (5, 48), (7, 30), (64, 128)])
def test_a_weight_of_any_width_is_read_right(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    error = (unpack_nf4(pack_nf4(weight)) - weight).norm() / weight.norm()
    assert error < 0.12
