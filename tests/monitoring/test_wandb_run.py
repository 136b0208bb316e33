"""A whole job against the W&B stand-in: one run, every row once, from two ranks; and no server at all."""

from __future__ import annotations

import json
import sys

import pytest
from support.launch import (
    DIGITS,
    ROOT,
    kill_after_rows,
    launch,
    read_reproducible_rows,
    run_directories,
    run_python,
    write_recipe,
)
from support.rank_pool import free_port
from support.wandb_rows import extract_server_losses, read_recorded_losses
from support.wandb_server import WandbServer

pytestmark = pytest.mark.slow
SPLIT = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
KEY = "0123456789abcdef" * 2 + "01234567"


def online(url: str) -> dict[str, str]:
    return {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}


@pytest.mark.daily("0")  # without a launcher
@pytest.mark.parametrize("ranks", [0, 2, 4])
def test_one_run_with_every_row_once_over_a_kill(tmp_path, ranks):
    recipe = write_recipe(tmp_path, max_steps=14, wandb={"mode": "auto"})
    samples = ["sample.every_eval=true", "sample.max_new_tokens=4", "wandb.checkpoints=true"]
    samples += ["log.every=1", "wandb.histograms_every=4"]
    arguments = ["--config", str(recipe), *SPLIT]
    with WandbServer(tmp_path / "server") as server:
        kill_after_rows([*arguments, *samples], ranks, tmp_path, 8, **online(server.url))
        result = launch(*arguments, *samples, ranks=ranks, **online(server.url))
    assert result.returncode == 0, result.stderr
    assert KEY not in result.stdout + result.stderr
    (run_id,) = server.runs()
    (run,) = run_directories(tmp_path)
    assert extract_server_losses(server.rows(run_id)) == read_recorded_losses(run)
    tables = [row["samples"]["nrows"] for row in server.rows(run_id) if "samples" in row]
    assert tables == [1, 2, 3, 4, 5], "steps 0, 4, 8, 12 and 14"
    drawn = [row["global_step"] for row in server.rows(run_id) if "gradients/lm_head.weight" in row]
    assert set(drawn) >= {12}, "what a kill took is not made again"
    assert set(drawn) <= {4, 8, 12}
    versions = {each["metadata"]["step"]: each["aliases"] for each in server.artifacts()}
    there = {int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")}
    assert there <= versions.keys()
    assert [step for step in versions if "latest" in versions[step]] == [14]
    if ranks != 4:
        silent = tmp_path / "silent"
        result = launch(*arguments, "wandb.mode=disabled", f"run_dir={silent}", ranks=ranks)
        assert result.returncode == 0, result.stderr
        assert read_recorded_losses(silent) == read_recorded_losses(run), "writing changes no curve"


@pytest.mark.nightly
def test_an_agent_of_a_sweep_runs_the_usual_command(tmp_path):
    recipe = write_recipe(tmp_path, **DIGITS, max_steps=3, wandb={"mode": "auto"})
    script = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(recipe)]
    command = [*script, "checkpoint.resume=never", "${args_no_hyphens}"]
    rates = [0.01, 0.003]
    trials = [{"optimizer.learning_rate": {"value": rate}} for rate in rates]
    with WandbServer(tmp_path / "server") as server:
        (server.folder / "sweep.json").write_text(
            json.dumps({"config": json.dumps({"command": command}), "trials": trials})
        )
        agent = ["-m", "wandb", "agent", "local/deepspeed-pipeline/s"]
        result = run_python(sys.executable, *agent, cwd=tmp_path, **online(server.url))
    assert result.returncode == 0, result.stderr
    assert list(server.runs()) == ["trial1", "trial0"], "the agent's own ids"
    for rate, (name, kept) in zip(rates, server.runs().items(), strict=True):
        config = json.loads(kept["config"])
        assert config["recipe"]["value"]["optimizer"]["learning_rate"] == rate
        assert [row["global_step"] for row in server.rows(name)] == [0, 1, 2, 3]
        assert kept["exitcode"] == 0


def test_curves_over_tokens_are_for_what_counts_tokens(tmp_path):
    recipe = write_recipe(tmp_path, **DIGITS, wandb={"mode": "offline", "x_axis": "tokens_seen"})
    result = launch("--config", str(recipe))
    assert result.returncode == 2
    assert "wandb.x_axis: tokens_seen: only a run with objective causal_lm counts " in result.stderr


@pytest.mark.nightly
def test_without_a_server_training_does_not_notice(tmp_path):
    recipe = write_recipe(tmp_path, wandb={"mode": "auto"})
    result = launch("--config", str(recipe), **online(f"http://127.0.0.1:{free_port()}"))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("W&B is offline") == 1
    assert "Traceback" not in result.stderr
    (run,) = run_directories(tmp_path)
    assert read_reproducible_rows(run)[-1]["step"] == 10
    assert list((run / "wandb").glob("offline-run-*"))


def test_a_crash_is_marked_with_its_last_lines(tmp_path):
    with WandbServer(tmp_path / "server") as server:
        recipe = write_recipe(
            tmp_path,
            model={"kind": "support.faults:faulty", "args": {"fault": "raise", "at": 3}},
            data={"kind": "support.faults:points"},
            objective={"kind": "classification"},
            wandb={"mode": "auto"},
        )
        faults = {"PYTHONPATH": str(ROOT / "tests")}
        result = launch("--config", str(recipe), **faults, **online(server.url))
    assert result.returncode == 1, result.stderr
    (run,) = server.runs().values()
    assert run["exitcode"] == 1
    summary = json.loads(run["summary"])
    assert "ZeroDivisionError: a programmer's mistake" in summary["failure"]
    ((title, text, severity),) = run["alerts"]
    assert (title, severity) == ("run_failed", "ERROR")
    assert "a programmer's mistake" in text
    recipe = json.loads(run["config"])
    assert recipe["environment"]["value"]["packages"]["wandb"]
    assert recipe["recipe"]["value"]["max_steps"] == 10
