"""Steps on more GPUs are predicted as the docs say; collectives and engines are measured here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.planner.timing import step_time

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_more_ranks_never_raise_what_a_gpu_does_where_states_are_whole():
    from scaled_runs import LLAMA_8B, h100_rates

    speeds = [step_time(replace(LLAMA_8B, data=2**k), h100_rates()) for k in range(11)]
    speeds = [step.tokens_per_second for step in speeds]
    assert speeds == sorted(speeds, reverse=True)


def test_a_hop_and_a_byte_are_found_again():
    from scaling import SIZES, fit

    hop, rate = 5e-5, 2e9
    timings = [
        (name, n, size, k * ((n - 1) * hop + (n - 1) / n * size / rate))
        for name, k in (("all_reduce", 2), ("all_gather", 1))
        for n in (2, 4)
        for size in SIZES
    ]
    assert fit(timings) == (pytest.approx(hop), pytest.approx(rate))


def test_the_documentations_tables_are_the_models():
    from published import accuracy, summary
    from scaled_runs import markdown

    text = (ROOT / "docs" / "performance.md").read_text()
    for table in (accuracy() + "\n" + markdown()).strip().split("\n\n"):
        assert table.strip() in text
    runs, size, correlation = summary()
    assert f"{runs} runs" in text
    assert f"{size:.1%}" in text
    assert f"{correlation:.3f}" in text


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
    assert results["bytes_per_second"] > 0
