"""`python -m pipeline plan`, as it is typed: what it says, what it refuses, what it does not import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
from support.launch import ROOT

from pipeline.__main__ import main

LLAMA_8B = ["--config", str(ROOT / "launch" / "recipes" / "llama_8b.yaml")]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")]
ON_8 = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "8"]


def plan(capsys, *words):
    assert main(["plan", *words, "--no-history"]) in (0, None)
    return capsys.readouterr().out


def plan_json(capsys, *words):
    return json.loads(plan(capsys, *words, "--json"))


def test_it_answers_without_torch_and_what_stands_on_it():
    code = (
        "import sys; from pipeline.__main__ import main; main(sys.argv[1:]); "
        "print([n for n in ('torch', 'transformers', 'deepspeed', 'numpy') if n in sys.modules])"
    )
    words = [sys.executable, "-c", code, "plan", *ON_8, "--no-history"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for text in (
        "8,030,261,248 parameters",
        "optimizer states",
        "activations kept",
        "MFU",
    ):
        assert text in done.stdout
    assert re.search(r"there is .* \d+%: fits$", done.stdout, re.M)
    assert re.search(r"^[\d,]+ tokens/s, [\d,]+ of one GPU", done.stdout, re.M)


def test_json_has_parts_that_make_the_peak_and_the_step(capsys):
    told = plan_json(capsys, *ON_8)
    memory, time = told["memory"], told["time"]
    assert memory["peak_bytes"] == pytest.approx(max(memory["phases_bytes"].values()), rel=1e-6)
    assert memory["peak_bytes"] <= sum(memory["parts_bytes"].values()) * 1.001
    assert memory["fits"] is True
    assert time["tokens_per_second"] == pytest.approx(8 * time["tokens_per_second_per_gpu"])
    tokens = told["batch"]["global_batch_size"] * 4096
    assert time["tokens_per_second"] * time["seconds"] == pytest.approx(tokens)
    assert told["run"]["hours"] == pytest.approx(1000 * time["seconds"] / 3600)
    assert [each["gpus"] for each in told["scaling"]] == [1, 2, 4, 8, 16]
    assert told["checkpoint_bytes"] == 12 * 8_030_261_248
    dear = plan_json(capsys, *ON_8, "log.price_per_device_hour=2.5")
    assert dear["run"]["cost"] == pytest.approx(2.5 * 8 * told["run"]["hours"])


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
    assert plan_json(capsys, *tight, *now["changes"][0]["overrides"])["memory"]["fits"] is True


def test_the_longest_rows_fit_and_longer_ones_do_not(capsys):
    words = json.loads(plan(capsys, *ON_8, "--longest", "--json"))["longest sequence"]["overrides"]
    length = int(words.rpartition("=")[2])
    one_row = [*ON_8, "batch.micro_batch_size=1", "batch.gradient_accumulation_steps=1"]
    assert plan_json(capsys, *one_row, f"data.sequence_length={length}")["memory"]["fits"] is True
    assert plan_json(capsys, *one_row, f"data.sequence_length={length + 128}")["memory"]["fits"] is False


def test_the_largest_batch_and_model_fit_and_larger_ones_do_not(capsys):
    told = json.loads(plan(capsys, *ON_8, "--largest", "--json"))
    rows = int(told["largest micro-batch"]["overrides"].rpartition("=")[2])
    once = "batch.gradient_accumulation_steps=1"
    for more, fits in ((0, True), (1, False)):
        words = [*ON_8, once, f"batch.micro_batch_size={rows + more}"]
        assert plan_json(capsys, *words)["memory"]["fits"] is fits
    model = [*told["largest model"]["overrides"].split(), once, "batch.micro_batch_size=1"]
    found = plan_json(capsys, *ON_8, *model)
    assert found["memory"]["fits"] is True
    assert found["model"]["parameters"] == told["largest model"]["parameters"]


def test_a_model_of_ones_own_is_counted(capsys):
    recipe = ["--config", str(ROOT / "launch" / "recipes" / "digits_cnn.yaml")]
    told = plan_json(capsys, *recipe, "--gpu", "a100")
    assert told["model"]["parameters"] == 21_386
    assert told["memory"]["parts_bytes"]["activations"] > 0
    assert told["time"] is None


def test_auto_is_planned_with_the_largest_micro_batch_that_fits(capsys):
    auto = [*ON_8, "batch={micro_batch_size: auto, global_batch_size: 512}", "data.sequence_length=16384"]
    auto += ["model.activation_budget_gib=null"]
    found = plan_json(capsys, *auto)["batch"]["micro_batch_size"]
    assert 1 < found < 64
    for rows, fits in ((found, True), (2 * found, False)):
        given = [*auto[:-2], f"batch={{micro_batch_size: {rows}, global_batch_size: 512}}", *auto[-2:]]
        assert plan_json(capsys, *given)["memory"]["fits"] is fits


def test_words_for_the_longest_rows_are_accepted_by_a_run(capsys, tmp_path):
    """Where the recipe or pretrained weights say how many positions there are."""
    stated = [*ON_8, "model.max_sequence_length=4096"]
    words = json.loads(plan(capsys, *stated, "--longest", "--json"))["longest sequence"]["overrides"]
    length, positions = (int(word.rpartition("=")[2]) for word in words.split())
    assert length == positions > 4096
    config = {"model_type": "llama", "max_position_embeddings": 2048, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    data = "{kind: text, paths: [python_stdlib]}"
    recipe.write_text(f"max_steps: 1\nmodel: {{kind: causal_lm, pretrained: {tmp_path}}}\ndata: {data}\n")
    given = ["--config", str(recipe), "--gpu", "h100", "--longest", "--json", "engine.precision=bf16"]
    words = json.loads(plan(capsys, *given))["longest sequence"]["overrides"]
    assert words == "data.sequence_length=2048"


def test_a_file_that_is_there_is_not_written_over_unasked(capsys, tmp_path):
    path = tmp_path / "split.json"
    path.write_text("mine")
    words = ["plan", *LLAMA_8B, "--gpu", "h100", "--gpus", "8", "--suggest", str(path)]
    assert main(words) == 2
    assert "is there already; name another file, or add --force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main([*words, "--force"]) in (0, None)
    assert json.loads(path.read_text())["zero_optimization"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "big"),
        ("hidden_size", -4096),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("head_dim", "a"),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
    ],
)
def test_a_config_from_elsewhere_with_a_number_that_can_be_none_is_one_line(capsys, tmp_path, name, value):
    config = {"model_type": "llama", "max_position_embeddings": 2048, name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    data = "{kind: text, paths: [python_stdlib], sequence_length: 64}"
    recipe.write_text(f"max_steps: 1\nmodel: {{kind: causal_lm, pretrained: {tmp_path}}}\ndata: {data}\n")
    assert main(["plan", "--config", str(recipe), "--gpu", "h100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"config.json: {name} is {value!r}" in line or f"config.json: the config has no {name}" in line


def test_what_there_is_too_little_of_is_named(capsys):
    offloaded = [*LLAMA_8B, "--deepspeed", str(ROOT / "ds_configs" / "zero3_offload.json"), "--gpu", "h100"]
    told = plan(capsys, *offloaded, "--gpus", "2", "--host-memory", "100")
    assert re.search(r"^host .* of 100\.0.*: does not fit$", told, re.M)
    assert re.search(r"there is .*: does not fit: host memory$", told, re.M)
    told = plan(capsys, "--host-memory", "0.5")
    assert re.search(r"there is +0\.50 GiB  \d+%: does not fit$", told, re.M)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h1000"], "no such GPU"),
        (["--gpu-memory", "-3"], "--gpu-memory -3"),
        (["--network", "fast"], "--network fast"),
        (["--gpus", "0"], "no positive number"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["model.pretrained=./nowhere", "model.architecture=null"], "there is no such folder"),
        (["model.num_layer=3"], "num_layers"),
        (["model.architecture=gemma2", "--longest"], "what activations take is not known of gemma2"),
        (["model.architecture=gemma2", "--suggest", "a.json"], "what gemma2 takes on 8 x H100"),
        (["data.sequence_length=4194304", "--suggest", "a.json"], "no split of llama"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, words, text):
    with pytest.raises(SystemExit) if text == "no positive number" else nullcontext() as ended:
        code = main(["plan", *ON_8, *words])
    assert (code if ended is None else ended.value.code) == 2
    told = capsys.readouterr().err
    assert text in told.splitlines()[-1]
    assert "Traceback" not in told
