"""A run whose intervals are epochs, and the checkpoint that it keeps as the best."""

from __future__ import annotations

import pytest
import yaml
from support.launch import DIGITS, read_reproducible_rows

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.train import main

pytestmark = pytest.mark.slow

RECIPE = DIGITS | {
    "batch": {"micro_batch_size": 180},
    "optimizer": {"learning_rate": 3e-3},
    "wandb": {"mode": "disabled"},
    "schedule": {"warmup": 0.25},
}


@pytest.fixture
def run(tmp_path, capsys):
    """`run(key=value, ...)`: the rows of its record, once it has ended."""

    def function(*overrides, code=0, **sections):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | sections))
        assert (
            main(["--config", str(tmp_path / "recipe.yaml"), f"run_dir={tmp_path}/run", *overrides]) == code
        )
        return read_reproducible_rows(tmp_path / "run") if code == 0 else capsys.readouterr().err

    return function


def steps_with(rows, key):
    return [row["step"] for row in rows if key in row]


def test_rows_evaluations_and_checkpoints_come_by_epochs(run, tmp_path):
    every = {
        "log": {"every": 0.25},
        "eval": {"every": "0.5 epochs"},
        "checkpoint": {"every": "1 epoch", "keep_last": 9},
    }
    rows = run(max_epochs=2, **every)
    assert rows[-1]["step"] == 16  # of 1,438 digits in steps of 180: an epoch has 7.99
    assert steps_with(rows, "train/loss") == [1, 2, 4, 6, 8, 10, 12, 14, 16]
    assert steps_with(rows, "eval/loss") == [0, 4, 8, 12, 16]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000008", "step-00000016"]
    rates = {row["step"]: row["train/learning_rate"] for row in rows if "train/learning_rate" in row}
    assert rates[1] == pytest.approx(3e-3 / 5)  # four of sixteen steps
    assert max(rates, key=rates.get) == 6
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["eval"]["every"] == "0.5 epochs"


def test_a_run_that_goes_on_keeps_its_intervals(run):
    every = {"eval": {"every": 0.5}, "checkpoint": {"every": "1 epoch"}}
    assert steps_with(run(max_epochs=1, **every), "eval/loss") == [0, 4, 8]
    assert steps_with(run(max_epochs=2, **every), "eval/loss") == [0, 4, 8, 12, 16]


@pytest.mark.daily("accuracy-max")
@pytest.mark.parametrize(("metric", "mode"), [("accuracy", "max"), ("accuracy", "min"), ("loss", "max")])
def test_the_best_checkpoint_is_kept_by_the_metric_that_was_chosen(run, tmp_path, capsys, metric, mode):
    rows = run(
        max_steps=6,
        eval={"every": 1, "best_metric": metric, "best_mode": mode},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": True},
    )
    measured = {row["step"]: row[f"eval/{metric}"] for row in rows if "eval/loss" in row and row["step"]}
    choose = max if mode == "max" else min
    best = max(step for step in measured if measured[step] == choose(measured.values()))
    kept = {
        int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*")
    }
    assert kept == {best, 6}
    assert find_checkpoint(tmp_path / "run", "best")[2].global_step == best
    word = "highest" if mode == "max" else "lowest"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"eval {metric} ")]
    assert word in line


def test_a_metric_of_ones_own_that_is_not_there_is_refused_before_the_first_step(run, tmp_path):
    names = {"model": "mlp", "data": "waves", "objective": "squared_error"}
    own = {section: {"kind": f"docs.example.regression:{name}"} for section, name in names.items()}
    said = run("max_steps=2", "eval.best_metric=f1", "eval.best_mode=max", code=2, **own)
    assert "eval.best_metric: 'f1' is no metric of this run's evaluation; it has loss" in said
    assert not (tmp_path / "run").exists()
