"""DeepSpeed files of the Hugging Face Trainer's users train as they are; trainer_json.json names their origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch import numbers

from pipeline.cli import DEFAULT_RECIPE, main
from pipeline.config.settings import load_settings
from pipeline.config.split import Device

FILES = json.loads(Path(__file__).with_name("trainer_json.json").read_text())
RECIPE = """
max_epochs: 3
model: {kind: causal_lm, pretrained: gpt2}
data: {kind: text, paths: [a]}
"""
TINY = [
    "model.num_layers=1", "model.num_heads=2", "model.hidden_size=32", "model.intermediate_size=32",
    "data.sequence_length=16", "data.tokenizer.vocab_size=300", "sample.max_new_tokens=0",
    "eval.max_samples=2", "checkpoint.every=0", "wandb.mode=disabled", "max_steps=2",
]  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """`written(name)`: the file as its project has it."""

    def function(name):
        path = tmp_path / "theirs.json"
        path.write_text(json.dumps(FILES[name], indent=2))
        return path

    return function


def test_there_are_twenty():
    assert len(FILES) >= 20


@pytest.mark.parametrize("name", FILES)
def test_a_trainers_file_is_taken_as_it_is(written, tmp_path, capsys, name):
    path, recipe = written(name), tmp_path / "mine.yaml"
    assert main(["--dry-run", "--deepspeed", str(path)]) == 0, capsys.readouterr().err
    is_open = total_num_steps(name) == "auto"
    recipe.write_text(RECIPE if is_open else RECIPE.replace("max_epochs: 3\n", ""))
    assert main(["--dry-run", "--deepspeed", str(path), "--config", str(recipe)]) == 0, (
        capsys.readouterr().err
    )


def test_a_number_of_the_file_replaces_that_of_a_recipe_nobody_chose(written):
    path = written("caljoseph/Large-sentence-embedder/configs/deepspeed_config.json")
    settings = load_settings(DEFAULT_RECIPE, path, [], is_default=True)
    config = settings.config
    assert (config.optimizer.learning_rate, config.optimizer.betas) == (2e-5, (0.9, 0.95))
    assert (config.optimizer.weight_decay, config.max_steps) == (0.01, 100_000)
    schedule = config.schedule
    assert (schedule.kind, schedule.warmup_steps, schedule.min_learning_rate_ratio) == ("linear", 1000, 0.0)
    plan = settings.resolve(2, Device.cpu()).plan
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (8, 4)


def distinct():
    """The files, without those that differ from another in keys alone that nothing reads."""
    unread = ("steps_per_print", "activation_checkpointing", "dump_state", "wall_clock_breakdown")
    found = {}
    for name, tree in FILES.items():
        read = {key: value for key, value in tree.items() if key not in unread}
        found.setdefault(json.dumps(read, sort_keys=True), name)
    return list(found.values())


def total_num_steps(name):
    """What the file says of the run's length; "auto" where it leaves it open."""
    return FILES[name].get("scheduler", {}).get("params", {}).get("total_num_steps", "auto")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A text, and where it is prepared once for all runs."""
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "text.txt").write_text("\n".join(f"{number} lines of text" for number in range(400)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", distinct())
def test_a_trainers_file_trains_two_steps(written, home, tmp_path, capsys, name):
    words = [*TINY, f"data.paths=[{home}/text.txt]", f"data.cache_dir={home}/cache"]
    words += [f"run_dir={tmp_path}/run"]
    if total_num_steps(name) != "auto":
        words += ["ds.scheduler.params.total_num_steps=auto"]  # as the refusal of another max_steps says
    assert main(["--deepspeed", str(written(name)), *words]) == 0, capsys.readouterr().err
    assert [row["step"] for row in numbers(tmp_path / "run") if "train/loss" in row] == [1, 2]
