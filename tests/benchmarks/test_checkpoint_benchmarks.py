"""The proofs of the checkpoints' safety run, with few faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from checkpoint_faults import plans

    return plans


def test_faults_are_spread_over_kinds_ranks_and_calls(plans):
    calls = {"one": ("owwfr", "owf"), "other": ("mowfru", "ow")}
    made = plans(calls, 48)
    assert len(made) == 48
    assert len({(plan.participant, plan.fault.kind, plan.fault.rank) for plan in made}) == 24
    for plan in made:
        call = calls[plan.participant][plan.fault.rank][plan.fault.at - 1]
        assert call == "w" or not plan.fault.kind.startswith("short write")
        assert call != "u" or plan.fault.kind != "no space"
    first_rank = [p.fault.at for p in plans({"one": calls["one"]}, 60) if p.fault.rank == 0]
    assert set(first_rank) == {1, 2, 3, 4, 5}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="the faults are written in C")
@pytest.mark.parametrize(("ours", "theirs"), [(12, 0), (0, 4)])
def test_few_faults(tmp_path, ours, theirs):
    output = tmp_path / "results.json"
    counts = ["--faults", str(ours), "--peer-faults", str(theirs)]
    command = [sys.executable, FOLDER / "checkpoint_faults.py", *counts]
    done = subprocess.run(
        [*command, "--folder", tmp_path, "--output", output],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    tables = json.loads(output.read_text())["tables"]
    for who, count in (("ours", ours), ("save_checkpoint", theirs)):
        total = tables[who][-1]
        assert (total["faults"], total["whole"] + total["incomplete"]) == (count, count)
    assert tables["ours"][-1]["incomplete"] == 0
