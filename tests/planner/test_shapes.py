"""The model that the planner sees of a recipe, against the one that a run builds of it."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants
from parity.measure import ALONE
from support.tiny import make_engine, recipe, settings, token_bundle

from pipeline.config.settings import load_settings
from pipeline.config.shipped import RECIPES
from pipeline.errors import ConfigError, ModelError
from pipeline.planner.shapes import read_hub_models, read_model_spec, read_pretrained_config

PLAIN = {"torch": {"parallel": "single"}}
LLAMA = recipe()["model"]
GPT2 = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 2, "num_heads": 4, "hidden_size": 32}
TIED = LLAMA | {"extra": {"tie_word_embeddings": True}}
CASES = {
    "new": {"model": LLAMA},
    "grouped keys": {"model": LLAMA | {"num_key_value_heads": 2}},
    "heads that do not divide": {"model": LLAMA | {"architecture": "qwen2", "num_heads": 2}},
    "gpt2": {"model": GPT2},
    "frozen": {"model": LLAMA | {"freeze": ["*norm*", "model.layers.0.*"]}},
    "frozen, tied": {"model": TIED | {"freeze": ["lm_head.*"]}},
    "lora": {"adapter": {"rank": 4}},
    "lora, gpt2": {"model": GPT2, "adapter": {"rank": 4}},
    "dora": {"adapter": {"kind": "dora", "rank": 4, "targets": ["q_proj", "*.0.mlp.down_proj"]}},
    "saved whole": {"adapter": {"rank": 4, "modules_to_save": ["lm_head", "model.layers.1"]}},
    "saved whole, tied": {"model": TIED, "adapter": {"rank": 4, "modules_to_save": ["lm_head"]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_has_the_parameters_that_a_run_has(case):
    tree = recipe(**case)
    tree["model"] = {**tree["model"], "vocab_size": 257}
    module = make_engine(ALONE, tree, PLAIN, token_bundle()).module
    model = read_model_spec(settings(tree, PLAIN).config)
    assert model is not None
    ours = {p.name: (p.shape, p.trains) for p in model.parameters}
    assert ours == {n: (tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"model": LLAMA | {"freeze": ["model.layer.*"]}}, "model.freeze: 'model.layer.*' matches no"),
        (
            {"adapter": {"targets": ["embed_tokens"]}},
            "'embed_tokens' is no linear layer of the model; to train it fully: adapter.modules_to_save=",
        ),
        ({"adapter": {"targets": ["k_prj"]}}, "adapter.targets: 'k_prj' matches no linear layer"),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_before_the_run(case, words):
    with pytest.raises(ConfigError, match=words):
        read_model_spec(settings(recipe(**case), PLAIN).config)


def test_a_folder_needs_a_config_and_no_weights(tmp_path):
    stated = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    tree = recipe(model={"kind": "causal_lm", "pretrained": str(tmp_path)})
    model = read_model_spec(settings(tree, PLAIN).config)
    assert model is not None
    assert model.dimensions.layers == 3
    for text, words in (("{", "is no JSON"), ("[]", "no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=words):
            read_pretrained_config(str(tmp_path))
    with pytest.raises(ModelError, match="there is no such folder"):
        read_pretrained_config("./nowhere")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768), ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512)],
)
def test_a_model_that_a_shipped_recipe_names_is_known_without_the_hub(
    name, parameters, monkeypatch, tmp_path
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    tree = recipe(model={"kind": "causal_lm", "pretrained": name})
    model = read_model_spec(settings(tree, PLAIN).config)
    assert (model.name, model.numel) == (name, parameters)
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ModelError, match="the folder has no config"):
        read_model_spec(settings(tree, PLAIN).config)


def test_each_hub_model_of_a_shipped_recipe_is_known():
    configs = [load_settings(path, None, []).config for path in RECIPES.glob("*.yaml")]
    named = {config.model.pretrained_from for config in configs} - {None}
    assert named == set(read_hub_models())


def test_what_has_to_be_built_is_not_guessed():
    assert read_model_spec(settings(recipe(model={"kind": "cnn"}), PLAIN).config) is None
    other = LLAMA | {"architecture": "deepseek_v3"}
    assert read_model_spec(settings(recipe(model=other), PLAIN).config) is None
