"""Shipped files run: the recipes, the documented example, the default run's own promises."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.base_model import write_base_model, write_conversations
from support.launch import (
    ROOT,
    TRAIN,
    launch,
    make_environment,
    read_reproducible_rows,
    run_python,
    write_recipe,
)

OFFLINE = "wandb.mode=disabled"


def first(run: Path, key: str) -> float:
    return next(row[key] for row in read_reproducible_rows(run) if key in row)


def last(run: Path, key: str) -> float:
    return next(row[key] for row in reversed(read_reproducible_rows(run)) if key in row)


@pytest.mark.daily("plain")
@pytest.mark.slow
@pytest.mark.parametrize("split", [[], ["--deepspeed", "ds_configs/zero1.json"]], ids=["plain", "zero1-bf16"])
def test_the_cnn_reads_over_95_percent_of_held_out_digits(tmp_path, split):
    """Class weights, float inputs cast to the precision: the image task in full."""
    recipe = "launch/recipes/digits_cnn.yaml"
    result = launch("--config", recipe, *split, f"run_dir={tmp_path}", OFFLINE)
    assert result.returncode == 0, result.stderr
    assert last(tmp_path, "eval/accuracy") > 0.95


@pytest.mark.slow
def test_the_recipe_of_qlora_trains_a_small_model_on_a_cpu(tmp_path):
    changes = [f"model.pretrained={write_base_model(tmp_path / 'base', hidden_size=64)}", "max_steps=20"]
    changes += [f"data.paths=[{write_conversations(tmp_path / 'conversations.jsonl')}]"]
    changes += ["data.sequence_length=64", "optimizer.learning_rate=1e-2", "eval.every=20", "log.every=1"]
    recipe = "launch/recipes/qlora_7b.yaml"
    result = launch("--config", recipe, f"run_dir={tmp_path / 'run'}", OFFLINE, *changes)
    assert result.returncode == 0, result.stderr
    assert last(tmp_path / "run", "train/loss") < first(tmp_path / "run", "train/loss") - 0.5


def run_recipes(folder: Path, steps: dict[str, list[str]]) -> None:
    """The recipes of fine-tuning, each from what the one before left, in a folder of the user's."""
    (folder / "launch").symlink_to(ROOT / "launch")
    made = run_python("launch/recipes/make_data.py", "data", cwd=folder)
    assert made.returncode == 0, made.stderr
    for name, changes in steps.items():
        recipe = str(folder / "launch" / "recipes" / f"{name}.yaml")
        done = run_python(str(TRAIN), "--config", recipe, OFFLINE, *changes, cwd=folder)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "make_data.py: error: the following arguments are required: FOLDER; see make_data.py --help"),
        (["a-file"], "error: a-file: File exists; give a folder that can be written to"),
    ],
)
def test_data_that_cannot_be_made_is_one_line(tmp_path, given, said):
    (tmp_path / "a-file").touch()
    done = run_python(str(ROOT / "launch" / "recipes" / "make_data.py"), *given, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_no_training_data_has_an_answer_of_the_task(tmp_path):
    assert run_python(str(ROOT / "launch" / "recipes" / "make_data.py"), "data", cwd=tmp_path).returncode == 0
    data = tmp_path / "data"
    learned = "".join((data / f"{name}.jsonl").read_text() for name in ("instructions", "signatures"))
    rows = [json.loads(line) for line in (data / "calls.jsonl").read_text().splitlines()]
    assert len(rows) == 250
    for row in rows:
        name = row["question"].removeprefix("How is ").removesuffix(" called?")
        assert row["choices"][row["answer"]].startswith(f"{name}(")
        assert len(set(row["choices"])) == 4
        assert f"{name} called?" not in learned
        assert f'"{name}(' not in learned
    assert yaml.safe_load((data / "calls.yaml").read_text())["dataset_kwargs"] == {
        "data_files": {"test": "data/calls.jsonl"}
    }


@pytest.mark.slow
@pytest.mark.nightly  # each day test_docs.py trains some steps of sft, lora and dpo, one from the other
def test_the_recipes_of_fine_tuning_do_what_they_say(tmp_path):
    run_recipes(tmp_path, {"sft": [], "lora": [], "dpo": [], "reward": []})
    begun = first(tmp_path / "runs" / "lora", "eval/loss")
    assert begun < math.log(2048) - 0.3, "it did not start from the model of sft"
    for name, fall in (("sft", 3), ("lora", 1.5)):
        losses = [
            row["eval/loss"] for row in read_reproducible_rows(tmp_path / "runs" / name) if "eval/loss" in row
        ]
        assert losses[-1] < losses[0] - fall
    assert last(tmp_path / "runs" / "dpo", "eval/rewards/margin") > 5
    for name in ("dpo", "reward"):
        assert last(tmp_path / "runs" / name, "eval/rewards/accuracy") > 0.95


def printed_commands() -> str:
    """The tutorial's commands between the installation and a model of the reader's own."""
    tutorial = (ROOT / "docs" / "tutorials" / "fine-tuning.md").read_text()
    steps = tutorial.split("## Make the data")[1].split("## Use your own model")[0]
    return "".join(re.findall(r"^```bash\n(.*?)^```", steps, re.M | re.S))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_printed_commands_lead_from_an_empty_folder_to_a_conversation(tmp_path):
    """The commands run as they are written, offline, with the clone where the tutorial has it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "deepspeed-pipeline").symlink_to(ROOT)
    here = tmp_path / "empty"
    here.mkdir()
    variables = make_environment(HOME=str(home), HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        ["bash", "-euc", printed_commands()],
        cwd=here,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for run in ("sft", "lora", "dpo"):
        evaluated = [
            row["eval/loss"] for row in read_reproducible_rows(here / "runs" / run) if "eval/loss" in row
        ]
        assert evaluated[-1] < 0.7 * evaluated[0], run
    compared = [line.split() for line in done.stdout.splitlines() if re.match(r"calls +acc .* to ", line)]
    (words,) = compared
    assert float(words[5]) > 0, "the interval of the difference does not lie above 0"
    assert done.stdout.splitlines()[-1].strip()


@pytest.mark.nightly  # each day test_docs.py trains two steps of it
@pytest.mark.slow
def test_the_documented_example_learns_its_wave(tmp_path):
    result = launch("--config", "docs/example/regression.yaml", f"run_dir={tmp_path}", OFFLINE)
    assert result.returncode == 0, result.stderr
    rows = [row["eval/loss"] for row in read_reproducible_rows(tmp_path) if "eval/loss" in row]
    assert rows[-1] < 0.03 < 0.3 < rows[0]


@pytest.mark.daily("plain")
@pytest.mark.slow
@pytest.mark.parametrize("split", [[], ["--deepspeed", "ds_configs/zero2.json"]], ids=["plain", "zero2-bf16"])
def test_the_documented_ctc_reads_words_of_any_width(tmp_path, split):
    result = launch("--config", "docs/example/ctc.yaml", *split, f"run_dir={tmp_path}", OFFLINE)
    assert result.returncode == 0, result.stderr
    rows = [row["eval/loss"] for row in read_reproducible_rows(tmp_path) if "eval/loss" in row]
    assert rows[-1] < 1 < 10 < rows[0]


@pytest.mark.nightly  # each day test_zero3_through_the_launcher trains a small one
@pytest.mark.slow
def test_the_default_run_learns_saves_and_writes(tmp_path):
    """A part of the default run on the real text: the whole of it is `make train`."""
    part = ["max_steps=20", "eval.max_samples=32"]
    result = launch("--deepspeed", "ds_configs/zero2.json", *part, f"run_dir={tmp_path}", OFFLINE)
    assert result.returncode == 0, result.stderr
    rows = [row["eval/loss"] for row in read_reproducible_rows(tmp_path) if "eval/loss" in row]
    assert rows[0] == pytest.approx(math.log(8192), rel=0.02)
    assert rows[-1] < rows[0] - 1
    for file in ("recipe.yaml", "ds_config.json", "environment.json", "metrics.jsonl", "logs/rank00000.log"):
        assert (tmp_path / file).stat().st_size > 0
    assert (tmp_path / "checkpoints" / "step-00000020" / "manifest.json").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["sample"].startswith("    def __init__(self")
    for word in ("the model wrote", "metrics.jsonl", "checkpoints", "recipe.yaml"):
        assert word in result.stdout


def explained_lines() -> list[str]:
    """First words of the lines of output that the first tutorial explains."""
    tutorial = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    section = tutorial.split("## Train\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.M)


@pytest.mark.daily("2")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_zero3_through_the_launcher(tmp_path, capsys, ranks):
    small = ["max_steps=3", "model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128"]
    split = ["--deepspeed", "ds_configs/zero3.json"]
    result = launch(*split, *small, "eval.max_samples=8", f"run_dir={tmp_path}", OFFLINE, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert first(tmp_path, "eval/loss") == pytest.approx(math.log(8192), rel=0.02)
    assert (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["sample"].startswith("    def __init__(self")
    for word in ("the model wrote", "metrics.jsonl", "checkpoints", "recipe.yaml"):
        assert word in result.stdout
    assert len(explained_lines()) > 4
    for words in explained_lines():
        assert re.search(rf"^{words} ", result.stdout + result.stderr, re.M), words
    assert evaluated(tmp_path, capsys) == pytest.approx(last(tmp_path, "eval/loss"), rel=1e-6)


@pytest.mark.daily("tensor2-fp16")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("split", ["tensor2", "pipeline2"])
def test_a_checkpoint_of_any_split_is_evaluated_in_one_process(tmp_path, capsys, split, precision):
    recipe = write_recipe(tmp_path, max_steps=2, batch={"global_batch_size": 8, "micro_batch_size": 2})
    chosen = [f"ds.{name}.enabled={str(name == precision).lower()}" for name in ("bf16", "fp16")]
    split_file = f"ds_configs/{split}.json"
    run = tmp_path / "run"
    result = launch("--config", str(recipe), "--deepspeed", split_file, *chosen, f"run_dir={run}", ranks=2)
    assert result.returncode == 0, result.stderr
    assert evaluated(run, capsys) == pytest.approx(last(run, "eval/loss"), rel=2e-4)


def evaluated(run: Path, capsys) -> float:
    """The output of `evaluate` for the last checkpoint."""
    from pipeline.__main__ import main

    assert main(["evaluate", str(run)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval/loss ")]
    return float(line.split()[1])
