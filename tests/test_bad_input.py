"""Everything a user can get wrong, end to end: exit code 2, one line `error: ...`, no traceback."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.launch import ROOT, TORCHRUN, TRAIN, launch, run_python, write_recipe
from support.ranks import free_port
from torch import nn

from pipeline.cli.train import main
from pipeline.config.model_schema import CausalLMConfig
from pipeline.data.tokenizer import train_tokenizer
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, Whole

DIGITS = ["data={kind: digits}", "batch={global_batch_size: 16}"]
CNN = ["model={kind: cnn, channels: 2}", *DIGITS]
OWN = ["model={kind: 'test_bad_input:own_model'}", *DIGITS]


def own_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def frozen_model():
    return own_model().requires_grad_(False)


def digits_alone(split):
    """Training data whose largest label is there in every batch; nothing to evaluate on."""
    return [{"inputs": torch.zeros(1, 8, 8), "labels": torch.tensor(9)}] * 100 if split == "train" else None


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a recipe that runs, its text and its tokens, shared by all tests."""
    folder = tmp_path_factory.mktemp("home")
    write_recipe(folder, max_steps=1)
    return folder


@pytest.fixture(scope="module")
def weights(home):
    """A folder with the weights of a tiny Llama that fits the text, and a tokenizer."""
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    request = ModelRequest(Whole(), vocab_size=300, sequence_length=32)
    build_model(CausalLMConfig(architecture="llama", **sizes), request, 0).save_pretrained(home / "model")
    texts = [path.read_text() for path in (home / "texts").iterdir()]
    train_tokenizer(texts, 300).save_pretrained(home / "model")
    return home / "model"


def only_line(text):
    """The one line that begins with `error:`."""
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, text
    return errors[0]


@pytest.fixture
def fails(home, tmp_path, capfd, monkeypatch):
    """`fails("key=value", ...)` in this process -> the error's line; `quiet` may not stand beside it."""
    monkeypatch.chdir(tmp_path)

    def function(*overrides, quiet="Traceback"):
        arguments = ["--config", str(home / "recipe.yaml"), f"runs_dir={tmp_path / 'runs'}", *overrides]
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert "Traceback" not in out
        assert "error:" not in out
        assert quiet not in err
        return only_line(err)

    return function


def text_file(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"data.paths=[{path}]"


def test_the_recipe_of_these_tests_runs(home, tmp_path, capfd):
    assert main(["--config", str(home / "recipe.yaml"), f"runs_dir={tmp_path}"]) == 0
    assert "error" not in capfd.readouterr().err


# --- data ---------------------------------------------------------------------------------------------


def test_a_path_that_is_not_there(fails, home):
    message = fails(f"data.paths=[{home}/text]")
    assert f"data.paths: {home}/text does not exist" in message
    assert f"did you mean {home}/texts?" in message


def test_an_empty_file(fails, tmp_path):
    message = fails(text_file(tmp_path, "empty.txt", ""))
    assert f"data.paths: no text in 1 files, all empty (first: {tmp_path}/empty.txt)" in message


def test_text_too_short_for_one_sequence(fails, tmp_path):
    message = fails(text_file(tmp_path, "short.txt", "a few words"), "data.eval_fraction=0")
    assert "one sequence takes 33: add text, or lower data.sequence_length" in message


def test_a_file_that_is_not_utf8(fails, tmp_path):
    message = fails(text_file(tmp_path, "latin.txt", "caf\u00e9 au lait".encode("latin-1")))
    assert f"{tmp_path}/latin.txt: not UTF-8: byte 0xe9 at byte offset 3" in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "un', "not a line of JSON: "),
        ('["text"]', "is a list; expected an object"),
        ('{"body": "text"}', "no field 'text'; its fields: 'body'. Set data.text_field"),
        ('{"text": 3}', "field 'text' is a number; expected a string"),
    ],
)
def test_a_broken_line_of_jsonl(fails, tmp_path, line, reason):
    content = '{"text": "first"}\n{"text": "second"}\n' + line + "\n"
    assert f"{tmp_path}/lines.jsonl:3: {reason}" in fails(text_file(tmp_path, "lines.jsonl", content))


def test_a_file_of_another_kind(fails, tmp_path):
    assert "data.parquet: cannot be read as parquet: " in fails(text_file(tmp_path, "data.parquet", b"PAR1"))
    assert "data.pdf cannot be read, by its suffix; expected" in fails(
        text_file(tmp_path, "data.pdf", b"%PDF")
    )


def test_a_cache_that_cannot_be_written(fails, tmp_path):
    (tmp_path / "file").write_text("")
    message = fails(f"data.cache_dir={tmp_path}/file/cache")
    assert f"data.cache_dir {tmp_path}/file/cache: " in message
    assert "cannot be written: Not a directory" in message


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/tokenizer.json"])
def test_a_tokenizer_that_is_not_there(fails, name):
    assert f"data.tokenizer.pretrained: {name} does not exist" in fails(f"data.tokenizer.pretrained={name}")


# --- models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=299", "model.vocab_size is 299, but the tokenizer has 300 entries"),
        ("model.max_sequence_length=31", "data.sequence_length is 32, but the model takes 31 positions"),
        ("model.architecture=lama", "transformers has no 'lama' (did you mean \"llama\"?)"),
        ("model.extra={rope_thet: 1}", "a llama config has no rope_thet"),
        ("model.extra={hidden_act: 3.5}", "model: llama: "),
        ("model.num_heads=3", "model.hidden_size 32 is not a multiple of num_heads 3"),
        ("model.num_key_value_heads=3", "model.num_heads 4 is not a multiple of num_key_value_heads 3"),
        ("model.pretrained=./nowhere", "give exactly one of architecture (new weights) and pretrained"),
        ("model={kind: causal_lm, pretrained: ./nowhere}", "'./nowhere': there is no such folder"),
        ("model.weights=./nowhere", "model.weights: nowhere does not exist"),
        ("model={kind: causal_lm, pretrained: ./x, weights: y}", "give pretrained or weights, not both"),
        ("model={kind: 'no.such:thing'}", "there is no module 'no'"),
        ("model={kind: 'test_bad_input:own_mode'}", "did you mean 'own_model'?"),
        ("model={kind: 'test_bad_input:own_model', args: {size: 3}}", "model.args do not fit"),
        ("data={kind: 'test_bad_input:nothing'}", "has no 'nothing'"),
    ],
)
def test_a_model_that_cannot_be(fails, override, message):
    given = ["objective.kind=causal_lm"] if ":" in override and "kind: causal_lm" not in override else []
    assert message in fails(override, *given)


def test_weights_that_do_not_fit(fails, weights, tmp_path):
    folder = shutil.copytree(weights, tmp_path / "renamed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = fails(f"model={{kind: causal_lm, pretrained: {folder}}}", quiet="REPORT")
    assert "missing: model.layers.0.mlp.gate_proj.weight; " in message
    assert "unexpected: model.layers.0.mlp.gate.weight" in message


def test_weights_that_were_cut_off(fails, weights, tmp_path):
    folder = shutil.copytree(weights, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = fails(f"model={{kind: causal_lm, pretrained: {folder}}}")
    assert f"model.pretrained: '{folder}': its weights are no safetensors: " in message


def test_a_model_without_anything_to_train(fails):
    frozen = ["model={kind: 'test_bad_input:frozen_model'}", *DIGITS, "objective.kind=classification"]
    assert "no parameter that requires a gradient" in fails(*frozen)


# --- objectives ---------------------------------------------------------------------------------------


def test_an_objective_that_cannot_be_guessed(fails):
    assert "objective.kind: with a model of your own say what is minimised" in fails(*OWN)


def test_an_objective_that_is_not_there(fails):
    assert "there is no module 'no'" in fails(*OWN, "objective.kind=no.such:loss")


@pytest.mark.parametrize("evaluation", ["digits", "none"])
@pytest.mark.parametrize("number", [9, 11])
def test_class_weights_of_the_wrong_length(fails, monkeypatch, number, evaluation):
    data = [] if evaluation == "digits" else ["data={kind: 'test_bad_input:digits_alone'}"]
    weights = f"objective.class_weights={[1.0] * number}"
    model = "model={kind: cnn, channels: 2, num_classes: 10}"
    message = fails(*DIGITS, model, *data, weights, "max_steps=1")
    assert f"objective.class_weights: {number} weights" in message


# --- the run ------------------------------------------------------------------------------------------


def test_a_run_directory_that_cannot_be_written(fails, tmp_path):
    (tmp_path / "file").write_text("")
    for override in (f"runs_dir={tmp_path}/file/runs", f"run_dir={tmp_path}/file"):
        message = fails(override)
        assert re.search(
            r"the run directory \S+/file\S* cannot be written: (Not a directory|File exists)", message
        )


def test_nothing_to_go_on_with(fails, tmp_path):
    message = fails("checkpoint.resume=required")
    assert f"checkpoint.resume is required, but in {tmp_path}/runs there is no unfinished run" in message
    message = fails("checkpoint.resume=required", f"run_dir={tmp_path}/fresh")
    assert f"{tmp_path}/fresh holds no complete checkpoint" in message


def test_a_run_directory_that_is_taken(fails, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("")
    message = fails("checkpoint.resume=never", f"run_dir={tmp_path}/taken")
    assert f"run_dir {tmp_path}/taken already holds a run" in message


def test_a_batch_that_does_not_divide(fails):
    message = fails("batch={micro_batch_size: 3, global_batch_size: 8}")
    assert "gives gradient_accumulation_steps = 8 / 3" in message


def test_half_an_environment(fails, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "the environment sets WORLD_SIZE but not RANK, LOCAL_RANK" in fails()


# --- real processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_process_says_it_in_one_line(home, tmp_path):
    done = launch("--config", str(home / "recipe.yaml"), "data.paths=[/nowhere]", f"runs_dir={tmp_path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "data.paths: /nowhere does not exist" in only_line(done.stderr)


@pytest.mark.slow
def test_a_value_that_deepspeed_refuses_is_one_line_before_data_is_prepared(home, tmp_path):
    split = tmp_path / "split.json"
    split.write_text(json.dumps({"aio": {"use_gds": True}}))  # which it refuses on a CPU only
    arguments = ["--config", str(home / "recipe.yaml"), "--deepspeed", str(split), f"runs_dir={tmp_path}"]
    done = launch(*arguments, "data.paths=[/nowhere]")  # before data is looked at
    assert done.returncode == 2, done.stderr
    message = only_line(done.stderr)
    assert "DeepSpeed refuses the configuration" in message
    assert "GDS currently only supported for CUDA" in message


@pytest.mark.daily(
    "model.vocab_size=299-but the tokenizer has 300 entries",
    "runs_dir=/dev/null/runs-the run directory /dev/null/runs",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layer=3", "command line: model.num_layer: unknown key"),  # before a process group
        ("data.paths=[/nowhere]", "data.paths: /nowhere does not exist"),
        ("model.vocab_size=299", "but the tokenizer has 300 entries"),  # inside of one
        ("runs_dir=/dev/null/runs", "the run directory /dev/null/runs"),  # found by rank 0 alone
    ],
)
def test_two_ranks_say_it_once(home, tmp_path, override, message):
    launcher = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), TRAIN]
    arguments = [
        "--config",
        str(home / "recipe.yaml"),
        "--deepspeed",
        str(ROOT / "ds_configs" / "zero2.json"),
    ]
    done = run_python(*launcher, *arguments, f"runs_dir={tmp_path}", override)
    assert "exitcode  : 2 " in done.stderr
    # The console that both share; torchrun adds a traceback of its own, the ranks may not.
    assert "Traceback" not in done.stdout
    assert "error:" not in done.stdout
    assert done.stderr.count("Traceback") == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert message in errors[0]
