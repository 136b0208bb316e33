"""Every way a run can end, with real launches: killed, stopped, crashed, out of disk, out of numbers."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from support.checkpoints import flip_last_bit
from support.launch import (
    ROOT,
    TRAIN,
    kill_after_rows,
    launch,
    read_reproducible_rows,
    run_directories,
    run_python,
    write_recipe,
)

from pipeline.__main__ import main as run_command
from pipeline.cli.train import main
from pipeline.monitoring.trackers.jsonl import iterate_record

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "ds_configs"
FAULTS = {"PYTHONPATH": str(ROOT / "tests")}


def fault_recipe(folder: Path, fault: str, **arguments: object) -> Path:
    return write_recipe(
        folder,
        model={"kind": "support.faults:faulty", "args": {"fault": fault, **arguments}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
    )


def reported(run: Path, state: str = "") -> bool:
    """Whether the run has its report, one that says how it ended."""
    return f'"state":"{state}' in (run / "report.html").read_text()


def why_failed(run: Path) -> str:
    """The end of a run, as its report says."""
    data = re.search(
        r'<script type="application/json"[^>]*>(.*?)</script>', (run / "report.html").read_text(), re.S
    )
    (view,) = json.loads(data[1])["runs"]
    assert view["state"] == "failed"
    return view["failure"]


def splits():
    """(split, ranks, rows that are logged before the kill): before the first checkpoint, and after some."""
    fp16 = ["ds.bf16.enabled=false", "ds.fp16.enabled=true"]
    yield pytest.param([], 0, 2, id="plain-before-any-checkpoint")
    yield pytest.param([], 0, 9, id="plain")
    yield pytest.param(["--deepspeed", str(CONFIGS / "zero2.json")], 0, 6, id="zero2-1rank")
    yield pytest.param(["--deepspeed", str(CONFIGS / "zero1.json"), *fp16], 2, 8, id="zero1-fp16-2ranks")
    yield pytest.param(["--deepspeed", str(CONFIGS / "zero3.json")], 2, 11, id="zero3-2ranks")


@pytest.mark.daily("plain")
@pytest.mark.parametrize(("split", "ranks", "rows"), splits())
def test_killed_and_started_again_equals_never_killed(tmp_path, split, ranks, rows):
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    texts = f"data.paths=[{whole / 'texts'}]"  # the same text for both
    recipe = write_recipe(whole, max_steps=24)
    assert launch("--config", str(recipe), *split, ranks=ranks).returncode == 0

    recipe = write_recipe(broken, max_steps=24)
    arguments = ["--config", str(recipe), texts, *split]
    kill_after_rows(arguments, ranks, broken, rows)
    (run,) = run_directories(broken)
    assert not (run / "summary.json").exists(), "killed after the run"
    assert run_command(["report", str(run)]) == 0
    assert reported(run, "ended without a recorded reason (killed?)")
    again = launch(*arguments, ranks=ranks)
    assert again.returncode == 0, again.stderr
    assert ("resuming" in again.stderr) == (rows > 2)
    assert run_directories(broken) == [run]
    (told,) = [line for line in iterate_record(run / "metrics.jsonl") if line.get("event") == "run_killed"]
    assert re.fullmatch(
        r"the last process .* ended without a recorded reason \(killed\?\) after step \d+", told["message"]
    )
    assert reported(run, "finished")
    assert told["message"] in (run / "report.html").read_text()
    assert read_reproducible_rows(run) == read_reproducible_rows(run_directories(whole)[0])
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000021", "step-00000024"]


def test_killed_and_gone_on_with_under_another_split(tmp_path):
    """2 ranks of ZeRO-2, then 1 of ZeRO-3: one run, and the curve of plain PyTorch."""
    # A low rate: rounding that differs between splits is not grown by the steps.
    recipe = write_recipe(tmp_path, max_steps=10, optimizer={"learning_rate": 1e-3})
    arguments = ["--config", str(recipe), "ds.bf16.enabled=false", "ds.fp16.enabled=false"]
    alone = ["--config", str(recipe), f"run_dir={tmp_path / 'alone'}", "engine.precision=fp32"]
    assert launch(*alone).returncode == 0
    kill_after_rows([*arguments, "--deepspeed", str(CONFIGS / "zero2.json")], 2, tmp_path, 8)
    (run,) = run_directories(tmp_path)
    assert not (run / "summary.json").exists(), "killed after the run"
    result = launch(*arguments, "--deepspeed", str(CONFIGS / "zero3.json"))
    assert result.returncode == 0, result.stderr
    assert f"resuming {run} from step-" in result.stderr
    assert run_directories(tmp_path) == [run]
    rows = read_reproducible_rows(run)
    expected = read_reproducible_rows(tmp_path / "alone")
    assert [(row["step"], set(row)) for row in rows] == [(row["step"], set(row)) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for key, value in other.items():
            # Step, tokens and samples to the last digit; the order of the samples shows in the losses.
            losses = dict.fromkeys(("train/loss", "eval/loss", "eval/bits_per_byte"), 2e-6)
            band = losses | {"eval/perplexity": 2e-5, "train/grad_norm": 1e-5}
            assert row[key] == pytest.approx(value, rel=band.get(key, 0), abs=0), (row["step"], key)


@pytest.mark.daily("0")
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigterm_saves_leaves_and_goes_on(tmp_path, ranks):
    once = tmp_path / "once"
    recipe = fault_recipe(tmp_path, "terminate", rank=max(0, ranks - 1), at=3, once_file=str(once))
    split = ["--deepspeed", str(CONFIGS / "zero1.json"), "batch.micro_batch_size=4"] if ranks else []
    first = launch("--config", str(recipe), *split, ranks=ranks, **FAULTS)
    assert first.returncode == 128 + signal.SIGTERM, first.stderr
    assert "Traceback" not in first.stdout + first.stderr
    (run,) = run_directories(tmp_path)
    assert reported(run, "stopped")
    stopped_at = read_reproducible_rows(run)[-1]["step"]
    assert 3 <= stopped_at < 10
    assert (run / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()
    second = launch("--config", str(recipe), *split, ranks=ranks, **FAULTS)
    assert second.returncode == 0, second.stderr
    assert [row["step"] for row in read_reproducible_rows(run) if "train/loss" in row] == list(range(1, 11))
    assert reported(run, "finished")
    assert f"report         {run / 'report.html'}" in second.stdout


def test_a_crash_on_one_rank_ends_all_and_shows_its_traceback_once(tmp_path):
    recipe = fault_recipe(tmp_path, "raise", rank=1)
    result = launch("--config", str(recipe), "--deepspeed", str(CONFIGS / "zero2.json"), ranks=2, **FAULTS)
    assert result.returncode not in (0, 2, 124)  # 124: the watchdog would have had to end it
    both = result.stdout + result.stderr
    assert both.count("Traceback (most recent call last)") == 1
    assert both.count("ZeroDivisionError: a programmer's mistake") == 1
    assert "[rank 1]" in both
    (run,) = run_directories(tmp_path)
    assert "a programmer's mistake" in why_failed(run)
    assert f"report         {run / 'report.html'}" in result.stdout


MEMORY = (
    r"^\[rank 1\] error: out of memory on cpu in the forward at micro_batch_size 8, at \S+faults.py:\d+ .*: "
    r"asked for 4294967296.00 GiB, it used .* GiB .* in use; this rank's memory: .* temporaries.*. "
    r"What helps, best first: batch.micro_batch_size=4 "
    r"batch.gradient_accumulation_steps=2 \(the same step with 2 times"
)
ASSERTED = (
    r"^error: cpu failed \(most often an index out of range: .* CUDA error: device-side assert triggered "
    r".* with CUDA_LAUNCH_BLOCKING=1"
)


@pytest.mark.daily("one process")
@pytest.mark.parametrize(
    ("fault", "ranks", "code", "said"),
    [("allocate", 2, 12, MEMORY), ("assert", 0, 14, ASSERTED)],
    ids=["two ranks", "one process"],
)
def test_a_device_that_fails_is_told_in_one_line_and_nothing_is_saved(tmp_path, fault, ranks, code, said):
    recipe = fault_recipe(tmp_path, fault, rank=ranks - 1 if ranks else 0, at=3)
    split = ["--deepspeed", str(CONFIGS / "zero2.json")] if ranks else []
    sizes = ["batch.micro_batch_size=8", "batch.global_batch_size=16"] if ranks else []
    result = launch("--config", str(recipe), *split, *sizes, ranks=ranks, **FAULTS)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert len(re.findall(said, result.stderr, re.M)) == 1, result.stderr
    (run,) = run_directories(tmp_path)
    assert not list((run / "checkpoints").iterdir())
    assert reported(run, "failed")
    assert "Traceback" in (run / "logs" / f"rank{max(0, ranks - 1):05d}.log").read_text()


def test_a_run_that_fails_while_it_is_built_has_a_report_too(tmp_path):
    result = launch("--config", str(fault_recipe(tmp_path, "memory", rank=0, at=0)), **FAULTS)
    assert result.returncode == 12
    (run,) = run_directories(tmp_path)
    assert "out of memory on cpu while the model is built" in why_failed(run)
    assert f"report         {run / 'report.html'}" in result.stdout
    assert run_command(["report", str(run)]) == 0


@pytest.mark.nightly  # each day tests/distributed/test_watchdog.py
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_without_their_tracebacks(tmp_path, rank):
    recipe = fault_recipe(tmp_path, "kill", rank=rank)
    result = launch("--config", str(recipe), "--deepspeed", str(CONFIGS / "zero2.json"), ranks=2, **FAULTS)
    assert result.returncode != 0
    assert "Traceback" not in result.stdout + result.stderr
    gone = rf"^rank {rank} on \S+ \(pid \d+\) is gone: last heart"
    assert re.search(gone, result.stderr, re.M), result.stderr
    (run,) = run_directories(tmp_path)
    assert re.search(gone, why_failed(run))
    assert f"report         {run / 'report.html'}" in result.stdout


def test_gradients_that_stay_nan_end_the_run_with_one_line(tmp_path):
    recipe = fault_recipe(tmp_path, "nan", at=2)
    result = launch("--config", str(recipe), "max_steps=30", "batch.micro_batch_size=8", **FAULTS)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "NaN gradient" in errors[0]
    assert reported(*run_directories(tmp_path), "failed")
    assert "Traceback" not in result.stderr


# Files over 320 KiB cannot be written: data and metrics fit, a checkpoint does not.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (320 * 1024, 320 * 1024))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_full_disk_does_not_stop_training_and_is_told(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=6)
    (tmp_path / "limited.py").write_text(LIMITED)
    result = run_python(str(tmp_path / "limited.py"), TRAIN, "--config", str(recipe))
    assert result.returncode == 2
    assert "step 3 is not saved: rank 0 on " in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert error.startswith("error: step 6 is not saved: rank 0 on ")
    assert "File too large" in error
    assert "Traceback" not in result.stderr
    (run,) = run_directories(tmp_path)
    assert read_reproducible_rows(run)[-1]["step"] == 6
    assert list((run / "checkpoints").iterdir()) == []
    assert launch("--config", str(recipe)).returncode == 0  # and it starts again once there is room


def test_more_steps_for_a_finished_run(tmp_path):
    recipe = write_recipe(tmp_path)
    fixed = f"run_dir={tmp_path / 'fixed'}"
    assert launch("--config", str(recipe), fixed, "max_steps=4").returncode == 0
    more = launch("--config", str(recipe), fixed, "max_steps=6", "checkpoint.resume=required")
    assert more.returncode == 0, more.stderr
    assert read_reproducible_rows(tmp_path / "fixed")[-1]["step"] == 6
    assert json.loads((tmp_path / "fixed" / "summary.json").read_text())["global_step"] == 6
    rate = launch("--config", str(recipe), fixed, "max_steps=8", "optimizer.learning_rate=1e-3")
    assert rate.returncode == 0, rate.stderr
    changes = "max_steps was 6, is 8; optimizer.learning_rate was 0.01, is 0.001"
    assert f"from step-00000006 on: {changes}" in rate.stderr
    assert "max_steps: 6" in (tmp_path / "fixed" / "recipe-until-step-00000006.yaml").read_text()
    rows = {row["step"]: row for row in read_reproducible_rows(tmp_path / "fixed") if "train/loss" in row}
    assert list(rows) == list(range(1, 9))
    assert rows[6]["train/learning_rate"] > rows[7]["train/learning_rate"]
    damaged = tmp_path / "fixed" / "checkpoints" / "step-00000008"
    flip_last_bit(damaged / "rank-00000.safetensors")
    again = launch("--config", str(recipe), fixed, "max_steps=8", "optimizer.learning_rate=2e-3")
    assert again.returncode == 0, again.stderr
    assert "from step-00000006 on: optimizer.learning_rate was 0.001, is 0.002" in again.stderr
    assert "0.001" in (tmp_path / "fixed" / "recipe-until-step-00000006.yaml").read_text()
    assert not (tmp_path / "fixed" / "recipe-before-resume.yaml").exists()
    less = launch("--config", str(recipe), fixed, "max_steps=7")
    assert less.returncode == 2
    assert f"error: {tmp_path / 'fixed'} is at step 8 already, and max_steps is 7" in less.stderr
    other = launch("--config", str(recipe), fixed, "max_steps=8", "model.num_layers=1")
    assert other.returncode == 2
    assert "model.num_layers was 2, is 1" in other.stderr


def test_stopped_while_it_writes_its_sample_a_run_is_not_finished(tmp_path, monkeypatch):
    """All that is left for the same command is the sample."""
    recipe = write_recipe(tmp_path, max_steps=4, sample={"max_new_tokens": 4})

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.api.sample_text", stopped)
        assert main(["--config", str(recipe)]) != 0
    (run,) = run_directories(tmp_path)
    before = read_reproducible_rows(run)
    assert [row["step"] for row in before if "eval/loss" in row] == [0, 4]
    assert not (run / "summary.json").exists()
    assert main(["--config", str(recipe), "checkpoint.resume=required"]) == 0
    assert read_reproducible_rows(run) == before
    assert json.loads((run / "summary.json").read_text())["sample"]
