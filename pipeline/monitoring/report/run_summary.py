"""Summary of a run at its end: steps, losses, and the time they took. Read from metrics.jsonl, so that what
was done before a resume counts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.schema import EvalConfig
from pipeline.errors import PipelineError
from pipeline.files import format_duration
from pipeline.monitoring.events import PLAN, STOPPED_EARLY, TIME
from pipeline.monitoring.trackers.console import count, decimals
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, iterate_record


def closing_line(name: str, text: object) -> str:
    """Return a line of a name and a text, aligned with the others."""
    return f"{name:<13}  {text}"


def summary_lines(run_dir: Path, best_by: EvalConfig | None = None) -> list[str]:
    """Return aligned lines of a name and a text; none if the record cannot be read."""
    try:
        return list(lines_of(iterate_record(run_dir / METRICS_FILE), best_by))
    except PipelineError:
        return []


def lines_of(rows: Iterable[Mapping[str, Any]], best_by: EvalConfig | None = None) -> Iterator[str]:
    """Return the lines of `summary_lines`.

    Args:
        rows: Lines of metrics.jsonl, in order.
        best_by: Which metric chooses the best checkpoint; it has a line as well.
    """
    chosen = best_by or EvalConfig()
    step = 0
    seconds = tokens = 0.0
    plan = early = ""
    metrics: dict[str, _Best] = {}
    for row in rows:
        if row.get("event") == PLAN:
            plan = str(row["message"]).removeprefix("plan: ")
        if row.get("event") == STOPPED_EARLY:
            early = str(row["message"])
        if row.get("event") == TIME:  # has the steps behind the last row, too
            step = int(row["step"])
            seconds = row["goodput"] * row["elapsed_seconds"]
            tokens = row.get("tokens_seen", tokens)
        if "train/loss" in row:
            early = ""
            before, step = step, int(row["step"])
            seconds += (step - before) * row.get("perf/step_time_seconds", 0.0)
            tokens = row.get("train/tokens_seen", 0.0)
        for key in row:
            chooses = key == f"eval/{chosen.best_metric}"
            name = _name(key) or (f"eval {chosen.best_metric}" if chooses else "")
            if name:
                is_lowest = chosen.best_is_lowest if chooses else name.endswith("loss")
                metrics.setdefault(name, _Best(is_lowest=is_lowest)).add(int(row["step"]), row[key])
    if step:
        seen = f", {count(tokens)} tokens" if tokens else ""
        yield closing_line("steps", f"{step:,} in {format_duration(seconds)}{seen}")
    if early:
        yield closing_line("stopped early", early)
    first = ("loss", "accuracy", "eval loss", "eval accuracy")
    for name in (*(name for name in first if name in metrics), *sorted(metrics.keys() - set(first))):
        yield closing_line(name, metrics[name])
    if plan:
        yield closing_line("plan", plan)


def _name(key: str) -> str | None:
    """Return what a column is called here: a loss, or an accuracy as classes and preferences have one."""
    group, _, metric = key.partition("/")
    if group not in ("train", "eval") or metric not in ("loss", "accuracy", "rewards/accuracy"):
        return None
    return f"{'eval ' if group == 'eval' else ''}{metric.removeprefix('rewards/')}"


class _Best:
    """The last of a metric's values, and the best: the lowest loss, the highest accuracy."""

    def __init__(self, *, is_lowest: bool) -> None:
        self._sign, self._word = (1, "lowest") if is_lowest else (-1, "highest")
        self._last, self._best = (0, math.nan), (0, math.nan)

    def add(self, step: int, value: float) -> None:
        self._last = step, value
        if math.isnan(self._best[1]) or self._sign * value < self._sign * self._best[1]:
            self._best = self._last

    def __str__(self) -> str:
        last = f"{decimals(self._last[1])} at step {self._last[0]}"
        if math.isnan(self._best[1]):
            return last
        if self._best[0] == self._last[0]:
            return f"{last}, the {self._word}"
        return f"{last}; {self._word} {decimals(self._best[1])} at step {self._best[0]}"
