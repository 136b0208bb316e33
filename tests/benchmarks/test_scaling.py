"""Steps on more GPUs are held to published runs, and what is measured here to itself."""

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


def test_published_runs_are_met_within_the_stated_band():
    from scaled_runs import compared

    predicted = [each for each in compared() if not each.is_fit]
    sharded = [each for each in predicted if each.job.tensor == 1]
    assert len({each.series for each in sharded}) >= 6
    assert max(abs(each.error) for each in sharded) < 0.07
    cut = [each for each in predicted if each.job.tensor > 1]
    assert len(cut) == 3
    assert max(abs(each.error) for each in cut) < 0.2


def test_more_ranks_never_raise_what_a_gpu_does_where_states_are_whole():
    from scaled_runs import H100, LLAMA_8B, rates

    jobs = [replace(LLAMA_8B, data=2**k) for k in range(11)]
    speeds = [step_time(job, rates(H100)).tokens_per_second for job in jobs]
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
def test_engines_are_measured_and_predicted(tmp_path):
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
    assert all(step["predicted"] > 0 for step in results["steps"])
    assert results["steps"][0]["error"] == pytest.approx(0, abs=1e-6)
    assert results["bytes_per_second"] > 0
