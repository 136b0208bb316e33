"""The checkpoint benchmark runs, on a tiny model, writing down every number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("plain-1", ["ours", "torch.save", "trainer"]),
        ("2-2", ["ours stage 2", "deepspeed stage 2", "trainer stage 2"]),
    ],
)
def test_what_a_save_costs_is_measured_beside_the_peers(group, names, tmp_path):
    output = tmp_path / "results.json"
    command = [sys.executable, CHECKPOINT, "--quick", "--groups", group, "--folder", tmp_path]
    done = subprocess.run(
        [*command, "--output", output], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    results = json.loads(output.read_text())
    assert [saver["name"] for saver in results["savers"]] == names
    for saver in results["savers"]:
        assert len(saver["stall"]) == len(saver["lost"]) == 2
        assert all(
            0 < stall <= total <= durable
            for stall, total, durable in zip(saver["stall"], saver["total"], saver["durable"], strict=True)
        )
    ours, *peers = results["savers"]
    assert ours["durable"] == ours["total"]
    # Masters and moments in fp32; under ZeRO peers have the weights twice, or three times.
    assert ours["num_bytes"] > 12 * 35_000
    if group != "plain-1":
        assert ours["num_bytes"] < min(saver["num_bytes"] for saver in peers)
