"""The benchmark of collectives and engines on a few ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.nightly
@pytest.mark.slow
def test_collectives_and_engines_are_measured(tmp_path):
    output = tmp_path / "scaling.json"
    command = [sys.executable, BENCHMARKS / "scaling.py", "--model", "tiny", "--ranks", "1", "2"]
    command += ["--stages", "plain", "3", "--steps", "2", "--rounds", "2", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert [(step["split"], step["ranks"]) for step in results["steps"]] == [
        ("plain", 1),
        ("3", 1),
        ("plain", 2),
        ("3", 2),
    ]
    assert all(step["seconds"] > 0 for step in results["steps"])
    assert {(name, ranks) for name, ranks, _, _ in results["collectives"]} == {
        ("all_reduce", 2),
        ("all_gather", 2),
    }
    assert all(seconds > 0 for *_, seconds in results["collectives"])
