"""A checkpoint alone: `evaluate` gives the run's own numbers, `generate` writes what its model says."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support.base_model import ANSWERS, write_base_model, write_conversations
from support.checkpoints import flip_last_bit
from support.launch import ROOT, read_reproducible_rows, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pipeline.cli.train import main as train

pytestmark = pytest.mark.slow

SMALL = ["wandb.mode=disabled", "sample.max_new_tokens=0"]


def trained(recipe, run, *overrides):
    """The run directory. Plain PyTorch, in this process."""
    assert train(["--config", str(recipe), f"run_dir={run}", *SMALL, *overrides]) == 0
    return run


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """Three steps on several documents a row, a checkpoint and an evaluation of each."""
    folder = tmp_path_factory.mktemp("text")
    recipe = write_recipe(folder, max_steps=3, eval={"every": 1}, checkpoint={"every": 1, "keep_last": 3})
    return trained(recipe, folder / "run")


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    """The shipped recipe on a tiny model: taught the colours of five things."""
    folder = tmp_path_factory.mktemp("chat")
    base = write_base_model(folder / "base")
    data = write_conversations(folder / "conversations.jsonl")
    changes = [
        *(f"model.pretrained={base}", f"data.paths=[{data}]", f"data.cache_dir={folder / 'cache'}"),
        *(
            "max_steps=120",
            "batch.micro_batch_size=16",
            "optimizer.learning_rate=1e-2",
            "data.sequence_length=64",
            "log.every=100",
        ),
    ]
    run = trained(ROOT / "launch" / "recipes" / "finetune_chat.yaml", folder / "run", *changes)
    shutil.rmtree(base)  # neither command needs it
    return run


def table(text):
    """metric -> (now, in the run)."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_evaluation_is_the_runs_own(text_run, call, step):
    code, out, errors = call("evaluate", text_run, "--step", step)
    assert (code, errors) == (0, [])
    assert out.startswith(f"step-0000000{step}")
    (own,) = [row for row in read_reproducible_rows(text_run) if row["step"] == step and "eval/loss" in row]
    told = table(out)
    assert set(told) == {key for key in own if key.startswith("eval/")}
    for key, (now, then) in told.items():
        assert now == then == f"{own[key]:.6f}"


def test_a_whole_set_and_another_set(text_run, call, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("nothing like the source of a program\n" * 50)
    sets = f"data.eval_sets={{other: {{paths: [{tmp_path / 'other'}]}}}}"
    fraction = "data.eval_fraction=0.3"  # of a further set all documents are evaluated
    code, out, errors = call("evaluate", text_run, sets, fraction, "batch.micro_batch_size=3")
    assert (code, errors) == (0, [])
    told = table(out)
    assert float(told["eval/other/loss"][0]) > 4
    now, then = told["eval/loss"]  # up to one unit of the last digit: other batches round otherwise
    assert float(now) == pytest.approx(float(then), abs=1.1e-6)


@pytest.mark.parametrize("step", ["last", "best"])
def test_a_finetuned_model_is_evaluated_without_the_folder_it_came_from(chat_run, call, step):
    code, out, errors = call("evaluate", chat_run, "--step", step)
    assert (code, errors) == (0, [])
    now, then = table(out)["eval/loss"]
    assert float(now) == pytest.approx(float(then), abs=2e-6)
    assert float(now) < 0.1


def test_a_model_of_conversations_answers_a_question(chat_run, call):
    for thing, colour in ANSWERS.items():
        question = ["--prompt", f"What colour is {thing}? (7)", "--temperature", 0]
        assert call("generate", chat_run, *question) == (0, f"It is {colour}.\n", [])


def test_it_writes_what_transformers_writes_with_the_exported_folder(text_run, call, tmp_path):
    _, out, _ = call("generate", text_run, "--prompt", "def ", "--temperature", 0, "--max-new-tokens", 12)
    assert call("export", text_run, tmp_path / "out")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokenizer("def ", return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert out == tokenizer.decode(written[0], skip_special_tokens=True) + "\n"


def test_drawn_text_follows_from_the_seed(text_run, call):
    def text(seed):
        return call("generate", text_run, "--prompt", "", "--seed", seed, "--max-new-tokens", 8)[1]

    assert text(1) == text(1) != text(2)


def test_a_model_of_ones_own_is_evaluated_and_writes_nothing(call, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = trained("docs/example/regression.yaml", tmp_path / "run", "max_steps=2")
    code, out, errors = call("evaluate", run)
    assert (code, errors) == (0, [])
    now, then = table(out)["eval/loss"]
    assert now == then
    code, out, errors = call("generate", run, "--prompt", "x")
    assert (code, out) == (2, "")
    assert "writes no text; that is for language models" in errors[0]


def test_a_text_for_which_there_is_no_memory(text_run, call, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: torch.empty(2**62, dtype=torch.uint8))
    code, out, (error,) = call("generate", text_run, "--prompt", "a", "--max-new-tokens", 9)
    assert (code, out) == (12, "")
    assert error.startswith("error: out of memory on cpu while text is generated, at ")
    assert "best first: fewer tokens (max_new_tokens, now 9); a shorter prompt" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "optimizer.eps=1"], "optimizer.eps: the checkpoint determines this"),
        (["evaluate", "--step", "9"], "has no checkpoint of step 9; it has 1, 2, 3"),
        (["evaluate", "data.sequence_length=64"], "is 64, but the model has 32 positions; lower it"),
        (["generate", "--prompt", "\udcff"], "--prompt: not UTF-8"),
        (["evaluate", "data.eval_fraction=0"], "nothing is held out to evaluate on"),
        (["generate", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0; give 1 or more"),
        (
            ["generate", "--prompt", "a", "--temperature", "-1"],
            "--temperature is -1.0; give 0, or a number",
        ),
        (
            ["generate", "--prompt", "word " * 100],
            "tokens, and the model takes 32 together with the generated ones: shorten it",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line(text_run, call, arguments, message):
    command, *rest = arguments
    code, out, errors = call(command, text_run, *rest)
    assert (code, out, len(errors)) == (2, "", 1)
    assert message in errors[0]


def damaged(text_run, folder, change):
    shutil.copytree(text_run, folder)
    change(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), "recipe.yaml: no such file"),
        (lambda run: (run / "split.json").unlink(), "split.json cannot be read"),
        (lambda run: (run / "model" / "config.json").unlink(), "does not describe a model"),
        (lambda run: flip_last_bit(run / "checkpoints/step-00000003/rank-00000.safetensors"), "is damaged"),
    ],
    ids=["recipe", "split", "config", "weights"],
)
def test_a_run_that_lacks_something_is_told(text_run, call, tmp_path, change, message):
    code, out, errors = call("evaluate", damaged(text_run, tmp_path / "copy", change))
    assert (code, out, len(errors)) == (2, "", 1)
    assert message in errors[0]


def test_code_that_ships_with_a_model_runs_only_where_it_is_asked_for(text_run, call, tmp_path):
    def trust(run):
        (run / "recipe.yaml").write_text(
            (run / "recipe.yaml").read_text().replace("trust_remote_code: false", "trust_remote_code: true")
        )

    run = damaged(text_run, tmp_path / "copy", trust)
    code, _, errors = call("evaluate", run)
    assert code == 2
    assert "model.trust_remote_code=true" in errors[0]
    assert call("evaluate", run, "model.trust_remote_code=true")[0] == 0


def test_the_metrics_may_be_elsewhere(text_run, call, tmp_path):
    run = damaged(text_run, tmp_path / "copy", lambda run: (run / "metrics.jsonl").unlink())
    code, out, _ = call("evaluate", run)
    assert code == 0
    assert len(table(out)["eval/loss"]) == 1
    assert json.loads((text_run / "split.json").read_text())["tf32"] is False
    assert torch.is_grad_enabled()
