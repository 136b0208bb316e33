"""Linear layers in fp8: which ones, that their numbers are fp8's, and what they keep for backward."""

from __future__ import annotations

import logging

import pytest
import torch
from support.tiny import recipe
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.blocks import compile_blocks
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.sizes import compute_fp8_share, flops_per_token
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.planner.hardware import peak_flops

pytestmark = pytest.mark.slow

fp8 = pytest.importorskip("pipeline.models.fp8")

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def language_model(fp8="tensorwise", architecture="llama", device="cpu", **changes):
    tree = recipe()["model"] | {"architecture": architecture, "vocab_size": 64, "fp8": fp8} | changes
    config = CausalLMConfig(**{key: value for key, value in tree.items() if value is not None})
    model = build_model(config, ModelRequest(NoSharding()), 0).train()
    return apply_transforms(model, config, TransformContext(torch.device(device)))


def converted(model):
    return [name for name, layer in model.named_modules() if isinstance(layer, fp8.Float8Linear)]


def gradients(model):
    model.zero_grad()
    logits = model(input_ids=torch.arange(22).view(2, 11)).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def cast(x, dtype, dim=None):
    """Round to fp8 and back, by a scale that is a power of two, as the recipe describes it."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = 2.0 ** torch.floor(torch.log2(torch.finfo(dtype).max / largest.double()))
    return ((x * scale).to(dtype).double() / scale).float()


E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


@pytest.mark.parametrize("name", RECIPES)
def test_a_layers_products_are_those_of_numbers_cast_to_fp8(name):
    torch.manual_seed(0)
    model = language_model(name)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(3, 5, 32, requires_grad=True)
    g = torch.randn(3, 5, 64)
    layer(x).backward(g)
    X = x.detach().flatten(0, 1)
    W = layer.weight.detach()
    G = g.flatten(0, 1)
    rows, columns = (None, None) if name == "tensorwise" else (1, 0)
    of_gradients = E5M2 if name == "tensorwise" else E4M3
    output = cast(X, E4M3, rows) @ cast(W, E4M3, rows).T
    # Along the dimension that is summed over.
    of_input = cast(G, of_gradients, rows) @ cast(W, E4M3, None if name == RECIPES[2] else columns)
    of_weight = cast(G, of_gradients, columns).T @ cast(X, E4M3, columns)
    if name == RECIPES[2]:
        of_weight = G.T @ X
    close = {"rtol": 1e-6, "atol": 1e-5}
    torch.testing.assert_close(layer(x), output.view(3, 5, 64), **close)
    torch.testing.assert_close(x.grad, of_input.view(3, 5, 32), **close)
    torch.testing.assert_close(layer.weight.grad, of_weight, **close)
    assert not torch.allclose(output, X @ W.T, **close)


def test_layers_of_blocks_are_converted_and_told_once_and_names_stay(caplog):
    caplog.set_level(logging.INFO)
    model = language_model()
    assert len(converted(model)) == 14  # seven a block
    assert [r.getMessage() for r in caplog.records if "model.fp8" in r.getMessage()] == [
        "model.fp8: 14 linear layers multiply in fp8 (tensorwise), emulated on a CPU: the same numbers, only "
        "slower"
    ]
    assert type(model.lm_head) is nn.Linear
    plain = language_model("none")
    assert converted(plain) == []
    assert list(model.state_dict()) == list(plain.state_dict())


def test_odd_widths_and_routers_stay_as_they_are():
    odd = converted(language_model(intermediate_size=72))
    assert len(odd) == 8
    assert not any("mlp" in name for name in odd)
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(16, 16)])
    model.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(16, 16) for name in ("gate", "gate_proj")})])
    assert fp8.find_fp8_layers(model) == [model.layers[0]["gate_proj"]]


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ModelError, match=r"a gpt2 has no nn\.Linear of widths divisible by 16 in its blocks"):
        language_model(architecture="gpt2", intermediate_size=None)


def test_nothing_but_weights_themselves_is_kept_of_weights():
    """A view of one keeps what ZeRO 3 has gathered."""
    model = language_model()
    kept = []
    of_weights = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model(input_ids=torch.arange(8).view(1, 8), use_cache=False)
    linear = {id(model.get_submodule(name).weight) for name in converted(model)}
    kept = [each for each in kept if id(of_weights.get(each.untyped_storage().data_ptr())) in linear]
    assert len(kept) == 14
    assert all(id(each) in linear for each in kept)


def test_what_is_not_finite_stays_so():
    model = language_model()
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer(torch.randn(4, 32)).backward(torch.full((4, 64), float("inf")))
    assert layer.weight.grad.isnan().all()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_give_the_same(mode):
    torch.testing.assert_close(
        gradients(language_model(activation_checkpointing=mode)), gradients(language_model())
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_blocks_give_the_same(name):
    expected = gradients(language_model(name))
    model = language_model(name)
    compile_blocks(model, "aot_eager")
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6)


def test_frozen_layers_get_no_gradient():
    model = language_model(freeze=["*.mlp.*"])
    gradients_by_name = dict(zip(dict(model.named_parameters()), gradients(model)[1:], strict=True))
    assert {name for name, gradient in gradients_by_name.items() if gradient is None} == {
        name for name in gradients_by_name if ".mlp." in name
    }


def test_the_peak_is_that_of_the_products_in_fp8_and_of_the_others_together():
    model = language_model()
    cost = flops_per_token(model, 24)
    in_blocks = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert compute_fp8_share(model, "tensorwise", cost) == pytest.approx(6 * in_blocks / cost)
    assert compute_fp8_share(model, "rowwise_with_gw_hp", cost) == pytest.approx(4 * in_blocks / cost)
    assert compute_fp8_share(model, "none", cost) == 0
    bf16 = peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16", fp8_share=1.0) == pytest.approx(2 * bf16)
    # Half of the FLOPs in half of their time.
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16", fp8_share=0.5) == pytest.approx(bf16 / 0.75)
