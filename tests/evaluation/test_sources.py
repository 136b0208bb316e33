"""Every source of a model opens and gives the same numbers for the same weights; a bad one is one line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.base_model import write_base_model, write_conversations
from support.launch import ROOT, write_recipe
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pipeline
from pipeline.__main__ import main
from pipeline.cli.train import main as train
from pipeline.distributed.process_group import start_job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.evaluation.sources import open_source
from pipeline.models.generation import GenerationSettings

pytestmark = pytest.mark.slow

QUESTION = "What colour is grass? (7)"
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return a folder with a base, a run and an adapter's run, and their exports."""
    folder = tmp_path_factory.mktemp("sources")
    base = write_base_model(folder / "base")
    data = write_conversations(folder / "conversations.jsonl")
    recipe = str(ROOT / "launch" / "recipes" / "finetune_chat.yaml")
    changes = [
        *(f"model.pretrained={base}", f"data.paths=[{data}]", f"data.cache_dir={folder / 'cache'}"),
        *("wandb.mode=disabled", "sample.max_new_tokens=0", "batch.micro_batch_size=16", "max_steps=8"),
        *("data.sequence_length=64", "log.every=100", "eval.every=4", "checkpoint.every=4"),
        *("checkpoint.keep_last=9", "optimizer.learning_rate=3e-2"),
    ]
    grown = ["model.vocab_size=340", "model.grow_vocabulary=true"]
    adapter = ["adapter.rank=4", "adapter.kind=dora"]
    for name, more in (("run", []), ("lora", ["adapter=lora"]), ("grown", [*adapter, *grown])):
        assert train(["--config", recipe, f"run_dir={folder / name}", *changes, *more]) == 0
        assert main(["export", str(folder / name), str(folder / f"{name}_out")]) == 0
    assert main(["export", str(folder / "lora"), str(folder / "lora_merged"), "--merge"]) == 0
    return folder


def load(*arguments, **options):
    return open_source(*arguments, **options).load(start_job(Ranks(0, 0, 1, 1), distributed=False))


def measure(model):
    """(log-probabilities of a text (1, T, V), ids after it, end tokens, whether it is conversational)."""
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model.engine.module(input_ids=torch.tensor([ids])).logits
    generated = model.engine.generate([ids], GenerationSettings(12))
    return logits.float().log_softmax(-1), generated, model.end_ids, model.is_conversational


@pytest.mark.parametrize(
    ("reference", "sources"),
    [
        ("run", ["run/checkpoints/step-00000008", "run_out"]),
        ("lora", ["lora_out", "lora_merged"]),
        ("grown", ["grown_out"]),
        ("base", []),
    ],
)
def test_each_source_of_the_same_weights_gives_the_same_numbers(made, reference, sources):
    logprobs, *others = measure(load(made / reference))
    changed, *_ = measure(load(made / "base"))
    assert (reference == "base") == torch.equal(changed, logprobs[..., : changed.shape[-1]])
    assert len(others[1]) == 2, "the end of a document and the end of a turn"
    for source in sources:
        found, *found_others = measure(load(made / source))
        torch.testing.assert_close(found, logprobs, rtol=0, atol=2e-6)
        assert found_others == others, source


def test_a_step_of_a_run_is_another_model(made):
    of_step = load(made / "run", 4)
    assert of_step.name == "run"
    assert not torch.equal(measure(of_step)[0], measure(load(made / "run"))[0])


def test_the_base_of_an_adapter_may_be_elsewhere(made, tmp_path):
    shutil.copytree(made / "lora_out", tmp_path / "adapter")
    name_base(tmp_path / "adapter", None)
    shutil.copytree(made / "base", tmp_path / "moved")
    for file in (tmp_path / "adapter").glob("*token*"):
        file.unlink()  # then it has the base's
    expected = measure(load(made / "lora"))[0]
    found = load(tmp_path / "adapter", base=str(tmp_path / "moved"))
    torch.testing.assert_close(measure(found)[0], expected, rtol=0, atol=2e-6)
    # The base may be a run, too.
    over_run = measure(load(tmp_path / "adapter", base=str(made / "run")))[0]
    over_export = measure(load(tmp_path / "adapter", base=str(made / "run_out")))[0]
    torch.testing.assert_close(over_run, over_export, rtol=0, atol=2e-6)
    assert not torch.equal(over_run, expected)


def test_a_folder_is_loaded_as_transformers_loads_it_in_its_own_dtype(made, tmp_path, call):
    code, out, errors = call("export", made / "run_out", tmp_path / "half", "--dtype", "bf16")
    assert (code, errors) == (0, [])
    assert out.endswith(f'AutoModelForCausalLM.from_pretrained("{tmp_path / "half"}") opens it\n')
    found = load(tmp_path / "half")
    assert {p.dtype for p in found.engine.module.parameters()} == {torch.bfloat16}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    logprobs, ids, *_ = measure(found)
    prompt = found.tokenizer(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    output = theirs.generate(
        **prompt.convert_to_tensors("pt", prepend_batch_axis=True), max_new_tokens=12, do_sample=False
    )
    assert output[0, logprobs.shape[1] :].tolist() == ids[0]
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "half" / name).read_text() == (made / "run_out" / name).read_text()


def test_a_base_that_is_a_run_may_not_name_code_either(made, tmp_path, call):
    run = shutil.copytree(made / "run", tmp_path / "run")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["callbacks"] = ["evil:Callback"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    adapter = name_base(shutil.copytree(made / "lora_out", tmp_path / "adapter"), str(run))
    code, out, (error,) = call("generate", adapter, "--prompt", "x", "--no-import-paths")
    assert (code, out) == (2, "")
    assert "'evil:Callback' would run code, and --no-import-paths was given" in error


def test_an_adapter_is_merged_with_its_base(made, tmp_path, call):
    assert call("export", made / "grown_out", tmp_path / "merged", "--merge")[0] == 0
    found = measure(load(tmp_path / "merged"))[0]
    torch.testing.assert_close(found, measure(load(made / "grown"))[0], rtol=0, atol=2e-6)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["dtype"], config["vocab_size"]) == ("float32", 340)


def hub_cache(folder: Path, monkeypatch) -> Path:
    """Return the folder of `some/model` in an empty cache, with the hub out of reach."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = folder / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize(("name", "kind"), [("run_out", "hub"), ("lora_out", "adapter")])
def test_a_hub_name_is_read_from_the_cache_without_network(made, tmp_path, monkeypatch, name, kind):
    shutil.copytree(made / name, hub_cache(tmp_path, monkeypatch))
    source = open_source("some/model")
    assert (source.name, source.kind) == ("some/model", kind)
    assert torch.equal(measure(load("some/model"))[0], measure(load(made / name))[0])


def test_an_existing_path_is_never_a_hub_name(made, tmp_path, monkeypatch):
    shutil.copytree(made / "run_out", hub_cache(tmp_path / "cache", monkeypatch))
    shutil.copytree(made / "base", tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    source = open_source("some/model")
    assert (source.name, source.kind) == ("model", "folder")
    assert torch.equal(measure(load("some/model"))[0], measure(load(made / "base"))[0])


OWN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_folder_runs_only_where_it_is_asked_for(made, tmp_path, monkeypatch, call):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(made / "run_out", tmp_path / "own")
    (folder / "own.py").write_text(OWN)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    question = ["--prompt", QUESTION, "--temperature", "0"]
    code, _, errors = call("generate", folder, *question)
    assert code == 2
    assert errors[0].endswith("set model.trust_remote_code=true to run it")
    assert not list(tmp_path.rglob("ran"))
    expected = call("generate", made / "run_out", *question)
    assert call("generate", folder, *question, "model.trust_remote_code=true") == expected
    assert list(tmp_path.rglob("ran"))


def name_base(folder: Path, base: str | None) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def bad_empty(made, folder):
    folder.mkdir()


def bad_pickle(made, folder):
    shutil.copytree(made / "base", folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def bad_json(made, folder):
    shutil.copytree(made / "base", folder)
    (folder / "config.json").write_text("{")


def bad_weights(made, folder):
    shutil.copytree(made / "base", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def bad_tokenizer(made, folder):
    shutil.copytree(made / "base", folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()


def bad_adapter_without_base(made, folder):
    name_base(shutil.copytree(made / "lora_out", folder), None)


def bad_adapter_with_lost_base(made, folder):
    name_base(shutil.copytree(made / "lora_out", folder), "/nowhere/at/all")


def bad_adapter_over_wide_base(made, folder):
    wide = write_base_model(folder.with_name("wide"), hidden_size=64)
    name_base(shutil.copytree(made / "lora_out", folder), str(wide))


def bad_adapter_over_short_base(made, folder):
    short = shutil.copytree(made / "base", folder.with_name("short"))
    config = LlamaConfig.from_pretrained(short, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(short)
    name_base(shutil.copytree(made / "lora_out", folder), str(short))


def bad_adapter_over_adapter(made, folder):
    name_base(shutil.copytree(made / "lora_out", folder), str(made / "grown_out"))


def bad_adapter_of_pickle(made, folder):
    shutil.copytree(made / "lora_out", folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def bad_adapter_without_a_tensor(made, folder):
    shutil.copytree(made / "lora_out", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, folder / "adapter_model.safetensors")


def bad_adapter_that_imports(made, folder):
    shutil.copytree(made / "lora_out", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"megatron_config": {"a": 1}, "megatron_core": "a_module_that_is_not_there"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def bad_adapter_over_quantized_base(made, folder):
    quantized = shutil.copytree(made / "base", folder.with_name("quantized"))
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    name_base(shutil.copytree(made / "lora_out", folder), str(quantized))


def bad_reward_model(made, folder):
    shutil.copytree(made / "base", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))


BAD = {
    bad_empty: "is a folder without a model; expected a run directory (with checkpoints/), a fol",
    bad_pickle: "its weights are not safetensors (pytorch_model.bin); this command converts ",
    bad_json: "config.json is no JSON (Expecting property name",
    bad_weights: "the weights do not fit the model; missing: model.norm.weight; give weights and",
    bad_tokenizer: "has no tokenizer; name the one that the model was trained with",
    bad_adapter_without_base: "names no base (base_model_name_or_path); name it: --base FOLDER_OR_HUB_NAME",
    bad_adapter_with_lost_base: "whose base cannot be opened: /nowhere/at/all does not exist; expected ",
    bad_adapter_over_wide_base: "does not fit its base: ",
    bad_adapter_over_short_base: "has tensors that no layer takes: base_model.model.model.layers.1.",
    bad_adapter_over_adapter: "is an adapter, too; merge that first: ",
    bad_adapter_of_pickle: "has adapter_model.bin, a pickle, which could run code and is not opened",
    bad_adapter_without_a_tensor: "adapter_model.safetensors lacks base_model.model.model.layers.0.",
    bad_adapter_that_imports: "has a megatron_config, for which peft imports a module that the file names",
    bad_adapter_over_quantized_base: "its weights are already quantized; use the original model; it is from",
    bad_reward_model: "is a reward model, which gives scores, not text; give a language model",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_source_is_one_line(made, tmp_path, call, make):
    make(made, tmp_path / "bad")
    code, out, errors = call("generate", tmp_path / "bad", "--prompt", "x")
    assert (code, out, len(errors)) == (2, "", 1)
    assert BAD[make] in errors[0]
    assert str(tmp_path / "bad") in errors[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["generate", "./nope", "--prompt", "x"],
            "SOURCE: ./nope does not exist; expected a run directory (with ",
        ),
        (
            ["generate", "runs/nope", "--prompt", "x"],
            "SOURCE: 'runs/nope': there is no such run or folder, the hub does ",
        ),
        (["generate", "a b", "--prompt", "x"], "there is no such run or folder, and it is no valid hub name"),
        (
            ["generate", "{made}/run/model", "--prompt", "x"],
            "describes the model of a run, but has no weights; ",
        ),
        (["generate", "{made}/conversations.jsonl", "--prompt", "x"], "is a file; expected a run directory"),
        (
            ["generate", "{made}/base", "--step", "3", "--prompt", "x"],
            "is no run directory, so it has no steps; ",
        ),
        (
            ["generate", "{made}/base", "--base", "b", "--prompt", "x"],
            "is no adapter (no adapter_config.json); ",
        ),
        (
            ["generate", "{made}/run", "--base", "b", "--prompt", "x"],
            "is a run, which knows its base; remove ",
        ),
        (
            ["generate", "{made}/base", "data.x=1", "--prompt", "x"],
            "is no run, so it has no recipe; the only key ",
        ),
        (["generate", "{made}/base", "model.trust_remote_code=3", "--prompt", "x"], "trust_remote_code=true"),
        (
            ["generate", "{made}/base", "--prompt", "x", "--top-p", "0"],
            "--top-p is 0.0; give a number above 0",
        ),
        (["generate", "{made}/base", "--messages", "{made}/nope"], "/nope: No such file or directory"),
        (
            ["generate", "{made}/base", "--messages", "{made}/base/tokenizer.json"],
            "expected messages, such as ",
        ),
        (
            ["evaluate", "{made}/base"],
            "is no run, so it has no held-out data to evaluate on; name tasks: ds-pipeline evaluate ",
        ),
        (
            ["export", "{made}/lora_out", "{made}/o"],
            "is a folder of an adapter already; --merge merges it into ",
        ),
        (
            ["export", "{made}/base", "{made}/o", "--merge"],
            "is no adapter (no adapter_config.json); remove --merge",
        ),
        (
            ["export", "{made}/base", "{made}/run_out"],
            "run_out exists and is not empty; choose another folder",
        ),
        (
            ["export", "{made}/run", "{made}/o", "a=b"],
            "is a run, whose checkpoint determines this; remove it",
        ),
        (
            ["inspect"],
            "give either SOURCE (a run, a folder or a hub name) or --config RECIPE.yaml, and not both",
        ),
        (["inspect", "{made}/base", "--config", "x"], "and not both"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value[:2]).replace("{made}", ""),
)
def test_a_bad_command_is_one_line(made, call, monkeypatch, tmp_path, words, message):
    hub_cache(tmp_path, monkeypatch)
    code, out, errors = call(*(word.replace("{made}", str(made)) for word in words))
    assert (code, out, len(errors)) == (2, "", 1)
    assert message in errors[0]
    assert not (made / "o").exists()


def test_a_run_of_images_writes_no_text(call, tmp_path, made):
    sections = {"model": {"kind": "cnn"}, "data": {"kind": "digits"}, "objective": {"kind": "classification"}}
    recipe = write_recipe(tmp_path, max_steps=1, eval={"every": 1}, **sections)
    assert train(["--config", str(recipe), f"run_dir={tmp_path / 'run'}"]) == 0
    code, _, errors = call("generate", tmp_path / "run", "--prompt", "x")
    assert code == 2
    assert "a model of kind cnn writes no text" in errors[0]
    code, out, _ = call("inspect", tmp_path / "run")
    assert (code, "1,438 training images" in out) == (0, True)


def test_a_conversation_of_a_file_is_answered(made, tmp_path, call, monkeypatch):
    greedy = ["--temperature", "0", "--max-new-tokens", "8"]
    messages = [{"role": "user", "content": QUESTION}]
    expected = call("generate", made / "run", "--prompt", QUESTION, *greedy)[1]
    (tmp_path / "one.json").write_text(json.dumps(messages))
    assert call("generate", made / "run_out", "--messages", tmp_path / "one.json", *greedy)[1] == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(messages).encode())))
    assert call("generate", made / "run_out", "--messages", "-", *greedy)[1] == expected
    said = pipeline.generate(made / "run_out", messages, temperature=0, max_new_tokens=8)
    assert said == expected.strip()


def test_a_text_ends_before_a_stop_text(made, call):
    question = ["--prompt", QUESTION, "--max-new-tokens", "8"]
    plain = call("generate", made / "base", *question, "--temperature", "0")[1].strip()
    stopped = call("generate", made / "base", *question, "--temperature", "0", "--stop", plain[3:5])[1]
    assert stopped.strip() == plain.partition(plain[3:5])[0].strip() != plain


def test_inspect_shows_a_model_and_the_data_of_a_run(made, call):
    code, out, errors = call("inspect", made / "lora_out", "--no-color")
    assert (code, errors) == (0, [])
    cells = " ".join(out.split())
    for shown in (
        f"source adapter {made / 'lora_out'} over folder {made / 'base'}",
        "architecture LlamaForCausalLM",
        "precision float32 positions 128",
        "end tokens <|endoftext|> (0), <|im_end|> (2)",
        "<|im_start|>assistant It is 4.<|im_end|> <|im_start|>assistant",
    ):
        assert shown in cells
    assert "Training rows" not in out
    parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(made / "base").parameters())
    assert f"parameters {parameters:,}, without the adapter's" in cells
    code, out, errors = call("inspect", made / "run", "--samples", "1", "data.sequence_length=32")
    assert (code, errors) == (0, [])
    assert "Training rows of 32 tokens" in out
    assert "⟦It is" in out


def test_only_a_run_has_held_out_data(made):
    with pytest.raises(ConfigError, match="--tasks"):
        pipeline.evaluate(made / "base")
    assert pipeline.evaluate(made / "run", step=4)["eval/loss"] > pipeline.evaluate(made / "run")["eval/loss"]
