"""`python -m pipeline plan`, as it is typed: what it says, what it refuses, what it does not import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.config.settings import load_settings
from pipeline.models.sizes import count

LLAMA_8B = ["--config", str(ROOT / "launch" / "recipes" / "llama_8b.yaml")]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")]
CNN = str(ROOT / "launch" / "recipes" / "digits_cnn.yaml")
ON_8 = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "8"]


def plan(capsys, *words):
    assert main(["plan", *words]) in (0, None)
    return capsys.readouterr().out


def plan_json(capsys, *words):
    return json.loads(plan(capsys, *words, "--json"))


def test_it_answers_without_torch_and_what_stands_on_it():
    code = (
        "import sys; from pipeline.__main__ import main; main(sys.argv[1:]); "
        "print([n for n in ('torch', 'transformers', 'deepspeed', 'numpy') if n in sys.modules])"
    )
    words = [sys.executable, "-c", code, "plan", *ON_8]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for text in (
        "8,030,261,248 parameters",
        "optimizer states",
        "activations kept",
        "MFU",
        "2048.0 (assumed)",
        "attention is priced for documents of 2,048 tokens",
    ):
        assert text in done.stdout
    assert re.search(r"there is .* \d+%: fits$", done.stdout, re.M)
    assert re.search(r"^a step +[\d.]+ to [\d.]+ *$", done.stdout, re.M)
    assert re.search(r"^tokens a second +[\d,]+ to [\d,]+ *$", done.stdout, re.M)


def test_an_own_optimizer_is_not_imported_and_counts_as_adamw(capsys):
    own, adamw = (plan_json(capsys, *ON_8, f"optimizer.kind={kind}") for kind in ("a:b", "adamw"))
    assert own["memory"]["parts_bytes"] == adamw["memory"]["parts_bytes"]
    assert "a:b is taken to keep as much as AdamW: two numbers a parameter" in own["remarks"]


def test_json_has_parts_that_make_the_peak_and_the_step(capsys):
    told = plan_json(capsys, *ON_8)
    memory, time = told["memory"], told["time"]
    assert memory["peak_bytes"] <= sum(memory["parts_bytes"].values()) * 1.001
    assert memory["fits"] is True
    assert time["seconds"] == pytest.approx(sum(time["parts_seconds"].values()))
    tokens = told["batch"]["global_batch_size"] * 4096
    assert time["tokens_per_second"] * time["seconds"] == pytest.approx(tokens)
    assert told["run"]["hours"] == pytest.approx(1000 * time["seconds"] / 3600)
    assert told["checkpoint_bytes"] == 12 * 8_030_261_248
    dear = plan_json(capsys, *ON_8, "log.price_per_device_hour=2.5", "--document-tokens", "4096")
    assert dear["run"]["cost"] == pytest.approx(2.5 * 8 * dear["run"]["hours"])
    assert dear["time"]["parts_seconds"]["attention"] > time["parts_seconds"]["attention"]
    assert not any("documents" in line for line in dear["remarks"])


def test_what_does_not_fit_is_told_what_to_change_and_each_change_helps(capsys):
    tight = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "2", "data.sequence_length=32768"]
    tight += ["model.activation_checkpointing=none", "model.activation_budget_gib=null"]
    now = plan_json(capsys, *tight)
    assert now["memory"]["fits"] is False
    assert now["changes"]
    for change in now["changes"][:3]:
        after = plan_json(capsys, *tight, *change["overrides"])
        gain = now["memory"]["peak_bytes"] - after["memory"]["peak_bytes"]
        assert gain == pytest.approx(change["gain"], rel=1e-6)
        assert after["time"]["seconds"] / now["time"]["seconds"] == pytest.approx(change["slower"])
        assert after["memory"]["fits"] is change["fits"]
    assert now["changes"][0]["fits"] is True


def limits(capsys, *words):
    return json.loads(plan(capsys, *words, "--json"))


def with_number(words, key, more):
    """The words with so much more in one of them."""
    return [f"{key}={int(w.partition('=')[2]) + more}" if w.startswith(f"{key}=") else w for w in words]


@pytest.mark.parametrize(
    ("option", "name", "key", "step"),
    [
        ("--longest", "longest sequence", "data.sequence_length", 128),
        ("--largest", "largest micro-batch", "batch.micro_batch_size", 1),
        ("--largest", "largest model", "model.num_layers", 1),
    ],
)
@pytest.mark.parametrize("split", ["zero3", "tensor2"])
def test_as_much_as_is_told_fits_by_its_words_and_more_does_not(capsys, option, name, key, step, split):
    """Whatever the recipe, the command and the JSON said of the batch."""
    given = [*LLAMA_8B, "--deepspeed", str(ROOT / "ds_configs" / f"{split}.json"), "--gpu", "h100"]
    given += ["--gpus", "8", "batch.global_batch_size=128", "ds.train_batch_size=128"]
    told = limits(capsys, *given, option)[name]
    found = plan_json(capsys, *given, *told["overrides"])
    assert found["memory"]["peak_bytes"] == told["peak_bytes"]
    assert found["memory"]["fits"] is True
    assert found["batch"]["gradient_accumulation_steps"] == 1
    assert told["stops"] == "memory"
    more = plan_json(capsys, *given, *with_number(told["overrides"], key, step))
    assert more["memory"]["fits"] is False


def test_where_widths_cannot_grow_the_largest_model_has_more_layers(capsys):
    """Of 8 tensor ranks twice the heads are the next, which do not fit; 94 layers in place of 32 do."""
    given = [*LLAMA_8B, "--deepspeed", str(ROOT / "ds_configs" / "tensor2.json"), "--gpu", "h100"]
    told = limits(capsys, *given, "--gpus", "8", "ds.tensor_parallel.autotp_size=8", "--largest")
    words = dict(word.split("=") for word in told["largest model"]["overrides"])
    assert words["model.hidden_size"] == "4096"
    assert int(words["model.num_layers"]) > 90
    assert told["largest model"]["parameters"] > 20e9


def test_what_ends_a_search_in_place_of_memory_is_told(capsys, tmp_path):
    tiny = [*LLAMA_8B, "--gpu", "b200", "--gpus", "8", "--nodes", "1000", *ZERO3, "model.hidden_size=64"]
    tiny += ["model.intermediate_size=128", "model.num_heads=2", "model.num_key_value_heads=2"]
    told = limits(capsys, *tiny, "data.sequence_length=2", "--largest")
    assert told["largest micro-batch"]["stops"] == "more is not tried"
    cnn = ["--config", CNN, "--gpu", "a100"]
    assert plan(capsys, *cnn, "--largest").splitlines()[1].endswith("none: how cnn would grow is not known")
    config = {"model_type": "llama", "max_position_embeddings": 2000, "hidden_size": 512}
    given = ["--config", str(pretrained(tmp_path, config)), "--gpu", "h100", "engine.precision=bf16"]
    told = limits(capsys, *given, "--longest")["longest sequence"]
    assert told["overrides"][0] == "data.sequence_length=2000"
    assert told["stops"] == f"{tmp_path} has no more positions"
    assert plan_json(capsys, *given, *told["overrides"])["memory"]["peak_bytes"] == told["peak_bytes"]
    assert "none: pretrained weights have one size" in plan(capsys, *given, "--largest")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_words_for_the_largest_model_are_those_of_its_family(capsys, tmp_path, family):
    """Not every one has a word for key-value heads; a model can be built by them, of that many parameters."""
    recipe = tmp_path / "recipe.yaml"
    sizes = "hidden_size: 64, num_layers: 2, num_heads: 2"
    model = f"{{kind: causal_lm, architecture: {family}, {sizes}}}"
    data = "{kind: text, paths: [python_stdlib], sequence_length: 64}"
    recipe.write_text(f"max_steps: 1\nmodel: {model}\ndata: {data}\n")
    given = ["--config", str(recipe), "--gpu", "h100", "--gpu-memory", "3", "engine.precision=fp32"]
    told = limits(capsys, *given, "--largest")["largest model"]
    changed = load_settings(recipe, None, ["engine.precision=fp32", *told["overrides"]])
    assert count(changed.config).numel == told["parameters"] > 10**7


def pretrained(folder, config):
    """A recipe that starts from this folder's weights."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    recipe = folder / "recipe.yaml"
    data = "{kind: text, paths: [python_stdlib]}"
    recipe.write_text(f"max_steps: 1\nmodel: {{kind: causal_lm, pretrained: {folder}}}\ndata: {data}\n")
    return recipe


def test_what_is_not_known_is_not_said_to_fit(capsys):
    """Without activations the peak is far below what there is."""
    told = plan_json(capsys, *ON_8, "model.architecture=gemma2", "data.sequence_length=8192")
    assert told["memory"]["peak_bytes"] < told["memory"]["there_bytes"] / 2
    assert told["memory"]["fits"] is None
    assert told["changes"] == []
    assert "whether it fits is not known" in plan(capsys, *ON_8, "model.architecture=gemma2")


def test_a_cpu_has_no_times_and_is_its_own_host(capsys):
    stdlib = str(ROOT / "launch" / "recipes" / "python_stdlib.yaml")
    told = plan_json(capsys, "--config", stdlib, "--deepspeed", str(ROOT / "ds_configs" / "zero2.json"))
    assert (told["time"], told["host_there_bytes"]) == (None, None)
    assert not [each for each in told["changes"] if any("offload" in word for word in each["overrides"])]
    told = plan(capsys, "--host-memory", "0.5")
    assert re.search(r"there is +0\.50 GiB  \d+%: does not fit$", told, re.M)


def test_a_model_of_ones_own_is_counted(capsys):
    told = plan_json(capsys, "--config", CNN, "--gpu", "a100")
    assert told["model"]["parameters"] == 21_386
    assert told["memory"]["parts_bytes"]["activations kept"] > 0
    assert told["time"] is None


def test_auto_is_planned_with_the_largest_micro_batch_that_fits(capsys):
    auto = [*ON_8, "batch={micro_batch_size: auto, global_batch_size: 512}", "data.sequence_length=16384"]
    auto += ["model.activation_budget_gib=null"]
    found = plan_json(capsys, *auto)["batch"]["micro_batch_size"]
    assert 1 < found < 64
    for rows, fits in ((found, True), (2 * found, False)):
        given = [*auto[:-2], f"batch={{micro_batch_size: {rows}, global_batch_size: 512}}", *auto[-2:]]
        assert plan_json(capsys, *given)["memory"]["fits"] is fits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "big"),
        ("hidden_size", -4096),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
    ],
)
def test_a_config_from_elsewhere_with_a_number_that_can_be_none_is_one_line(capsys, tmp_path, name, value):
    recipe = pretrained(tmp_path, {"model_type": "llama", "max_position_embeddings": 2048, name: value})
    assert main(["plan", "--config", str(recipe), "--gpu", "h100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"config.json: {name} is {value!r}" in line or f"config.json: the config has no {name}" in line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h1000"], "no such GPU"),
        (["--gpu-memory", "-3"], "--gpu-memory -3"),
        (["--network", "fast"], "--network fast"),
        (["--gpus", "0"], "no positive number"),
        (["--document-tokens", "0"], "no positive number"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["model.pretrained=./nowhere", "model.architecture=null"], "there is no such folder"),
        (["model.num_layer=3"], "num_layers"),
        (["model.architecture=gemma2", "--longest"], "what activations take is not known of gemma2"),
        (["model.architecture=gemma2", "--suggest"], "what gemma2 takes on 8 x H100"),
        (["data.sequence_length=4194304", "--suggest"], "no split of llama"),
        (["--longest", "--config", CNN], "--longest: what a row of cnn takes is known"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, words, text):
    with pytest.raises(SystemExit) if text == "no positive number" else nullcontext() as ended:
        code = main(["plan", *ON_8, *words])
    assert (code if ended is None else ended.value.code) == 2
    told = capsys.readouterr().err
    assert text in told.splitlines()[-1]
    assert "Traceback" not in told


def test_the_recipe_says_as_much_host_memory_as_the_plan(capsys):
    offload = ["--deepspeed", str(ROOT / "ds_configs" / "zero3_offload.json"), "--gpu", "h100"]
    told = plan_json(capsys, *LLAMA_8B, *offload)
    stated = re.search(r"with (\d+) GiB of host memory", Path(LLAMA_8B[1]).read_text())
    assert int(stated[1]) == round(told["host_bytes"] / 2**30)
