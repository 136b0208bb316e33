"""The checkpoint benchmark runs, on a tiny model, writing down every number; claims are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_what_a_save_costs_is_measured_beside_the_peers(tmp_path):
    output = tmp_path / "results.json"
    command = [sys.executable, CHECKPOINT, "--quick", "--groups", "2-1", "--folder", tmp_path]
    done = subprocess.run(
        [*command, "--output", output], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    results = json.loads(output.read_text())
    ours, *peers = results["savers"]
    assert [saver["name"] for saver in peers] == ["deepspeed stage 2", "trainer stage 2"]
    for saver in [ours, *peers]:
        assert len(saver["stall"]) == len(saver["lost"]) == 2
        assert all(
            0 < stall <= total <= durable
            for stall, total, durable in zip(saver["stall"], saver["total"], saver["durable"], strict=True)
        )
    for numbers in (ours["quiet"], ours["disk"], ours["checksums"]):
        assert len(numbers) == 2
        assert min(numbers) > 0
    assert ours["durable"] == ours["total"]
    # Masters and moments in fp32; they have the weights twice, or three times.
    assert 12 * 35_000 < ours["num_bytes"] < min(saver["num_bytes"] for saver in peers)
    assert len(results["claims"]) == 6
    assert all(claim["group"] == "2-1" for claim in results["claims"])


@pytest.mark.nightly
@pytest.mark.slow
def test_the_table_of_many_ranks_is_written_and_read():
    scale = CHECKPOINT.with_name("checkpoint_scale.py")
    command = [sys.executable, str(scale), "--ranks", "3"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert "read by a rank, MB" in done.stdout
    assert done.stdout.splitlines()[0].split() == ["shards", "6,507"]
