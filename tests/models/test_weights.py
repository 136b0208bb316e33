"""Weights from elsewhere in a model: names with wrappers, what does not fit, more words than before."""

from __future__ import annotations

import pytest
import torch
from parity.measure import ALONE
from safetensors.torch import load_file, save_file
from support.captured_logs import capture_logs
from support.tiny import recipe, resolve, token_bundle
from support.weights import SIZES, assert_same, cnn, copy_state, llama, load, refusal_message, small
from torch import nn

from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.weights import match_names
from pipeline.training.assemble import build_engine

PLAIN = {"torch": {"parallel": "single"}}
TIED = {"tie_word_embeddings": True}


# --- names --------------------------------------------------------------------------------------------


def between(middle):
    return lambda name: name.replace(".", f".{middle}", 1)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: f"_forward_module.module._orig_mod.{name}",
        lambda name: "module." + between("_orig_mod.module.")(name),
        lambda name: name if "layers.0" in name else f"module.{name}",
        lambda name: f"module.{name}" if "layers.0" in name else f"_orig_mod.{name}",
        lambda name: name.removeprefix("model."),  # of the base model of transformers
        lambda name: "module." + name.removeprefix("model."),
    ],
)
def test_wrappers_are_taken_from_any_of_the_keys(tmp_path, rename):
    expected = copy_state(llama(seed=3))
    save_file({rename(name): value for name, value in expected.items()}, tmp_path / "w.safetensors")
    assert_same(load(llama(), tmp_path), expected)


@pytest.mark.parametrize("wrapped", ["", "module.", "_forward_module.module."])
def test_a_submodule_that_is_called_module_keeps_its_name(tmp_path, wrapped):
    expected = copy_state(small(seed=3))
    save_file({wrapped + name: value for name, value in expected.items()}, tmp_path / "w.safetensors")
    assert_same(load(small(), tmp_path), expected)


NAMES = ["a.weight", "module.a.weight", "b.weight", "modules.b.weight", "b.module.weight"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (NAMES, {name: name for name in NAMES}),
        ([f"module.{name}" for name in NAMES], {name: f"module.{name}" for name in NAMES}),
        # One that is nothing in the model does not change what the others are.
        (
            ["module.a.weight", "module.module.a.weight", "module.c.weight"],
            {"a.weight": "module.a.weight", "module.a.weight": "module.module.a.weight"},
        ),
        # An exact name wins over one that becomes it.
        (["module.b.weight", "b.weight"], {"b.weight": "b.weight"}),
        (["b.weight", "module.b.weight"], {"b.weight": "b.weight"}),
        # Nothing is cut short that had no such prefix, or is no name then.
        (["my_module.b.weight", "modules.c.weight", "module.c.weight", "xb.weight"], {}),
        (["modules.b.weight", "b.weight_orig_mod"], {"modules.b.weight": "modules.b.weight"}),
        (
            ["a.weight", "_orig_mod.b.module.weight"],
            {"a.weight": "a.weight", "b.module.weight": "_orig_mod.b.module.weight"},
        ),
        (["module." * 40 + "b.weight"], {"b.weight": "module." * 40 + "b.weight"}),
        ([], {}),
    ],
)
def test_the_models_own_names_decide(keys, expected):
    assert match_names(keys, NAMES) == expected


def test_a_model_that_is_all_in_a_module_keeps_it():
    assert match_names(["module.weight"], ["module.weight", "more.weight"]) == {
        "module.weight": "module.weight"
    }


# --- what does not fit --------------------------------------------------------------------------------


def changed(state, tmp_path):
    """A file in which one thing is missing, seven are too many, and one has another shape."""
    state = dict(state)
    del state["norm.running_mean"]
    state["first.weight"] = torch.zeros(4, 5)
    state |= {f"more.{i}": torch.zeros(1) for i in range(7)}
    torch.save(state, tmp_path / "w.pt")
    return tmp_path / "w.pt"


def test_all_that_does_not_fit_is_named_in_one_line(tmp_path):
    path = changed(copy_state(small()), tmp_path)
    assert refusal_message(small(seed=1), path) == (
        f"model.weights: {path} does not fit the model; missing: norm.running_mean; unexpected: more.0, "
        "more.1, more.2, more.3, more.4 and 2 more; mismatched: first.weight ([4, 5] in the file, [4, 3] in "
        "the model); set model.strict=false to load only the tensors that fit"
    )


def test_not_strict_loads_what_fits_and_says_the_rest_once(tmp_path):
    there = copy_state(small(seed=3))
    before = copy_state(small())
    with capture_logs() as lines:
        model = load(small(), changed(there, tmp_path), strict=False)
    assert_same(model, there | {name: before[name] for name in ("norm.running_mean", "first.weight")})
    told = [line for line in lines if "missing" in line]
    assert len(told) == 1
    for word in ("norm.running_mean", "more.4 and 2 more", "first.weight ([4, 5] in the file"):
        assert word in told[0]


def test_nothing_that_fits_is_an_error_strict_or_not(tmp_path):
    save_file(copy_state(cnn()), tmp_path / "w.safetensors")
    for strict in (True, False):
        assert "no tensor in" in refusal_message(small(), tmp_path / "w.safetensors", strict=strict)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(4, 3, dtype=torch.int8), "int8 in the file, float32 in the model"),
        (torch.zeros(4, 3).to_sparse(), "sparse_coo on cpu in the file, float32 in the model"),
        (torch.zeros(4, 3, device="meta"), "strided on meta in the file, float32 in the model"),
        (torch.zeros(4, 3, dtype=torch.float8_e4m3fn), "float8_e4m3fn in the file, float32 in the model"),
        (torch.zeros(()), "[] in the file, [4, 3] in the model"),
        (torch.zeros(1).expand(1 << 40, 3), "[1099511627776, 3] in the file, [4, 3] in the model"),
    ],
)
def test_values_of_another_kind_do_not_fit(tmp_path, value, told):
    torch.save(copy_state(small()) | {"first.weight": value}, tmp_path / "w.pt")
    assert f"mismatched: first.weight ({told})" in refusal_message(small(), tmp_path / "w.pt")


@pytest.mark.slow
def test_of_tied_weights_one_is_enough(tmp_path):
    tied = llama(seed=3, extra=TIED)
    state = copy_state(llama(seed=3, extra=TIED))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
        save_file({n: v for n, v in state.items() if n != left_out}, tmp_path / "w.safetensors")
        model = load(llama(extra=TIED), tmp_path)
        assert_same(model, state)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.save(state, tmp_path / "both.pt")
    assert_same(load(llama(extra=TIED), tmp_path / "both.pt"), state)
    apart = state | {"lm_head.weight": state["lm_head.weight"] + 1}
    torch.save(apart, tmp_path / "apart.pt")
    assert "one tensor in the model, but different from" in refusal_message(
        llama(extra=TIED), tmp_path / "apart.pt"
    )
    save_file({n: v for n, v in state.items() if n != "lm_head.weight"}, tmp_path / "w.safetensors")
    assert "missing: lm_head.weight;" in refusal_message(llama(), tmp_path / "w.safetensors")
    neither = {n: v for n, v in state.items() if "layers" in n or "norm" in n}
    save_file(neither, tmp_path / "w.safetensors")
    assert "missing: model.embed_tokens.weight;" in refusal_message(
        llama(extra=TIED), tmp_path / "w.safetensors"
    )


# --- more words ---------------------------------------------------------------------------------------


class Talker(nn.Module):
    """A model of one's own that names its embeddings; its head has a bias."""

    def __init__(self, rows):
        super().__init__()
        self.words, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows)

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.head


def grown(values, rows):
    mean = values.double().mean(0, keepdim=True).float()
    return torch.cat([values, mean.expand(rows - len(values), *values.shape[1:])])


VOCABULARY_NAMES = ("model.embed_tokens.weight", "lm_head.weight", "words.weight", "head.weight", "head.bias")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (lambda rows, seed: llama(seed, rows), 200),
        (lambda rows, seed: llama(seed, rows, extra=TIED), 200),
        (lambda rows, seed: Talker(rows), 5000),  # more rows than are added up at once
    ],
)
def test_rows_for_new_tokens_are_the_mean_of_the_old(tmp_path, build, rows):
    old = copy_state(build(rows, 3))
    torch.save(old, tmp_path / "w.pt")
    model = load(build(rows + 57, 0), tmp_path / "w.pt", grow_vocabulary=True)
    expected = {n: grown(v, rows + 57) if n in VOCABULARY_NAMES else v for n, v in old.items()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9)
        assert torch.equal(value[: len(old[name])], old[name])
    assert load(build(rows, 0), tmp_path / "w.pt", grow_vocabulary=True)  # nothing to grow
    told = refusal_message(build(rows + 57, 0), tmp_path / "w.pt")
    assert "; set model.grow_vocabulary=true to add rows)" in told


@pytest.mark.slow
def test_a_vocabulary_never_shrinks_and_nothing_else_grows(tmp_path):
    save_file(copy_state(llama(vocabulary=300)), tmp_path / "w.safetensors")
    told = refusal_message(llama(), tmp_path / "w.safetensors", grow_vocabulary=True)
    assert "lm_head.weight ([300, 32] in the file, [257, 32] in the model)" in told
    state = copy_state(llama()) | {"model.norm.weight": torch.ones(31)}
    save_file(state, tmp_path / "w.safetensors")
    told = refusal_message(llama(), tmp_path / "w.safetensors", grow_vocabulary=True)
    assert "model.norm.weight ([31] in the file, [32] in the model)" in told
    save_file(copy_state(llama()) | {"lm_head.weight": torch.zeros(0, 32)}, tmp_path / "w.safetensors")
    assert "[0, 32] in the file" in refusal_message(llama(), tmp_path / "w.safetensors", grow_vocabulary=True)
    save_file(copy_state(cnn()), tmp_path / "w.safetensors")
    assert "has no get_input_embeddings()" in refusal_message(cnn(), tmp_path, grow_vocabulary=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "extra"), [("llama", {}), ("llama", TIED), ("gpt2", {}), ("gemma", {})]
)
def test_a_pretrained_model_grows_too(tmp_path, architecture, extra):
    request = ModelRequest(NoSharding(), vocab_size=200, sequence_length=24)
    old = build_model(CausalLMConfig(architecture=architecture, **SIZES, extra=extra), request, 3)
    old.save_pretrained(tmp_path)
    more = ModelRequest(NoSharding(), vocab_size=257, sequence_length=24)
    with pytest.raises(ModelError, match=r"has 257 entries; set model\.grow_vocabulary=true to add rows"):
        build_model(CausalLMConfig(pretrained=str(tmp_path)), more, 0)
    model = build_model(CausalLMConfig(pretrained=str(tmp_path), grow_vocabulary=True), more, 0)
    state = model.state_dict()
    for name, value in old.state_dict().items():
        assert torch.equal(state[name][: len(value)], value), name
        torch.testing.assert_close(state[name], grown(value, len(state[name])), rtol=0, atol=1e-9)
    head = model.get_output_embeddings()
    words = model.get_input_embeddings()
    assert (head.weight is words.weight) == (old.lm_head.weight is old.get_input_embeddings().weight)
    assert (model.config.vocab_size, words.num_embeddings, head.out_features) == (257, 257, 257)
    assert all(p.requires_grad for p in model.parameters())
    ids = torch.tensor([[0, 199, 256]])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(
            logits[:, :2, :200], old.eval()(input_ids=ids[:, :2]).logits, rtol=1e-4, atol=1e-5
        )
    fewer = ModelRequest(NoSharding(), vocab_size=150, sequence_length=24)
    kept = build_model(CausalLMConfig(pretrained=str(tmp_path), grow_vocabulary=True), fewer, 0)
    assert kept.config.vocab_size == 200
    fewer_rows = CausalLMConfig(pretrained=str(tmp_path), grow_vocabulary=True, vocab_size=150)
    with pytest.raises(ModelError, match="has vocab_size 200, but the recipe has 150"):
        build_model(fewer_rows, fewer, 0)
    padded = CausalLMConfig(pretrained=str(tmp_path), grow_vocabulary=True, vocab_size=256)
    assert build_model(padded, fewer, 0).lm_head.out_features == 256


# --- in a run -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_starts_from_them_and_one_that_goes_on_does_not_read_them(tmp_path):
    path = tmp_path / "w.safetensors"
    model = recipe()["model"]
    expected = copy_state(llama(seed=3))
    save_file(expected, path)
    config, resolved = resolve(recipe(model=model | {"weights": str(path)}), PLAIN, 1)
    assert_same(build_engine(config, resolved, ALONE, token_bundle()).module, expected)
    path.unlink()
    build_engine(config, resolved, ALONE, token_bundle(), resumes=True)
    with pytest.raises(ModelError, match="does not exist"):
        build_engine(config, resolved, ALONE, token_bundle())


def test_a_path_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(copy_state(cnn(seed=3)), tmp_path / "w.safetensors")
    assert_same(load(cnn(), "~/w.safetensors"), load_file(tmp_path / "w.safetensors"))
