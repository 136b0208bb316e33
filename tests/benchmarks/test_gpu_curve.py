"""gpu_curve.py on a CPU: right curves hold, wrong ones do not, and what computed them is told truthfully."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support.benchmarks import FOLDER, import_benchmark

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.models.blocks import compile_blocks

pytestmark = pytest.mark.slow
gpu_curve = import_benchmark("gpu_curve")
gpu_census = import_benchmark("gpu_census")

STEPS = 6


def judged(job, name, split, precision, options=None):
    """The verdict over the first steps of a tiny curve, and how it was computed."""
    curve = gpu_curve.CURVES[name]
    trained = gpu_curve.train(
        job, curve, split, precision, size="tiny", **({"steps": STEPS} | (options or {}))
    )
    verdict = gpu_curve.judge(trained, gpu_curve.reference_of(curve, "tiny"), precision, split)
    return {**verdict, **trained.facts}


@pytest.mark.parametrize(
    ("name", "split", "precision"),
    [
        ("llama packed, lora", "3", "fp32"),
        ("llama packed", "2", "bf16"),
    ],
)
def test_a_right_curve_holds(name, split, precision, ranks):
    found = ranks(1).run(judged, name, split, precision)[0]
    assert found["holds"], found
    assert found["nan"] == 0
    assert found["compiled"] == found["compilations"] == 0
    assert any(line.startswith("attention: by document, without a mask") for line in found["notes"])


@pytest.mark.daily("data.args.separate=false-bf16")
@pytest.mark.parametrize(
    ("override", "precision"),
    [
        ("optimizer.learning_rate=1.05e-3", "fp32"),
        ("optimizer.learning_rate=1.05e-3", "bf16"),
        ("data.args.separate=false", "bf16"),
    ],
)
def test_a_wrong_curve_does_not_hold(override, precision, ranks):
    options = {"overrides": [override], "steps": 10}
    found = ranks(1).run(judged, "llama packed", "plain", precision, options)[0]
    assert not found["holds"], found


def judged_with_blocks_traced(job):
    """The same as `judged` with compilation, but without the C++ compiler, which takes half a minute."""
    traced = partial(compile_blocks, backend="eager")
    with patch("pipeline.training.assemble.compile_blocks", traced):
        return judged(job, "llama", "plain", "fp32", {"compiled": "true", "steps": 2})


@pytest.mark.nightly
def test_compiled_blocks_are_told_of(ranks):
    found = ranks(1).run(judged_with_blocks_traced)[0]
    assert found["holds"], found
    assert found["compiled"] == 4
    assert found["compilations"] >= 1
    assert any(line.startswith("compile: the 4 LlamaDecoderLayer blocks") for line in found["notes"])


def test_values_that_are_not_finite_do_not_hold():
    reference = {"inputs": "0", "losses": [1.0, 1.0], "norms": [1.0, 1.0]}
    trained = gpu_curve.TrainedCurve([1.0, float("nan")], [1.0, 1.0], "0")
    verdict = gpu_curve.judge(trained, reference, "fp32", "plain")
    assert verdict["nan"] == 1
    assert not verdict["holds"]
    assert verdict["largest_loss_difference"] == 0


def test_other_inputs_than_the_references_are_refused():
    reference = {"inputs": "0", "losses": [1.0], "norms": [1.0]}
    with pytest.raises(ValueError, match="checksum 1, expected 0"):
        gpu_curve.judge(gpu_curve.TrainedCurve([1.0], [1.0], "1"), reference, "fp32", "plain")


def test_a_case_that_fails_has_its_line_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    curve = gpu_curve.CURVES["llama packed"]
    reference = gpu_curve.reference_of(curve, "full")
    right = gpu_curve.TrainedCurve(reference["losses"], reference["norms"], reference["inputs"])
    right.facts = dict.fromkeys(("compiled", "compilations", "notes"))

    def train(job, curve, split, *_, **__):
        if split == "2":
            raise RuntimeError("it broke\nin two lines")
        return right

    monkeypatch.setattr(gpu_curve, "train", train)
    monkeypatch.setattr(gpu_curve, "start_job", lambda *_, **__: Job(Ranks(0, 0, 1, 1), torch.device("cpu")))
    output = tmp_path / "curves.jsonl"
    assert gpu_curve.main(["--cases", "llama packed", "--output", str(output)]) == 1
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["holds"] for record in records] == [True, False, True]
    assert records[1]["failed"] == "RuntimeError: it broke"
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 3 curves hold"


def test_host_waits_are_counted_and_warnings_are_then_as_before():
    before = warnings.filters[:]
    with gpu_census.HostWaits() as waits:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert waits.stacks.total() == 1
    assert "test_gpu_curve.py" in next(iter(waits.stacks))
    assert warnings.filters == before


@pytest.mark.nightly
def test_all_curves_hold(tmp_path):
    output = tmp_path / "curves.jsonl"
    done = subprocess.run(
        [sys.executable, f"{FOLDER}/gpu_curve.py", "--output", str(output), "--precision", "fp32"],
        capture_output=True,
        text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "15 of 15 curves hold"
    assert len(output.read_text().splitlines()) == 15
