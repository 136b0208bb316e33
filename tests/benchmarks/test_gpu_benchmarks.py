"""The scripts that gpu.sh runs take the same steps on a CPU, with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def variables(folder):
    return os.environ | {"OUT": str(folder), "PYTHON": sys.executable, "TINY": "1"}


def gpu_sh(subcommand, folder):
    return subprocess.run(
        ["bash", BENCHMARKS / "gpu.sh", subcommand],
        env=variables(folder),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_facts_of_the_machine_are_told():
    import gpu_facts

    facts = {record["fact"]: record for record in gpu_facts.facts(tiny=True)}
    assert facts["machine"]["torch"] == torch.__version__
    assert facts["copy"]["gb_per_second"] > 0
    assert set(gpu_facts.PRODUCTS) <= {name.removeprefix("matmul ") for name in facts}
    assert facts["sdpa dense mask"]["kernels"]


def test_a_census_counts_what_the_host_reads():
    import gpu_census

    def step():
        value = torch.ones(8, 8).mm(torch.ones(8, 8)).sum()
        return value.item() + float(value)

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(gpu_census.COUNTED):
            step()
    found = gpu_census.summary(profiler.events(), 1.0)
    assert found["host_reads"] == 2
    assert found["operators"] > 4
    assert "aten::mm" in {name for name, _ in found["longest"]}


def test_a_subcommand_that_is_none_is_told(tmp_path):
    done = gpu_sh("everything", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "gpu.sh: got everything, expected one of first|second|gpt2|1b|8b|8b-lora|ckpt, such as: "
        "bash benchmarks/gpu.sh first"
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("subcommand", "written"),
    [
        ("first", ["facts.jsonl", "curve.jsonl", "gpt2-124m.jsonl", "llama-1b.jsonl", "logs.txt"]),
        ("second", ["census.jsonl"]),
        ("gpt2", ["gpt2-124m.jsonl", "logs.txt"]),
        ("1b", ["llama-1b.jsonl", "logs.txt"]),
        ("8b", ["llama-8b.jsonl", "logs.txt"]),
        ("8b-lora", ["llama-8b-lora.jsonl", "logs.txt"]),
        ("ckpt", ["checkpoint.json"]),
    ],
)
def test_a_subcommand_runs_with_a_tiny_model(subcommand, written, tmp_path):
    done = gpu_sh(subcommand, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    if subcommand == "first":
        curves = [record for record in lines(tmp_path / "curve.jsonl") if "curve" in record]
        assert len(curves) == 15
        assert all(record["holds"] for record in curves)
        ended = [record for record in lines(tmp_path / "llama-1b.jsonl") if "loss" in record]
        assert [record["peer"] for record in ended] == ["ours", "trainer"]
        logs = (tmp_path / "logs.txt").read_text()
        assert "=== ours, rank0" in logs
        assert "\nmodel       " in logs
        assert "attention: transformers'" not in logs  # ours computes attention by document
        assert "=== trainer, rank0" in logs
    if subcommand == "second":
        census = {record["census"]: record for record in lines(tmp_path / "census.jsonl")}
        assert set(census) == {"ours", "ours stage 2"}
        assert all(record["operators"] > 100 for record in census.values())
    if subcommand in {"gpt2", "1b"}:
        ended = [record for record in lines(tmp_path / written[0]) if "loss" in record]
        assert {row["micro_batch_size"] for row in ended} == {2}
        assert {(row["peer"], row["rows"], row["split"]) for row in ended} == {
            (peer, rows, split)
            for peer in ("ours", "trainer")
            for rows in ("packed", "unpacked")
            for split in ("plain", "2")
        }


@pytest.mark.nightly
def test_a_call_that_is_killed_leaves_what_it_measured_before(tmp_path):
    """The machine is taken away: nothing has the time to end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["bash", BENCHMARKS / "gpu.sh", "first"], env=variables(tmp_path), **quiet) as call:
        curve = tmp_path / "curve.jsonl"
        while call.poll() is None and not (curve.exists() and curve.read_text().count("\n") >= 2):
            time.sleep(0.1)
        for process in [psutil.Process(call.pid), *psutil.Process(call.pid).children(recursive=True)]:
            process.kill()
    assert lines(tmp_path / "facts.jsonl")
    assert len(lines(curve)) >= 2
