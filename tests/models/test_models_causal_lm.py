"""Language models: built from a recipe, loaded from a folder, refused in one line where one cannot be."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.attention import refuse_lookahead
from pipeline.models.document_attention import ATTENTION_NAME
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.objectives import CausalLM

VOCABULARY = 300
ARCHITECTURES = ["llama", "gpt2"]
REQUEST = ModelRequest(
    NoSharding(), vocab_size=VOCABULARY, sequence_length=16, end_of_document_id=VOCABULARY - 1
)


def tiny(architecture="llama", **changes):
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    return CausalLMConfig(**{"architecture": architecture} | sizes | changes)


def build(config, seed=0, request=REQUEST):
    return apply_transforms(build_model(config, request, seed), config, TransformContext(torch.device("cpu")))


def tokens(seed=0, shape=(4, 16)):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, seed=0):
    return model.eval()(input_ids=tokens(seed)).logits


def assert_same_weights(one, other):
    for (name, a), (other_name, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(a, b), name


@pytest.fixture
def saved(tmp_path):
    """(model, folder it was saved to)."""
    model = build(tiny(), seed=3)
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def change_weights(folder, change):
    """Rewrites model.safetensors after `change(dict of tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- new models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_model_has_the_recipes_sizes(architecture):
    model = build(tiny(architecture))
    config = model.config
    assert config.model_type == architecture
    assert config.vocab_size == VOCABULARY
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (2, 4, 32)
    assert (config.n_inner if architecture == "gpt2" else config.intermediate_size) == 64
    assert config.max_position_embeddings == 16
    assert config.eos_token_id == config.bos_token_id == VOCABULARY - 1
    assert config.use_cache is False
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    assert logits(model).shape == (4, 16, VOCABULARY)


def test_what_follows_from_a_stated_size_follows_from_it():
    config = build(tiny(num_heads=8)).config
    assert (config.head_dim, config.num_key_value_heads) == (4, 8)
    assert build(tiny(num_key_value_heads=2)).config.num_key_value_heads == 2


def test_further_fields_go_in_by_their_own_names():
    model = build(tiny(extra={"tie_word_embeddings": True, "rms_norm_eps": 1e-4}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rms_norm_eps == 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loss_at_step_0_is_that_of_guessing(architecture):
    ids = tokens(1, (8, 16))
    loss = CausalLM()(build(tiny(architecture)), {"input_ids": ids, "labels": ids})
    assert (loss.loss_sum / loss.count).item() == pytest.approx(math.log(VOCABULARY), rel=0.02)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_initial_weights_depend_on_the_seed_alone(architecture):
    first = build(tiny(architecture), seed=5)
    torch.rand(1000)  # whatever was drawn before
    torch.set_default_dtype(torch.float32)
    again = build(tiny(architecture), seed=5)
    assert_same_weights(first, again)
    other = build(tiny(architecture, attention="eager", activation_checkpointing="full"), seed=5)
    assert_same_weights(first, other)
    longer = build(tiny(architecture), seed=6)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), longer.parameters(), strict=True)]
    drawn = [p.std() > 0 and p.dim() > 1 for p in first.parameters()]
    assert not any(s and d for s, d in zip(same, drawn, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_initial_weights_are_drawn_as_transformers_draws_them(architecture):
    mine = build(tiny(architecture, hidden_size=128))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(mine.config, dtype=torch.float32)
    for (name, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert a.mean().item() == pytest.approx(b.mean().item(), abs=2e-3), name
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.1), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_weights_compute_what_transformers_computes(architecture):
    mine = build(tiny(architecture))
    theirs = AutoModelForCausalLM.from_config(mine.config, dtype=torch.float32)
    theirs.load_state_dict(mine.state_dict())
    gelu = 2e-7 if architecture == "gpt2" else 0  # which is torch's own here, and rounds otherwise
    torch.testing.assert_close(logits(mine), logits(theirs), rtol=0, atol=gelu)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activation_checkpointing_changes_no_gradient(architecture):
    ids = tokens()
    gradients = []
    modes = [("none", False), ("full", False), ("selective", False), (2, False), ("full", True)]
    for mode, offload in modes:  # on a CPU what is offloaded has nowhere else to wait
        keys = {"activation_checkpointing": mode, "activation_offload": offload}
        model = build(tiny(architecture, **keys, extra=no_dropout(architecture)))
        assert model.is_gradient_checkpointing == (mode != "none")
        CausalLM()(model.train(), {"input_ids": ids, "labels": ids}).loss_sum.backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def no_dropout(architecture):
    return {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if architecture == "gpt2" else {}


# --- weights from a folder ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_comes_back_the_same(tmp_path, architecture):
    model = build(tiny(architecture), seed=4)
    model.save_pretrained(tmp_path)
    again = build(CausalLMConfig(pretrained=str(tmp_path)), seed=0)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert again.config.use_cache is False
    assert all(p.dtype == torch.float32 and p.requires_grad for p in again.parameters())


def test_half_precision_weights_are_loaded_into_fp32(tmp_path):
    model = build(tiny(), seed=4).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = build(CausalLMConfig(pretrained=str(tmp_path)))
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.float())


def test_stating_what_the_weights_are_is_fine_and_anything_else_is_not(saved):
    _, folder = saved
    build(CausalLMConfig(pretrained=str(folder), num_layers=2, hidden_size=32, extra={"hidden_act": "silu"}))
    with pytest.raises(
        ModelError, match="has num_hidden_layers 2, but the recipe has 3; remove it from the recipe"
    ):
        build(CausalLMConfig(pretrained=str(folder), num_layers=3))
    with pytest.raises(
        ModelError, match=r"config of a llama has no num_hiden_layers \(did you mean .num_hidden_layers"
    ):
        build(CausalLMConfig(pretrained=str(folder), extra={"num_hiden_layers": 3}))


def test_missing_and_unexpected_weights_are_named(saved):
    _, folder = saved

    def rename(tensors):
        tensors["model.layers.1.mlp.upward.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        del tensors["model.norm.weight"]

    change_weights(folder, rename)
    with pytest.raises(ModelError) as caught:
        build(CausalLMConfig(pretrained=str(folder)))
    message = str(caught.value)
    assert "\n" not in message
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.1.mlp.upward.weight" in message


def test_two_sets_of_weights_are_told_with_what_to_delete(saved):
    model, folder = saved
    model.save_pretrained(folder / "parts", max_shard_size="20KB")
    for path in (folder / "parts").glob("model*"):
        path.rename(folder / path.name)
    shutil.copytree(folder, copy := folder.parent / "a copy")
    with pytest.raises(ModelError) as caught:
        build(CausalLMConfig(pretrained=str(folder)))
    message = str(caught.value)
    assert (
        "two sets of weights: model.safetensors, and the files that model.safetensors.index.json" in message
    )
    advised = re.search(r"(rm \S+), or (rm \S+)$", message).groups()
    for each, command in zip((folder, copy), advised, strict=True):
        subprocess.run(command.replace(str(folder), shlex.quote(str(each))), shell=True, check=True)
        assert_same_weights(build(CausalLMConfig(pretrained=str(each))), model)


@pytest.mark.slow
def test_weights_that_are_no_safetensors_are_told_with_the_command_that_writes_them(saved, monkeypatch):
    model, folder = saved
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"its weights are not safetensors \(pytorch_model\.bin\); "
    ) as caught:
        build(CausalLMConfig(pretrained=str(folder)))
    python, option, program = shlex.split(str(caught.value).partition("this command converts them: ")[2])
    assert (python, option) == ("python", "-c")
    monkeypatch.chdir(folder.parent)
    exec(program, {})
    assert_same_weights(build(CausalLMConfig(pretrained=str(folder))), model)


def test_a_folder_may_begin_with_a_tilde(saved, monkeypatch):
    model, folder = saved
    monkeypatch.setenv("HOME", str(folder.parent))
    again = build(CausalLMConfig(pretrained="~/model"))
    assert_same_weights(again, model)


def test_an_encoder_has_no_language_model_to_train(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="vit is not a language model, since its config has no vocab_size"):
        build(CausalLMConfig(pretrained=str(tmp_path)))


# --- what does not fit --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CausalLMConfig(), "give exactly one of architecture (new weights) and pretrained"),
        (tiny(pretrained="x"), "give exactly one of architecture (new weights) and pretrained"),
        (tiny("qqqqqq"), "model.architecture: transformers has no 'qqqqqq'"),
        (tiny("gpt2", num_key_value_heads=2), "model: the config of a gpt2 has no num_key_value_heads"),
        (tiny(extra={"attention_bias": "yes"}), "llama: Field 'attention_bias' expected bool"),
        (tiny(extra={"pad_token_id": 99999}), "Padding_idx must be within num_embeddings (model.extra has"),
        (tiny(extra={"attention_dropout": 2.0}), "model.extra.attention_dropout is 2.0; expected 0 to 1"),
        (tiny("gpt2", extra={"attn_pdrop": -1.0}), "model.extra.attn_pdrop is -1.0; expected 0 to 1"),
        (tiny(extra={"head_dim": -4}), "(model.extra has head_dim)"),
        (
            tiny("gemma2", attention="sdpa"),
            "attention: sdpa ignores the cap on attention scores of a gemma2; write auto",
        ),
        (tiny(num_heads=3), "(32) is not a multiple of the number of attention heads (3)"),
        (tiny("gpt2", num_heads=3), "divisible"),
        (tiny(num_key_value_heads=3), "num_heads is 4, expected a multiple of num_key_value_heads (3)"),
        (tiny("gpt2", max_sequence_length=15), "16, but the model has 15 positions"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_built_is_one_line(config, message):
    with pytest.raises(ModelError) as caught:
        build(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mistral", "mixtral", "gemma", "gpt_neox"])
def test_the_sizes_of_one_architecture_do_for_another(architecture):
    model = build(tiny(architecture))
    ids = tokens()
    CausalLM()(model, {"input_ids": ids, "labels": ids}).loss_sum.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("is_pretrained", [False, True])
def test_capped_scores_are_capped_by_what_transformers_computes_too(is_pretrained, tmp_path):
    """Its sdpa of older releases leaves the cap out."""
    config = tiny("gemma2", extra={"head_dim": 8, "attn_logit_softcapping": 0.01})
    model = build(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(100)
    if is_pretrained:
        model.save_pretrained(tmp_path)
        model = build(CausalLMConfig(pretrained=str(tmp_path)))
    ours = logits(model)
    assert model.config._attn_implementation == ATTENTION_NAME
    mask = torch.ones(4, 16, dtype=torch.long)  # goes through transformers'
    torch.testing.assert_close(model(input_ids=tokens(), attention_mask=mask).logits, ours)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (logits(model) - ours).abs().max() > 0.1 * ours.abs().max()


def test_data_without_a_tokenizer_needs_a_vocabulary_in_the_recipe():
    request = ModelRequest(NoSharding())
    with pytest.raises(
        ModelError, match=r"model\.vocab_size is not given, and the data has no tokenizer; write the number"
    ):
        build(tiny(), request=request)
    assert build(tiny(vocab_size=77), request=request).config.vocab_size == 77


def test_a_loaded_model_is_held_to_the_data_as_well(saved):
    _, folder = saved
    config = CausalLMConfig(pretrained=str(folder))
    with pytest.raises(ModelError, match=r"data\.sequence_length is 17, but the model has 16 positions"):
        build(config, request=ModelRequest(NoSharding(), vocab_size=VOCABULARY, sequence_length=17))
    with pytest.raises(ModelError, match="but the tokenizer has 301 entries"):
        build(config, request=ModelRequest(NoSharding(), vocab_size=301, sequence_length=16))


@pytest.mark.parametrize(
    ("architecture", "field"), [("bert", "is_decoder"), ("roberta", "is_decoder"), ("xlm", "causal")]
)
def test_an_encoder_trained_as_a_language_model_is_an_error_whose_advice_works(tmp_path, architecture, field):
    """New and pretrained, where every row is one document."""
    more = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes, **more))
    encoder.save_pretrained(tmp_path)
    cure = f"write model.extra: {{{field}: true}}"
    for fields in ({"pretrained": str(tmp_path)}, {"architecture": architecture, "hidden_size": 32}):
        if fields.get("architecture"):
            fields |= {"num_layers": 2, "num_heads": 4, "extra": {"pad_token_id": 0}}
        with pytest.raises(ModelError, match="sees the tokens that it predicts") as error:
            build(CausalLMConfig(**fields))
        assert cure in str(error.value)
        decoder = build(CausalLMConfig(**fields | {"extra": fields.get("extra", {}) | {field: True}}))
        ids = tokens()[:1, :8].clamp(min=3)  # RoBERTa counts positions from 2 on
        with torch.no_grad():
            before = decoder.eval()(input_ids=ids).logits[:, :-1]
            ids[0, -1] = 7
            assert torch.equal(decoder(input_ids=ids).logits[:, :-1], before)


def test_a_small_copy_that_returns_no_logits_is_not_tested_for_later_tokens(monkeypatch):
    model = build(tiny(attention="eager"))
    trial = SimpleNamespace(to=lambda *_: lambda **_: SimpleNamespace(logits=None))
    monkeypatch.setattr("pipeline.models.attention.build_trial_model", lambda _: trial)
    refuse_lookahead(model, torch.device("cpu"), torch.float32)


def test_a_transformers_that_is_too_old_to_recompute_is_told(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.22.1")
    with pytest.raises(ModelError, match=r"5\.23 or newer, and 5\.22\.1 is installed: pip install 'tr"):
        build(tiny(activation_checkpointing="full"))
