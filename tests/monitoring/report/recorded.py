"""Lines of a metrics.jsonl, and run directories as a run leaves them, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

RECIPE = {
    "name": "small",
    "max_steps": 100,
    "model": {"architecture": "llama"},
    "optimizer": {"learning_rate": 0.001},
}


def row(step: int, **metrics: float | str) -> dict[str, Any]:
    """Return the row of a step of a language model; `loss` and `grad_norm` are those of training."""
    named = {f"train/{key}": value for key, value in metrics.items()}
    clocks = {"perf/step_time_seconds": 0.5, "perf/data_time_seconds": 0.1, "perf/tokens_per_second": 2000.0}
    return {"step": step, "train/loss": 5.0 / step, **clocks, "train/tokens_seen": 1000 * step} | named


def event(step: int, name: str = "loss_spike", **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "event": name,
        "level": "warning",
        "message": "what it is",
        "advice": "what to do",
    } | more


def write_run(
    path: Path,
    lines: Iterable[dict[str, Any]] = (),
    finished: bool = True,
    log: str = "",
    recipe: dict[str, Any] | None = None,
    world_size: int = 1,
) -> Path:
    """Write a run directory with these lines of metrics.jsonl and return its path."""
    (path / "logs").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | (recipe or {})))
    (path / "split.json").write_text(json.dumps({"world_size": world_size, "global_batch_size": 8}))
    (path / "environment.json").write_text(json.dumps({"devices": ["cpu"], "git_commit": "abcdef0123456789"}))
    (path / "logs" / "rank00000.log").write_text(log)
    (path / ".lock").touch()
    if finished:
        (path / "summary.json").write_text(json.dumps({"global_step": 1, "sample": "it wrote this"}))
    return path
