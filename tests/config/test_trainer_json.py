"""DeepSpeed files of the Hugging Face Trainer's users train as they are. trainer_json.json has them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from support.tiny import recipe, train_curve_from_settings

from pipeline.cli.train import main
from pipeline.config.settings import load_settings
from pipeline.config.split import Device

FILES = json.loads(Path(__file__).with_name("trainer_json.json").read_text())
RECIPE = """
max_epochs: 3
model: {kind: causal_lm, pretrained: gpt2}
data: {kind: text, paths: [a]}
"""


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
    path = written(name)
    mine = tmp_path / "mine.yaml"
    assert main(["--dry-run", "--deepspeed", str(path)]) == 0, capsys.readouterr().err
    is_open = total_num_steps(name) == "auto"
    mine.write_text(RECIPE if is_open else RECIPE.replace("max_epochs: 3\n", ""))
    assert main(["--dry-run", "--deepspeed", str(path), "--config", str(mine)]) == 0, capsys.readouterr().err


def test_a_number_of_the_file_replaces_that_of_a_recipe_nobody_chose(written):
    path = written("caljoseph/Large-sentence-embedder/configs/deepspeed_config.json")
    settings = load_settings(None, path)
    config = settings.config
    assert (config.optimizer.learning_rate, config.optimizer.betas) == (2e-5, (0.9, 0.95))
    assert (config.optimizer.weight_decay, config.max_steps) == (0.01, 100_000)
    schedule = config.schedule
    assert (schedule.kind, schedule.warmup, schedule.min_learning_rate_ratio) == ("linear", 1000, 0.0)
    plan = settings.resolve(2, Device.cpu()).batch_plan
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
    """The run's length in the file; "auto" if the file leaves it open."""
    return FILES[name].get("scheduler", {}).get("params", {}).get("total_num_steps", "auto")


@pytest.mark.daily(
    "the Trainer, ZeRO 2 with decay",
    "the Trainer, ZeRO 3 with warm-up",
    "tatsu-lab/stanford_alpaca/configs/default_offload_opt_param.json",
    "hiyouga/LLaMA-Factory/examples/deepspeed/ds_z0_config.json",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", distinct())
def test_a_trainers_file_trains_two_steps(ranks, written, tmp_path, name):
    decided = {"batch", "optimizer", "schedule"} | (
        {"max_steps"} if total_num_steps(name) != "auto" else set()
    )
    tree = {key: value for key, value in recipe().items() if key not in decided}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    settings = load_settings(tmp_path / "recipe.yaml", written(name))
    ((first, second),) = ranks(1).run(train_curve_from_settings, settings, 2, timeout=400)
    assert first[0] == pytest.approx(5.6, abs=0.2), "not the loss of guessing one of 257"
    assert math.isfinite(second[0])
