"""Callbacks and curricula as docs/how-to/extending.md shows them: on one curve under every split."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from support.extending import easy_first
from support.launch import write_recipe
from support.metrics_rows import read_reproducible_rows, read_rows
from support.tiny import TOLERANCES, deepspeed_json, token_bundle
from training.test_training import ALONE, ended

from pipeline.cli.train import main
from pipeline.config.data_schema import TextDataConfig
from pipeline.data.curriculum import build_weights
from pipeline.data.sampler import SourceShare

pytestmark = pytest.mark.slow

STEPS = 12
SHARES = (SourceShare("easy", 40), SourceShare("hard", 24))
CHANGES = {
    "max_steps": STEPS,
    "callbacks": [{"kind": "support.extending:Plateau", "args": {"rows": 1}}],
    "eval": {"every": 5},
    "checkpoint": {"keep_last": 20},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
}
SPLITS = {
    "ddp": None,
    "zero2": deepspeed_json(2),
    "pipeline": deepspeed_json(0) | {"pipeline": {"stages": 2}},
}


def ten_times_as_fast(step):
    """The page's curriculum: all of it in twelve steps."""
    return easy_first(100 * step)


def curriculum_bundle():
    sources = [{"name": share.name, "paths": ["x"]} for share in SHARES]
    path = "test_extending_callbacks:ten_times_as_fast"
    config = TextDataConfig.model_validate({"kind": "text", "sources": sources, "curriculum": path})
    return replace(token_bundle(), mixture=SHARES, weights_at=build_weights(config, SHARES))


def trained(job, split, folder, step=None):
    return ended(job, folder, CHANGES, step=step, deepspeed=split, data=curriculum_bundle())


def record(run):
    """(rows of training, rows of evaluation, steps of the alerts)."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in read_rows(run) if "train/loss" in row]
    alerts = [line["step"] for line in lines if line.get("event") == "plateau"]
    return rows, [row for row in read_rows(run) if "eval/loss" in row], alerts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert trained(ALONE, None, folder) == (STEPS, None)
    return record(folder)


@pytest.mark.parametrize(("before", "after"), [("zero2", "pipeline"), ("pipeline", "ddp")])
def test_callback_and_curriculum_are_on_the_curve_of_one_process(ranks, tmp_path, alone, before, after):
    """Plain PyTorch in one process, against two ranks that change their split in the evaluation of step 5."""
    stopped = ranks(2).run(trained, SPLITS[before], tmp_path, 5)
    assert stopped[0] == (5, signal.SIGUSR1)
    assert ranks(2).run(trained, SPLITS[after], tmp_path) == [(STEPS, None)] * 2
    (rows, evaluations, alerts), (expected, judged, alerted) = record(tmp_path), alone
    assert len(rows) == len(expected) == STEPS
    for row, of_one in zip(rows, expected, strict=True):
        assert row["train/loss"] == pytest.approx(of_one["train/loss"], rel=TOLERANCES["fp32"][0])
        for name in ("easy", "hard"):
            assert row[f"data/{name}_samples"] == of_one[f"data/{name}_samples"]
    assert alerts == alerted
    assert alerted, "the callback answered"
    steps = {0, 5, 10, STEPS, *(step + 1 for step in alerted)}  # by the recipe, and asked for
    assert [row["step"] for row in evaluations] == [row["step"] for row in judged] == sorted(steps)
    for row, of_one in zip(evaluations, judged, strict=True):
        assert row["eval/loss"] == pytest.approx(of_one["eval/loss"], rel=TOLERANCES["fp32"][0])


def test_the_samples_of_each_source_follow_the_page(alone):
    """Eight samples a step: easy ones in steps 1 and 2, then a tenth less of them in each."""
    easy = [row["data/easy_samples"] for row in alone[0]]
    shares = [ten_times_as_fast(step)["easy"] for step in range(STEPS)]
    for step, counted in enumerate(easy):
        assert abs(counted - 8 * sum(shares[: step + 1])) < 1
    assert easy[:2] == [8, 16]
    assert easy[-1] == easy[-2]


@pytest.mark.nightly
def test_weights_by_the_step_in_a_recipe_go_on_in_a_resumed_run(tmp_path, capfd):
    path = write_recipe(tmp_path, checkpoint={"every": 0})
    tree = json.loads(path.read_text())
    (texts,) = tree["data"].pop("paths")
    weights = {"first": {0: 1.0, 4: 0.0}, "second": {0: 0.0, 4: 1.0}}
    tree["data"]["sources"] = [{"name": name, "paths": [texts], "weight": weights[name]} for name in weights]
    path.write_text(json.dumps(tree))

    def train(run, steps):
        overrides = [f"max_steps={steps}", f"run_dir={tmp_path / run}", "engine.parallel=single"]
        assert main(["--config", str(path), *overrides, "schedule.kind=constant"]) == 0

    train("unbroken", 6)
    train("resumed", 3)
    train("resumed", 6)
    after = [
        row for row in read_reproducible_rows(tmp_path / "resumed") if row["step"] > 3 and "train/loss" in row
    ]
    assert after == [
        row
        for row in read_reproducible_rows(tmp_path / "unbroken")
        if row["step"] > 3 and "train/loss" in row
    ]
    counts = [
        row["data/first_samples"]
        for row in read_reproducible_rows(tmp_path / "unbroken")
        if "train/loss" in row
    ]
    assert counts == [8, 14, 18, 20, 20, 20]
    train_on = [f"run_dir={tmp_path / 'resumed'}", "max_steps=8", "data.sources.0.weight=0.5"]
    assert main(["--config", str(path), *train_on, "schedule.kind=constant"]) == 2
    assert "data.sources" in capfd.readouterr().err
