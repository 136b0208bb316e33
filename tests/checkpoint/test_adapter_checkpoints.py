"""An adapter's run: what its checkpoints hold, peft and transformers open it, and others start from it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.base_model import write_base_model
from support.checkpoints import flip_last_bit
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

import pipeline
from pipeline.__main__ import main
from pipeline.checkpoint import adapters
from pipeline.checkpoint.manifest import read_manifest
from pipeline.checkpoint.reader import CheckpointWeights
from pipeline.errors import CheckpointError, ConfigError, ModelError

pytestmark = pytest.mark.slow

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


@pytest.mark.daily("dora")
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
    assert exported.auto_class is None
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


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base) -> Path:
    """A folder with a `run` of an adapter over the base, and the `adapter` that it exports."""
    folder = tmp_path_factory.mktemp("adapted")
    trained(settings(folder, "run", {"pretrained": str(base)}, {"rank": 2}, base, steps=1))
    pipeline.export(folder / "run", folder / "adapter")
    return folder


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


@pytest.mark.daily("True")
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


def copied(base: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def aged(file: Path, seconds: int) -> None:
    """Set the time of its last change so far back."""
    then = time.time_ns() - seconds * 10**9
    os.utime(file, ns=(then, then))


def test_a_base_whose_last_byte_changed_is_refused_everywhere(tmp_path, capsys):
    """The changed value lies behind the first MiB of its tensor."""
    own = write_base_model(tmp_path / "base", hidden_size=512)
    file = own / "model.safetensors"
    name, values = max(load_file(file).items(), key=lambda item: item[1].numel())
    assert values.nbytes > 1 << 20
    given = {"pretrained": str(own)}
    run = tmp_path / "run"
    adapter = {"rank": 2, "targets": ["model.layers.0.self_attn.q_proj"]}
    trained(settings(tmp_path, "run", given, adapter, own, steps=1))
    pipeline.export(run, tmp_path / "before")
    weights = load_file(file)
    weights[name].view(-1)[-1] += 1.0
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"was trained on top of other weights than .*; restore the weights of"
    ):
        trained(settings(tmp_path, "run", given, adapter, own, steps=2))
    changed = (
        rf"is an adapter, and its base, {own}, has other weights than those on top of which the adapter was "
        "trained; restore them"
    )
    for merge in (False, True):
        with pytest.raises(CheckpointError, match=changed):
            pipeline.export(run, tmp_path / "after", merge=merge)
    assert not (tmp_path / "after").exists()
    new = settings(tmp_path, "new", {"architecture": "llama", **SIZES, "weights": str(run)}, None, own)
    with pytest.raises(CheckpointError, match=changed):
        trained(new)
    for command in (["evaluate", str(run)], ["generate", str(run), "--prompt", "a"]):
        capsys.readouterr()
        assert main(command) == 2
        assert (
            "has other weights than those on top of which the adapter was trained" in capsys.readouterr().err
        )


def test_the_same_bytes_elsewhere_are_the_same_base(tmp_path, base, capsys, monkeypatch):
    own = copied(base, tmp_path / "base")
    trained(settings(tmp_path, "run", {"pretrained": str(own)}, {"rank": 2}, own, steps=1))
    own.rename(tmp_path / "moved")
    moved = {"pretrained": str(tmp_path / "moved")}
    monkeypatch.setattr(adapters, "SLOW_READ_BYTES", 0)
    capsys.readouterr()
    trained(settings(tmp_path, "run", moved, {"rank": 2}, tmp_path / "moved", steps=3))
    assert re.search(r"all weights of the adapter's base to detect changes: \d+ KiB", capsys.readouterr().err)
    pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    gone = tmp_path / "gone"
    (tmp_path / "moved").rename(gone)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--merge"]) == 2
    error = capsys.readouterr().err
    assert f"the folder {tmp_path / 'moved'} is missing, which was the base of this adapter; if it" in error
    names = {"ADAPTER": tmp_path / "adapter", "OUT": tmp_path / "again", "FOLDER": gone}
    for command in re.findall(r"ds-pipeline (export .*?)(?:, then|\n)", error):
        words = [str(names.get(word, word)) for word in command.split()]
        program = [sys.executable, "-m", "pipeline", *words]  # a new process: it imports peft itself
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), "no warning of a library either"
    merged, again = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    torch.testing.assert_close(again, merged, rtol=0.0, atol=1e-6)


def test_an_adapter_in_half_precision_is_merged_in_fp32(tmp_path, base, adapted, monkeypatch):
    """The case of bf16 master weights, which a checkpoint stores in bf16."""
    run = adapted / "run"
    read = CheckpointWeights.read
    monkeypatch.setattr(CheckpointWeights, "read", lambda source, name: read(source, name).bfloat16())
    adapter = load_file(pipeline.export(run, tmp_path / "adapter").files[0])
    merged = load_file(pipeline.export(run, tmp_path / "merged", merge=True).files[0])
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    layer = "model.layers.0.self_attn.q_proj"
    low, high = (adapter[f"base_model.model.{layer}.lora_{side}.weight"] for side in "AB")
    before = load_file(base / "model.safetensors")[f"{layer}.weight"]
    expected = before + about["lora_alpha"] / about["r"] * (high @ low)
    torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=0.0, atol=1e-6)


def test_a_base_of_random_weights_is_in_no_file(tmp_path, base):
    given = {"architecture": "llama", **SIZES}
    for steps in (1, 2):  # it goes on
        trained(settings(tmp_path, "run", given, {"rank": 2}, base, steps=steps))
    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] is None  # peft would look for a folder or a repository
    message = (
        "the base has random weights, drawn from seed 0, which no file contains; train an adapter on top of "
        "model.pretrained"
    )
    with pytest.raises(ModelError, match=message):
        pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    with pytest.raises(ModelError, match=message):
        pipeline.evaluate(tmp_path / "run")


@pytest.mark.nightly
def test_files_that_did_not_change_are_not_read_again(tmp_path, base):
    """Content that changed without another size, time or inode goes unnoticed."""
    own = copied(base, tmp_path / "base")
    file = own / "model.safetensors"
    aged(file, 60)
    trained(settings(tmp_path, "run", {"pretrained": str(own)}, {"rank": 2}, base, steps=1))
    stat = file.stat()
    flip_last_bit(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    pipeline.export(tmp_path / "run", tmp_path / "unnoticed", merge=True)
    trained(settings(tmp_path, "run", {"pretrained": str(own)}, {"rank": 2}, base, steps=2))
    aged(file, 30)
    with pytest.raises(CheckpointError, match="has other weights"):
        pipeline.export(tmp_path / "run", tmp_path / "noticed", merge=True)


@pytest.mark.parametrize("wrong", ["lacks a layer", "not a number", "cut short"])
def test_a_damaged_adapter_is_named(tmp_path, base, adapted, wrong):
    given = {"pretrained": str(base)}
    copied(adapted / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    config = tmp_path / "adapter" / "adapter_config.json"
    about = json.loads(config.read_text())
    about["target_modules"] = sorted({name.rpartition(".")[2] for name in about["target_modules"]})
    config.write_text(json.dumps(about))  # as peft itself is usually told
    weights = load_file(file)
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    match = "cannot be read as safetensors"
    if wrong == "lacks a layer":
        weights = {name: values for name, values in weights.items() if not name.startswith(layer)}
        match = r"lacks model\.layers\.1\.self_attn\.q_proj, which target_modules in adapter_config"
    if wrong == "not a number":
        weights[f"{layer}.lora_A.weight"][0, 0] = math.nan
        match = rf"{layer}\.lora_A\.weight has values that are not finite"
    save_file(weights, file, {"format": "pt"})
    if wrong == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"^adapter\.weights: {file}:? {match}"):
        trained(settings(tmp_path, "other", given, {"weights": str(tmp_path / "adapter")}, base))


def test_an_adapter_in_the_place_of_a_model_says_what_to_write(tmp_path, base, adapted):
    adapter = adapted / "adapter"
    advice = f"write model.pretrained={base} and adapter.weights={adapter} to train it further"
    with pytest.raises(ConfigError, match=f"is an adapter .*; {advice}"):
        settings(tmp_path, "other", {"pretrained": str(adapter)}, None, base)
    trained(settings(tmp_path, "other", {"pretrained": str(base)}, {"weights": str(adapter)}, base, 1))


def test_an_adapter_of_another_model_is_refused(tmp_path, base, adapted):
    weights = {"weights": str(copied(adapted / "adapter", tmp_path / "adapter"))}
    new = {"architecture": "llama", **SIZES, "vocab_size": 512}
    for model, match in (
        (
            new | {"num_layers": 1},
            "but no layer of this model gets them; give an adapter of this model|matches no linear",
        ),
        (
            new | {"intermediate_size": 48},
            r"is an adapter of another model: .* has shape \[64, 2\], expected \[48, 2\]",
        ),
    ):
        with pytest.raises(pipeline.PipelineError, match=match):
            trained(settings(tmp_path, "other", model, weights, base))
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle, which could run code and is not opened"):
        trained(settings(tmp_path, "pickled", {"pretrained": str(base)}, weights, base))


NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model whose rows are whole blocks of 64."""
    return write_base_model(tmp_path_factory.mktemp("wide"), hidden_size=64)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, wide) -> Path:
    """A model whose linear layers have transposed weights."""
    folder = tmp_path_factory.mktemp("gpt2")
    words = AutoModelForCausalLM.from_pretrained(wide).config.vocab_size
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=words, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.daily("lora")
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
    held = {"wide": "81,920 weights in 56 KiB", "gpt2": "98,304 weights in 58 KiB"}[name]
    assert f" over a base in nf4 ({held}, 0." in capfd.readouterr().err
    opened = logits_of(base, quantization_config=NF4)
    assert (opened - logits_of(base)).abs().max() > 1e-3, "nothing is quantized"
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


@pytest.mark.nightly
def test_a_base_that_is_quantized_already_is_refused(tmp_path, wide):
    trained(
        settings(
            tmp_path, "run", {"pretrained": str(tied_copy(wide, tmp_path / "own"))}, {"rank": 2}, wide, 1
        )
    )
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    match = r"already quantized \(bitsandbytes\); use the original model"
    with pytest.raises(ModelError, match=match):
        pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    for given in (
        {"pretrained": str(tmp_path / "own")},
        {"architecture": "llama", "weights": str(tmp_path / "own")},
    ):
        with pytest.raises(ModelError, match=match):
            trained(settings(tmp_path, "other", given, {"rank": 2, "quantize": "nf4"}, wide))


@pytest.mark.nightly
def test_a_layer_without_an_adapter_is_merged_in_4_bits_whatever_the_file_calls_it(tmp_path, wide):
    own = load_file(wide / "model.safetensors")
    save_file({f"module.{name}": values for name, values in own.items()}, tmp_path / "own.safetensors")
    given = SIZES | {"hidden_size": 64, "intermediate_size": 128, "architecture": "llama"}
    given["weights"] = str(tmp_path / "own.safetensors")
    adapter = {"rank": 4, "targets": ["v_proj"], "quantize": "nf4"}
    expected = trained(settings(tmp_path, "run", given, adapter, wide))
    pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)
