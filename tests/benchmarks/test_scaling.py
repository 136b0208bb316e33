"""The model of scaling is held to published runs, to what must hold at its limits, and to itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def known():
    from published import H100, LLAMA_8B

    return LLAMA_8B, replace(H100, straggling=0.0)


def test_published_runs_are_met_within_the_stated_band():
    from published import compared

    predicted = [each for each in compared() if not each.is_fit]
    sharded = [each for each in predicted if each.plan.tensor == 1]
    assert len({each.series for each in sharded}) >= 6
    assert max(abs(each.error) for each in sharded) < 0.025
    cut = [each for each in predicted if each.plan.tensor == 4]
    assert len(cut) == 2
    assert max(abs(each.error) for each in cut) < 0.2


def test_a_slower_network_never_makes_a_step_faster(known):
    from scaling_model import Plan, predict

    shape, cluster = known
    plans = [Plan(64, stage, rows=1, hpz=hpz) for stage in range(4) for hpz in (False, stage == 3)]
    plans += [Plan(8, 1, tensor=8, rows=1), Plan(8, 1, pipeline=8, rows=1), Plan(8, 3, sequence=8, rows=1)]
    for plan in plans:
        seconds = [predict(shape, replace(cluster, network=rate), plan).seconds for rate in (5e10, 5e9, 5e8)]
        assert seconds == sorted(seconds)
        assert seconds[-1] > seconds[0]


def test_more_ranks_never_raise_what_a_gpu_does_where_states_are_whole(known):
    from scaling_model import Plan, predict

    shape, cluster = known
    rates = [predict(shape, cluster, Plan(2**k, 0, rows=1)).tokens_per_second for k in range(11)]
    assert rates == sorted(rates, reverse=True)


def test_without_collectives_a_step_is_its_arithmetic_and_its_optimizer(known):
    from scaling_model import OPTIMIZER_BYTES, Plan, predict

    shape, cluster = known
    step = predict(shape, cluster, Plan(1, 0, rows=2, micro_batches=3))
    assert step.compute == pytest.approx(6 * shape.length * shape.flops_per_token / cluster.flops)
    assert step.optimizer == pytest.approx(shape.parameters * OPTIMIZER_BYTES / cluster.memory)
    assert step.seconds == step.compute + step.optimizer
    assert predict(shape, cluster, Plan(1, 0, rows=2, recompute=True)).compute == pytest.approx(
        2 * shape.length * shape.flops_per_token / cluster.flops * 4 / 3
    )


def test_a_pipelines_bubble_shrinks_with_its_micro_batches(known):
    from scaling_model import Plan, predict

    shape, cluster = known
    free = replace(cluster, network=1e18, link=1e18, link_latency=0.0, network_latency=0.0)
    for count in (4, 8, 64):
        step = predict(shape, free, Plan(1, 1, pipeline=4, micro_batches=count))
        assert step.bubble / step.compute == pytest.approx(3 / count)


def test_what_nothing_hides_is_waited_for():
    from scaling_model import exposed

    assert exposed(8.0, beside=100.0, pieces=8) == 1.0
    assert exposed(8.0, beside=0.0, pieces=8) == 8.0
    assert exposed(8.0, beside=3.0, pieces=8) == 5.0


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
    from published import markdown

    text = (ROOT / "docs" / "performance.md").read_text()
    for table in markdown().strip().split("\n\n"):
        assert table in text


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
