"""Runs with a tracker that never comes back: they end as they should, and their time is none of its."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launch import DIGITS, launch, run_directories, write_recipe
from support.poisoned import ALONE, train
from trackers_of_tests import ReadsTheRecord

from pipeline.monitoring.trackers.jsonl import read_metrics

SINKS = str(Path(__file__).parent)


@pytest.mark.slow
def test_a_job_ends_without_the_sinks_that_block(tmp_path):
    own = [
        {"kind": "trackers_of_tests:Blocked", "args": {"at": at, "close_seconds": 1}}
        for at in ("write", "close")
    ]
    recipe = write_recipe(tmp_path, **DIGITS, log={"sinks": own})
    result = launch("--config", str(recipe), PYTHONPATH=SINKS)
    assert result.returncode == 0, result.stderr
    said = [line for line in (result.stdout + result.stderr).splitlines() if "is dropped" in line]
    assert len(said) == 2, said
    assert "it did not take its last" in said[0]
    assert "it did not close within 1 s" in said[1]
    (run,) = run_directories(tmp_path)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 4, 8, 10]
    assert (run / "summary.json").exists()


@pytest.mark.slow
def test_the_time_of_a_run_has_nothing_of_a_sink_that_blocks(tmp_path):
    """It is summed up while the tracker is in its first `write`, and before anything is waited for."""
    ReadsTheRecord.seen = []
    log = {"sinks": [{"kind": "trackers_of_tests:ReadsTheRecord"}]}
    train(ALONE, None, str(tmp_path), {}, max_steps=3, log=log)
    assert set(ReadsTheRecord.seen) == {"summed up", "closed"}
    assert ReadsTheRecord.seen[-1] == "closed"
