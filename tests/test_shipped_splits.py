"""Files of ds_configs/ as a user starts them: the launcher, two ranks, to the end, on from a checkpoint."""

from __future__ import annotations

import pytest
from support.launch import ROOT, launch, numbers, run_directories, write_recipe

from pipeline.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.nightly  # each day they train in test_shipped_files.py, and launches go on in test_endings.py
@pytest.mark.parametrize("name", ["tensor2", "pipeline2", "sequence2"])
def test_a_shipped_split_trains_the_language_model_and_goes_on(tmp_path, name):
    """One curve here too: each row of the log within bf16's rounding of the one-process run."""
    recipe = str(write_recipe(tmp_path, sample={"max_new_tokens": 4}))
    split = ["--deepspeed", str(ROOT / "ds_configs" / f"{name}.json"), "--config", recipe]
    split += ["batch.gradient_accumulation_steps=2"]
    result = launch(*split, ranks=2)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "the model wrote" in result.stdout
    alone = launch("--config", recipe, f"runs_dir={tmp_path / 'alone'}", "engine.precision=fp32")
    assert alone.returncode == 0, alone.stderr
    (run,) = run_directories(tmp_path)
    (expected,) = (tmp_path / "alone").glob("tiny-*")
    rows, expected_rows = numbers(run), numbers(expected)
    assert len(rows) == len(expected_rows)
    for row, other in zip(rows, expected_rows, strict=True):
        for key in {"train/loss", "eval/loss"} & set(other):
            assert row[key] == pytest.approx(other[key], rel=5e-3)
        assert row.get("train/tokens_seen") == other.get("train/tokens_seen")

    # Taken back to the checkpoint before the last, the same command goes on to the same numbers.
    (run / "summary.json").unlink()
    last = max((run / "checkpoints").glob("step-*"))
    for file in sorted(last.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    last.rmdir()
    result = launch(*split, ranks=2)
    assert result.returncode == 0, result.stderr
    assert numbers(run) == rows


def test_pipeline_stages_leave_a_whole_model(tmp_path):
    recipe = str(write_recipe(tmp_path, checkpoint={"every": 0}))
    split = ["--deepspeed", str(ROOT / "ds_configs" / "pipeline2.json"), "--config", recipe]
    result = launch(*split, "ds.bf16.enabled=false", "ds.fp16.enabled=false", ranks=2)
    assert result.returncode == 0, result.stderr
    (run,) = run_directories(tmp_path)
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    # Opened by transformers, it starts from the evaluation loss that its stages ended with.
    model = f"model={{kind: causal_lm, pretrained: {tmp_path / 'exported'}}}"
    again = launch("--config", recipe, f"run_dir={tmp_path / 'whole'}", model, "max_steps=1")
    assert again.returncode == 0, again.stderr
    ended = [row["eval/loss"] for row in numbers(run) if "eval/loss" in row][-1]
    started = next(row["eval/loss"] for row in numbers(tmp_path / "whole") if "eval/loss" in row)
    assert started == pytest.approx(ended, rel=1e-6)
