"""Every participant of the benchmark trains a tiny model for a few steps, and their losses agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

THROUGHPUT = Path(__file__).resolve().parents[2] / "benchmarks" / "throughput.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_all_participants_train_the_same_model(tmp_path):
    output = tmp_path / "results.json"
    command = [sys.executable, THROUGHPUT, "--model", "tiny", "--ranks", "1", "--precision", "fp32"]
    command += [
        "--stages",
        "plain",
        "2",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--warmup",
        "2",
        "--start-together",
    ]
    done = subprocess.run(
        [*command, "--output", output], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(output.read_text())
    assert {row["name"] for row in results["participants"]} == {
        "ours",
        "pytorch",
        "pytorch+our-loss",
        "trainer",
        "ours stage 2",
        "deepspeed stage 2",
        "deepspeed+our-loss stage 2",
        "trainer stage 2",
    }
    losses = [row["loss"] for row in results["participants"]]
    assert max(losses) - min(losses) < 1e-4 * min(losses)
    for row in results["participants"]:
        assert len(row["round_tokens_per_second"]) == 2
        assert min(row["round_tokens_per_second"]) > 0
        assert row["peak_memory_gib"] > 0
        assert row["first_step_seconds"] > 0
    assert {(pair["ours"], pair["peer"]) for pair in results["ratios"]} == {
        ("ours", "pytorch"),
        ("ours", "pytorch+our-loss"),
        ("ours", "trainer"),
        ("ours stage 2", "deepspeed stage 2"),
        ("ours stage 2", "deepspeed+our-loss stage 2"),
        ("ours stage 2", "trainer stage 2"),
    }
    assert {claim["what"] for claim in results["claims"]} == {
        "tokens/s, ours over pytorch+our-loss",
        "tokens/s, ours stage 2 over deepspeed+our-loss stage 2",
        "first step, ours over trainer",
        "first step, ours stage 2 over trainer stage 2",
    }
