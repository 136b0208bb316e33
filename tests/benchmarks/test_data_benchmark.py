"""The data benchmarks run, on little data, and write down every number; whether targets hold is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(tmp_path: Path, program: str, *arguments: str) -> dict:
    output = tmp_path / "results.json"
    command = [sys.executable, FOLDER / program, *arguments, "--folder", tmp_path, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    results = json.loads(output.read_text())
    assert done.returncode == bool(results["failures"]), done.stderr + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    return results


@pytest.mark.nightly
@pytest.mark.slow
def test_preparing_is_measured_against_the_bare_tokeniser(tmp_path):
    sizes = ["--megabytes", "2", "--standard-megabytes", "0.5"]
    results = run(tmp_path, "data.py", *sizes, "--prepare-rounds", "2", "--loader-rounds", "0", "--no-wait")
    speeds = results["prepare_megabytes_per_second"]
    assert len(speeds) == 5
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in speeds.values())


@pytest.mark.nightly
@pytest.mark.slow
def test_the_loader_is_measured_against_others(tmp_path):
    results = run(tmp_path, "data_loader.py", "--megabytes", "4", "--rounds", "2", "--burst", "0.01")
    assert {"ours", "nanoGPT", "datasets + DataLoader"} < set(results["tokens_per_second"])
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in results["tokens_per_second"].values())
    assert results["claims"]["seek_seconds"] > 0
