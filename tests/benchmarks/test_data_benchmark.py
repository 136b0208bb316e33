"""The data benchmark runs, on little data, and writes every number down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_preparing_and_loading_are_measured_beside_the_peers(tmp_path):
    output = tmp_path / "results.json"
    sizes = ["--megabytes", "0.5", "--loader-megabytes", "4"]
    rounds = ["--prepare-rounds", "2", "--loader-rounds", "2", "--no-wait"]
    command = [sys.executable, DATA, *sizes, *rounds, "--folder", tmp_path, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(output.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    prepared = results["prepare_megabytes_per_second"]
    loaded = results["loader_tokens_per_second"]
    assert len(prepared) == 3
    assert {"ours", "nanoGPT", "datasets + DataLoader"} < set(loaded)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in [*prepared.values(), *loaded.values()])
