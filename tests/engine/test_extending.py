"""A user's parts as docs/how-to/extending.md shows them: one curve under each split and after a resume."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine.test_step import good_bad_good
from parity.measure import ALONE, largest_difference
from parity.splits import LLAMA
from support.extending import PAGE, with_accuracy
from support.launch import ROOT, read_reproducible_rows, write_recipe
from support.resume_across_splits import (
    HALF,
    LOSS_TOLERANCE,
    SPLITS,
    STEPS,
    Run,
    gather_shards,
    run_on_split,
    train_resumed,
    train_uninterrupted,
)
from support.tiny import recipe

from pipeline.cli.train import main as train
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import compute_extra_means
from pipeline.engine.schedule import learning_rate_multiplier
from pipeline.evaluation.held_out import evaluate
from pipeline.training.assemble import build_eval_loader

pytestmark = pytest.mark.slow


def two_metrics(outputs, batch):
    """The page's accuracy, and a mean of other numbers than 0 and 1."""
    loss, metrics = with_accuracy(outputs, batch)
    labels = batch["shift_labels"]
    of_label = outputs.logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    counted = labels != -100
    return loss, metrics | {"likelihood": ((of_label * counted).sum(), counted.sum())}


two_metrics.metrics = ["accuracy", "likelihood"]
two_metrics.count = with_accuracy.count

TREE = recipe(
    model=LLAMA,
    batch={"gradient_accumulation_steps": 2, "global_batch_size": 16},
    optimizer={"kind": "support.extending:Lion", "args": {"betas": [0.9, 0.98]}, "learning_rate": 2e-2},
    schedule={"kind": "support.extending:inverse_sqrt"},
    objective={"kind": "test_extending:two_metrics"},
    max_steps=STEPS,
)
PLAIN = {"torch": {"parallel": "single"}}
AT_TWO_RANKS = ("ddp", "zero2", "zero3", "pipeline-zero1")


@dataclass
class Curve:
    """Keys and values of a run's rows."""

    losses: list[float]
    metrics: list[dict[str, float]]
    """Values of each step."""
    evaluation: dict[str, float]
    rates: list[float]


def curve(job: Job, tree: dict[str, Any], split: dict[str, Any]) -> Curve:
    run = Run(job, tree, split)
    metrics = []
    step = run.engine.train_step

    def watched(*arguments: Any) -> Any:
        result = step(*arguments)
        sums = {key: job.all_reduce_sum(each.double()) for key, each in result.extras.items()}
        metrics.append(compute_extra_means(sums, run.objective.means))
        return result

    run.engine.train_step = watched
    losses = run.train(0, STEPS)
    loader = build_eval_loader(run.config, run.resolved.batch_plan, run.data, run.engine)
    rates = [learning_rate_multiplier(run.config.schedule, at, STEPS) for at in range(STEPS)]
    return Curve(losses, metrics, evaluate(run.engine, run.objective, loader, job), rates)


@cache
def alone() -> Curve:
    return curve(ALONE, TREE | {"batch": {"micro_batch_size": 16}}, PLAIN)


@pytest.mark.daily("pipeline-zero1")
@pytest.mark.parametrize("name", AT_TWO_RANKS)
def test_curve_and_metrics_are_those_of_one_process(ranks, name):
    for got in ranks(2).run(curve, TREE, SPLITS[name].json):
        assert largest_difference(got.losses, alone().losses) < LOSS_TOLERANCE
        for row, expected in zip(
            [*got.metrics, got.evaluation], [*alone().metrics, alone().evaluation], strict=True
        ):
            assert row.keys() == expected.keys()
            assert row == pytest.approx(expected, rel=1e-4)
    assert set(alone().metrics[0]) == {"accuracy", "likelihood"}
    assert {"eval/accuracy", "eval/likelihood"} <= set(alone().evaluation)


RING = ("ddp", "zero2", "pipeline-zero1", "zero3", "plain", "ddp")


@cache
def saved(ranks, name: str):
    results = run_on_split(ranks, SPLITS[name], train_uninterrupted, TREE)
    return results[0][0], gather_shards(results)


@pytest.mark.daily("zero3-plain")
@pytest.mark.parametrize(("name", "resumed"), [*pairwise(RING), ("zero3", "zero3")])
def test_a_run_goes_on_under_another_split(ranks, name, resumed):
    losses, source = saved(ranks, name)
    for again, *_ in run_on_split(ranks, SPLITS[resumed], train_resumed, TREE, source, 0):
        assert largest_difference(again, losses[HALF:]) <= (0 if name == resumed else LOSS_TOLERANCE)


@pytest.mark.parametrize("part", ["optimizer", "schedule"])
def test_the_parts_show_in_the_curve(part):
    """A split that passed over one of them would be far outside of the band."""
    other = curve(ALONE, TREE | {"batch": {"micro_batch_size": 16}, part: OTHERS[part]}, PLAIN)
    assert largest_difference(other.losses, alone().losses) > 50 * LOSS_TOLERANCE


OTHERS = {"optimizer": {"learning_rate": 2e-2}, "schedule": {"kind": "constant"}}


@pytest.mark.daily("zero2", "pipeline-zero1")
@pytest.mark.parametrize("name", ["plain", "zero2", "zero3", "pipeline-zero1"])
def test_a_bad_batch_changes_no_parameter(ranks, name):
    batch = {"micro_batch_size": 2, "gradient_accumulation_steps": 1}
    for result in run_on_split(ranks, SPLITS[name], good_bad_good, TREE | {"batch": batch}, math.nan):
        assert result == (True, 1.0, True, True)


def write_files_of_the_page(folder: Path) -> list[dict[str, Any]]:
    """Write the page's Python files to a folder; return its blocks of recipes."""
    page = PAGE.read_text()
    for name, code in re.findall(r"^(my_\w+\.py)[^\n]*:\n\n```python\n(.*?)^```", page, re.M | re.S):
        (folder / name).write_text(code)
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)]


def test_the_pages_model_data_and_loss_train_as_they_stand(tmp_path, monkeypatch):
    (block,) = [block for block in write_files_of_the_page(tmp_path) if "model" in block]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(block))
    monkeypatch.chdir(tmp_path)
    assert (
        train(["--config", "my.yaml", "max_steps=20", "log.every=1", "wandb.mode=disabled", "run_dir=run"])
        == 0
    )
    losses = [row["train/loss"] for row in read_reproducible_rows(Path("run")) if "train/loss" in row]
    assert len(losses) == 20
    assert losses[-1] < losses[0]


def test_the_files_of_the_page_train_in_a_folder_of_ones_own(tmp_path, monkeypatch, capfd):
    """Each file as the page names it, each part of the recipe as it stands there; stopped and gone on."""
    blocks = write_files_of_the_page(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"my_optimizer.py", "my_schedule.py", "my_loss.py"}
    tree: dict[str, Any] = {}
    for block in blocks:
        tree |= block
    parts = {name: tree[name] for name in ("optimizer", "schedule", "objective")}
    recipe = write_recipe(
        tmp_path, **parts, eval={"every": 2, "max_samples": 20}, checkpoint={"every": 2}, max_steps=4
    )
    monkeypatch.chdir(tmp_path)
    assert train(["--config", str(recipe), "run_dir=unbroken"]) == 0
    assert train(["--config", str(recipe), "run_dir=run", "max_steps=2"]) == 0
    zero = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json"), "ds.bf16.enabled=false"]
    assert train(["--config", str(recipe), *zero, "run_dir=run"]) == 0
    rows = read_reproducible_rows(Path("run"))
    expected = read_reproducible_rows(Path("unbroken"))
    for key in ("train/loss", "train/accuracy", "train/learning_rate", "eval/loss", "eval/accuracy"):
        found = [row[key] for row in rows if key in row]
        assert found == pytest.approx([row[key] for row in expected if key in row], rel=1e-5), key
        assert len(found) >= 3, key
    rates = [row["train/learning_rate"] for row in rows if "train/learning_rate" in row]
    assert rates[-1] == pytest.approx(1e-4 * 4 / 100)
    assert "accuracy" in capfd.readouterr().out
    assert train(["--config", str(recipe), "--no-import-paths", "run_dir=other"]) == 2
    assert "would run code, and --no-import-paths was given" in capfd.readouterr().err
