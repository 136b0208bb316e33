"""Adapters against peft itself, and where they go."""

from __future__ import annotations

import json
import math

import pytest
import torch
from parity.measure import ALONE
from parity.splits import GPT2, LLAMA
from safetensors.torch import save_file
from support.tiny import make_engine, recipe, resolve, token_bundle

from pipeline.config.model_schema import AdapterConfig
from pipeline.engine.optim import parameter_groups
from pipeline.errors import ConfigError, ModelError
from pipeline.models.adapters import (
    ADAPTER_NAME,
    PeftFolder,
    build_peft_config,
    find_adapter_layers,
    measure_reduced_base,
    suggest_learning_rate,
)
from pipeline.models.generation import GenerationSettings
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_loader

pytestmark = pytest.mark.slow

PLAIN = {"torch": {"parallel": "single"}}


def asked(**adapter):
    return recipe(adapter={"rank": 4, "alpha": 8.0} | adapter)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_a_step_is_that_of_a_loop_over_pefts_own_model(kind):
    from peft import LoraConfig, get_peft_model

    tree = asked(kind=kind, dropout=0.0)
    data = token_bundle()
    config, resolved = resolve(tree, PLAIN, 1)
    engine = make_engine(ALONE, tree, PLAIN, data)
    base = make_engine(ALONE, {k: v for k, v in tree.items() if k != "adapter"}, PLAIN, data).module
    targets = [name for name, _ in find_adapter_layers(engine.module)]
    assert len(targets) == 14
    given = LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, use_rslora=kind == "rslora", use_dora=kind == "dora"
    )
    model = get_peft_model(base, given)
    theirs = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    ours = dict(engine.module.named_parameters())
    assert {n for n, p in theirs.items() if p.requires_grad} == {
        n for n, p in ours.items() if p.requires_grad
    }
    with torch.no_grad():
        for name, p in theirs.items():
            p.copy_(ours[name])
    optimizer = torch.optim.AdamW(
        parameter_groups(theirs.items(), config.optimizer), lr=1e-2, betas=(0.9, 0.95), eps=1e-8
    )
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    for _ in range(4):
        group = loader.next_group()
        result = engine.train_step(group, objective, 1e-2, False)
        losses = []
        count = sum(int((batch["shift_labels"] != -100).sum()) for batch in group)
        optimizer.zero_grad()
        for batch in group:
            logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch["shift_labels"].flatten(), reduction="sum")
            (loss / count).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert float(result.loss_sum) == pytest.approx(sum(losses), rel=1e-6)
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_under_autocast_the_base_is_held_in_bf16_and_no_number_changes(kind, model):
    """A base of the same values in fp32, which autocast rounds for each product, gives the same."""
    tree = asked(kind=kind)
    data = token_bundle()
    tree["model"] = model
    split = PLAIN | {"bf16": {"enabled": True}}
    config, resolved = resolve(tree, split, 1)
    engines = [make_engine(ALONE, tree, split, data) for _ in range(2)]
    frozen = {n for n, p in engines[0].module.named_parameters() if p.dtype == torch.bfloat16}
    assert frozen == {f"{name}.base_layer.weight" for name, _ in find_adapter_layers(engines[0].module)}
    every = list(engines[0].module.parameters())
    values, num_bytes = measure_reduced_base(engines[0].module)
    assert num_bytes == 2 * values
    assert sum(p.numel() * p.element_size() for p in every) == 4 * (sum(p.numel() for p in every)) - num_bytes
    for p in engines[1].module.parameters():
        p.data = p.data.float()
    assert measure_reduced_base(engines[1].module) == (0, 0)
    losses = []
    for engine in engines:
        loader = build_loader(config, resolved.batch_plan, data, engine)
        objective = build_objective(config)
        results = [engine.train_step(loader.next_group(), objective, 1e-2, False) for _ in range(4)]
        losses.append([(float(result.loss_sum), float(result.grad_norm)) for result in results])
    assert losses[0] == losses[1]
    with torch.no_grad():  # and outside of autocast they are one model in fp32
        own, exact = (engine.module.eval()(torch.arange(1, 9)[None]).logits for engine in engines)
    assert own.dtype == torch.float32
    assert torch.equal(own, exact)
    (written,) = engines[0].generate([[1, 2, 3]], GenerationSettings(4))
    assert 0 < len(written) <= 4


def test_what_the_given_adapter_trained_whole_is_trained_on_in_fp32(tmp_path):
    layer = "model.layers.0.self_attn.q_proj"
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    tensors = {f"{layer}.weight": values} | {
        f"{layer.replace('q_proj', 'k_proj')}.lora_{side}.weight": torch.zeros(shape)
        for side, shape in {"A": (4, 32), "B": (32, 4)}.items()
    }
    named = {f"base_model.model.{name}": each for name, each in tensors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    build_peft_config(AdapterConfig(rank=4, alpha=8.0)).save_pretrained(tmp_path)
    tree = asked(weights=str(tmp_path), targets=["model.layers.0.self_attn.k_proj"])
    tree["model"] = LLAMA | {"num_key_value_heads": 4}
    module = make_engine(ALONE, tree, PLAIN | {"bf16": {"enabled": True}}, token_bundle()).module
    weight = module.get_parameter(f"{layer}.weight")
    assert weight.requires_grad
    assert torch.equal(weight, values)
    assert module.get_parameter("model.layers.1.self_attn.q_proj.weight").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"r": ...}, r"has no r, expected the rank, a whole number above 0; save or fetch the adapter again"),
        ({"r": "4"}, r"has r '4', expected the rank"),
        ({"r": True}, r"has r True, expected the rank"),
        ({"lora_alpha": ...}, r"has no lora_alpha, expected a number above 0"),
        ({"lora_alpha": None}, r"has lora_alpha None"),
        ({"lora_alpha": math.nan}, r"has lora_alpha nan"),
        ({"lora_alpha": 0}, r"has lora_alpha 0"),
    ],
)
def test_an_adapter_config_without_rank_or_alpha_is_refused(tmp_path, changes, match):
    build_peft_config(AdapterConfig(rank=4, alpha=8.0)).save_pretrained(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    file = tmp_path / "adapter_config.json"
    given = json.loads(file.read_text())
    folder = PeftFolder.read_on_main(str(tmp_path), ALONE)
    completed = folder.complete_config(AdapterConfig(weights=str(tmp_path)))
    assert (completed.rank, completed.alpha) == (4, 8.0)
    changed = {key: value for key, value in (given | changes).items() if value is not ...}
    file.write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=rf"^adapter\.weights: {tmp_path}: adapter_config\.json {match}"):
        PeftFolder.read_on_main(str(tmp_path), ALONE)


def test_only_what_is_named_is_trained_and_the_rest_is_in_no_checkpoint():
    tree = asked(targets=["q_proj", "*.mlp.down_proj"], modules_to_save=["lm_head"])
    engine = make_engine(ALONE, tree, PLAIN, token_bundle())
    names = {shard.name for shard in engine.shards()}
    kept = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert names == kept
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "down_proj", "weight"}
    assert "lm_head.weight" in names


def test_first_values_follow_from_seed_and_name_alone():
    def first(**changes):
        engine = make_engine(ALONE, asked() | changes, PLAIN, token_bundle())
        return {
            name: layer.lora_A[ADAPTER_NAME].weight.detach()
            for name, layer in find_adapter_layers(engine.module)
        }

    one = first()
    fewer = first(adapter={"rank": 4, "targets": ["v_proj"]})
    other = first(seed=1)
    assert all(torch.equal(one[name], values) for name, values in fewer.items())
    assert not any(torch.equal(one[name], values) for name, values in other.items())
    assert len({float(values.flatten()[0]) for values in one.values()}) == len(one)


@pytest.mark.parametrize(
    ("adapter", "match"),
    [
        (
            {"targets": ["q_prj"]},
            r"adapter.targets: 'q_prj' matches no linear layer of the model; nearest: q_proj",
        ),
        (
            {"targets": ["embed_tokens"]},
            r"'embed_tokens' is no linear layer of the model; to train it fully: "
            r"adapter.modules_to_save=\[embed_tokens\]$",
        ),
        (
            {"targets": ["lm_head"]},
            r"the output layer, which gets no adapter; name it in adapter.modules_to_save",
        ),
        ({"modules_to_save": ["lm_haed"]}, r"'lm_haed' matches no module of the model; nearest: lm_head"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(adapter, match):
    with pytest.raises(ConfigError, match=match):
        make_engine(ALONE, asked(**adapter), PLAIN, token_bundle())


@pytest.mark.parametrize("targets", ["all-linear", ["all-linear"]])
def test_all_linear_is_taken_as_peft_means_it(targets):
    """Every linear layer but the output layer, which is the default."""

    def trained(**adapter):
        engine = make_engine(ALONE, asked(**adapter), PLAIN, token_bundle())
        return {name for name, p in engine.module.named_parameters() if p.requires_grad}

    assert trained(targets=targets) == trained()


def test_the_advice_for_an_embedding_trains_it():
    engine = make_engine(ALONE, asked(modules_to_save=["embed_tokens"]), PLAIN, token_bundle())
    assert any("embed_tokens" in name and p.requires_grad for name, p in engine.module.named_parameters())


@pytest.mark.parametrize(
    ("family", "width", "rate"), [("llama", 4096, 2.858e-4), ("qwen3", 4096, 4.730e-4), ("llama", 2000, 5e-4)]
)
def test_the_default_rate_is_the_published_formula(family, width, rate):
    model = torch.nn.Module()
    model.config = type("Config", (), {"hidden_size": width, "model_type": family})()
    assert suggest_learning_rate(model) == pytest.approx(rate, rel=1e-3)
