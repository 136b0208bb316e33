"""An adapter's run: what its checkpoints hold, peft and transformers open it, and others start from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.base_model import write_base_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

import pipeline
from pipeline.checkpoint.manifest import read_manifest
from pipeline.errors import CheckpointError, ModelError

IDS = torch.arange(1, 25)[None]
TEXT = "The sky is blue and the grass is green, snow is white. " * 40


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base"))


def settings(folder: Path, name: str, model: dict, adapter: dict | None, tokenizer: Path, steps: int = 4):
    (folder / "text.txt").write_text(TEXT)
    recipe = {
        "run_dir": str(folder / name),
        "max_steps": steps,
        "model": {"kind": "causal_lm", **model},
        "adapter": adapter,
        "data": {
            "kind": "text",
            "paths": [str(folder / "text.txt")],
            "eval_sets": {"same": {"paths": [str(folder / "text.txt")]}},
            "eval_fraction": 0.0,
            "sequence_length": 16,
            "tokenizer": {"pretrained": str(tokenizer)},
            "cache_dir": str(folder / "cache"),
            "prepare_workers": 1,
        },
        "batch": {"micro_batch_size": 4},
        "optimizer": {"learning_rate": 0.02},
        "wandb": {"mode": "disabled"},
        "sample": {"max_new_tokens": 0},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps({key: value for key, value in recipe.items() if value is not None}))
    return pipeline.load_settings(path)


def trained(asked) -> torch.Tensor:
    """Logits (1, T, V) of the run's model after its last step."""
    with pipeline.Run(asked) as run:
        run.train()
        with torch.no_grad():
            return run._parts.engine.module.eval()(IDS).logits


@torch.no_grad()
def logits_of(folder: Path, adapter: Path | None = None, **how) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    for layer in model.modules():
        layer.support_avx512bf16_for_cpu = False  # by which bitsandbytes' would compute in bf16
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()(IDS).logits


@pytest.mark.parametrize(
    "adapter",
    [
        {"kind": "lora", "rank": 4},
        {"kind": "rslora", "rank": 4, "targets": ["q_proj", "model.layers.1.mlp.*"], "init": "gaussian"},
        {"kind": "dora", "rank": 4, "modules_to_save": ["lm_head"]},
    ],
    ids=["lora", "rslora", "dora"],
)
def test_what_is_saved_opens_anywhere(tmp_path, base, adapter):
    expected = trained(settings(tmp_path, "run", {"pretrained": str(base)}, adapter, base))
    assert not torch.allclose(expected, logits_of(base), atol=1e-3), "nothing was trained"
    exported = pipeline.export(tmp_path / "run", tmp_path / "adapter")
    assert exported.is_adapter
    assert not exported.is_transformers
    torch.testing.assert_close(logits_of(base, tmp_path / "adapter"), expected, rtol=0.0, atol=1e-6)
    pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)
    trained_values = sum(t.numel() for t in load_file(exported.files[0]).values())
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 16 * trained_values + 1e6
    # A stage after it begins where it ended: over the same base, or with both in one.
    begun = {"kind": adapter["kind"], "weights": str(tmp_path / "adapter")}
    stacked = settings(tmp_path, "stacked", {"pretrained": str(base)}, begun, base)
    merged = settings(
        tmp_path, "onto", {"architecture": "llama", **SIZES, "weights": str(tmp_path / "run")}, None, base
    )
    evaluated = pipeline.evaluate(tmp_path / "run")["eval/loss"]
    for asked in (stacked, merged):
        with pipeline.Run(asked) as run:
            assert run.evaluate()["eval/loss"] == pytest.approx(evaluated, rel=1e-5)


def tied_copy(base: Path, folder: Path, tied: bool = True) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, tie_word_embeddings=tied)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def test_peft_opens_an_embedding_that_is_the_output_layer_too(tmp_path, base):
    own = tied_copy(base, tmp_path / "tied")
    adapter = {"rank": 2, "modules_to_save": ["embed_tokens"]}
    expected = trained(settings(tmp_path, "run", {"pretrained": str(own)}, adapter, base))
    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    torch.testing.assert_close(logits_of(own, tmp_path / "adapter"), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_new_tokens_are_trained(tmp_path, base, tied):
    own = tied_copy(base, tmp_path / "own", tied)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["green", "grass"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = {"pretrained": str(own), "grow_vocabulary": True}
    expected = trained(settings(tmp_path, "run", given, {"rank": 2}, tmp_path / "tokenizer", steps=2))
    assert expected.shape[-1] == len(tokenizer) > logits_of(own).shape[-1]
    pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    names = {name for name, _ in read_manifest(checkpoint).table.shapes if ".lora_" not in name}
    assert names == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set())


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 128,
}


def test_a_base_that_is_another_one_now_is_refused(tmp_path, base):
    own = tmp_path / "base"
    own.mkdir()
    for file in base.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    given = {"pretrained": str(own)}
    trained(settings(tmp_path, "run", given, {"rank": 2}, own, steps=2))
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"its adapter was trained over other weights than .*bring back"
    ):
        trained(settings(tmp_path, "run", given, {"rank": 2}, own, steps=3))


def test_an_adapter_of_another_model_is_refused(tmp_path, base):
    given = {"pretrained": str(base)}
    trained(settings(tmp_path, "run", given, {"rank": 2}, base, steps=1))
    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    weights = {"weights": str(tmp_path / "adapter")}
    new = {"architecture": "llama", **SIZES, "vocab_size": 512}
    for model, match in (
        (
            new | {"num_layers": 1},
            "an adapter of another model, or adapter.targets leaves them out|matches no linear",
        ),
        (
            new | {"intermediate_size": 48},
            r"is an adapter of another model: .* is \[64, 2\] there, and \[48, 2\]",
        ),
    ):
        with pytest.raises(pipeline.PipelineError, match=match):
            trained(settings(tmp_path, "other", model, weights, base))
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle, which is not opened"):
        trained(settings(tmp_path, "pickled", given, weights, base))


NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Of rows that are whole blocks of 64."""
    return write_base_model(tmp_path_factory.mktemp("wide"), hidden_size=64)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, wide) -> Path:
    """Whose linear layers have their weights the other way round."""
    folder = tmp_path_factory.mktemp("gpt2")
    words = AutoModelForCausalLM.from_pretrained(wide).config.vocab_size
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=words, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("wide", {"rank": 4}),
        ("wide", {"kind": "dora", "rank": 4, "targets": ["v_proj"]}),
        ("gpt2", {"rank": 4}),
    ],
    ids=["lora", "dora on a few", "gpt2 in bf16"],
)
def test_an_adapter_over_a_base_in_4_bits_opens_anywhere(tmp_path, request, capfd, wide, name, adapter):
    base = request.getfixturevalue(name)
    asked = {"quantize": "nf4", **adapter}
    expected = trained(settings(tmp_path, "run", {"pretrained": str(base)}, asked, wide))
    held = {"wide": "81,920 weights in 0.1 MiB", "gpt2": "98,304 weights in 0.1 MiB"}[name]
    assert f" over a base in nf4 ({held}, 0." in capfd.readouterr().err
    opened = logits_of(base, quantization_config=NF4)
    assert (opened - logits_of(base)).abs().max() > 1e-3, "nothing is quantised"
    assert not torch.allclose(expected, opened, atol=1e-3), "nothing was trained"
    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    found = logits_of(base, tmp_path / "adapter", quantization_config=NF4)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    merged = pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert 0.05 < merged.rounding_error < 0.12
    own = load_file(base / "model.safetensors")
    assert {key: t.dtype for key, t in load_file(merged.files[0]).items() if key in own} == {
        key: t.dtype for key, t in own.items()
    }
    near = {"rtol": 1e-5, "atol": 1e-5} if name == "wide" else {"rtol": 0.0, "atol": 0.02}
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, **near)
    evaluated = pipeline.evaluate(tmp_path / "run")["eval/loss"]
    with pipeline.Run(settings(tmp_path, "run", {"pretrained": str(base)}, asked, wide)) as run:
        assert run.evaluate()["eval/loss"] == pytest.approx(evaluated, rel=1e-5 if name == "wide" else 1e-3)


def test_a_base_that_is_quantised_already_is_refused(tmp_path, wide):
    trained(
        settings(
            tmp_path, "run", {"pretrained": str(tied_copy(wide, tmp_path / "own"))}, {"rank": 2}, wide, 1
        )
    )
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    match = r"quantised already \(bitsandbytes\); take the original ones"
    with pytest.raises(ModelError, match=match):
        pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    for given in (
        {"pretrained": str(tmp_path / "own")},
        {"architecture": "llama", "weights": str(tmp_path / "own")},
    ):
        with pytest.raises(ModelError, match=match):
            trained(settings(tmp_path, "other", given, {"rank": 2, "quantize": "nf4"}, wide))


def test_a_layer_without_an_adapter_is_merged_in_4_bits_whatever_the_file_calls_it(tmp_path, wide):
    own = load_file(wide / "model.safetensors")
    save_file({f"module.{name}": values for name, values in own.items()}, tmp_path / "own.safetensors")
    given = SIZES | {"hidden_size": 64, "intermediate_size": 128, "architecture": "llama"}
    given["weights"] = str(tmp_path / "own.safetensors")
    adapter = {"rank": 4, "targets": ["v_proj"], "quantize": "nf4"}
    expected = trained(settings(tmp_path, "run", given, adapter, wide))
    pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)
