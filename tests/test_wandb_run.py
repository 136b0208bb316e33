"""A whole job against the W&B stand-in: one run, every row once, from two ranks; and no server at all."""

from __future__ import annotations

import json

import pytest
from support.launch import ROOT, launch, numbers, run_directories, write_recipe
from support.ranks import free_port
from support.wandb_server import Server

pytestmark = pytest.mark.slow
SPLIT = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
KEY = "0123456789abcdef" * 2 + "01234567"


def online(url: str) -> dict[str, str]:
    return {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}


def test_two_ranks_make_one_run_with_every_row_once(tmp_path):
    server = Server(tmp_path / "server")
    try:
        recipe = write_recipe(tmp_path, wandb={"mode": "auto"})
        result = launch("--config", str(recipe), *SPLIT, ranks=2, **online(server.url))
    finally:
        server.process.kill()
        server.process.wait()
    assert result.returncode == 0, result.stderr
    assert KEY not in result.stdout + result.stderr
    (run_id,) = server.runs()
    (run,) = run_directories(tmp_path)
    logged = {row["step"]: row["train/loss"] for row in numbers(run) if "train/loss" in row}
    arrived = [(row["_step"], row["train/loss"]) for row in server.rows(run_id) if "train/loss" in row]
    assert arrived == sorted(logged.items())
    evaluated = {row["step"]: row["eval/loss"] for row in numbers(run) if "eval/loss" in row}
    assert {row["_step"]: row["eval/loss"] for row in server.rows(run_id) if "eval/loss" in row} == evaluated


def test_without_a_server_training_does_not_notice(tmp_path):
    recipe = write_recipe(tmp_path, wandb={"mode": "auto"})
    result = launch("--config", str(recipe), **online(f"http://127.0.0.1:{free_port()}"))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("W&B is offline") == 1
    assert "Traceback" not in result.stderr
    (run,) = run_directories(tmp_path)
    assert numbers(run)[-1]["step"] == 10
    assert list((run / "wandb").glob("offline-run-*"))


def test_a_crash_is_marked_with_its_last_lines(tmp_path):
    server = Server(tmp_path / "server")
    try:
        recipe = write_recipe(
            tmp_path,
            model={"kind": "support.faults:faulty", "args": {"fault": "raise", "at": 3}},
            data={"kind": "support.faults:points"},
            objective={"kind": "classification"},
            wandb={"mode": "auto"},
        )
        faults = {"PYTHONPATH": str(ROOT / "tests")}
        result = launch("--config", str(recipe), **faults, **online(server.url))
    finally:
        server.process.kill()
        server.process.wait()
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
