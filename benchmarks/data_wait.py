"""What a step of the default run waits for data, by the run's own perf/data_time_seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
MOST = 0.01  # of a step


def measure_wait(folder: Path) -> dict[str, float]:
    """Seconds of a step and of its wait, medians over the logged rows but the first.

    Raises:
        RuntimeError: the run failed.
    """
    overrides = [f"runs_dir={folder}", "name=wait", f"max_steps={STEPS}", "log.every=5", "eval.max_samples=8"]
    overrides += ["wandb.mode=disabled", "sample.max_new_tokens=0", "checkpoint.resume=never"]
    command = [sys.executable, "launch/train.py", "--deepspeed", "ds_configs/zero2.json", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: code {done.returncode}\n{done.stderr}")
    (metrics,) = folder.glob("wait-*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time_seconds" in row][1:]
    return {
        "step_seconds": median(row["perf/step_time_seconds"] for row in steps),
        "wait_seconds": median(row["perf/data_time_seconds"] for row in steps),
    }


def print_wait(console: Console, found: dict[str, float]) -> None:
    step, wait = found["step_seconds"], found["wait_seconds"]
    console.print(
        f"the default run: {1000 * wait:.2f} of {1000 * step:.0f} ms a step are spent waiting for data, "
        f"{wait / step:.2%} (wanted: < {MOST:.0%})"
    )


def missed_wait(found: dict[str, float]) -> list[str]:
    share = found["wait_seconds"] / found["step_seconds"]
    return [f"wait for data: {share:.2%} of the step"] * (share >= MOST)
