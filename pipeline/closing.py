"""What a run comes to, when it ends: steps, losses, the time they took. Read from metrics.jsonl, so that what
was done before a resume counts too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.events import PLAN
from pipeline.sinks.console import count, decimals, duration
from pipeline.sinks.jsonl import METRICS_FILE, iterate_record


def summed_up(run_dir: Path) -> list[str]:
    """Lines whose first words stand under each other; none where the record cannot be read."""
    try:
        return list(lines_of(iterate_record(run_dir / METRICS_FILE)))
    except PipelineError:
        return []


def lines_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The lines.

    Args:
        rows: Lines of metrics.jsonl, in order.
    """
    step, seconds, tokens = 0, 0.0, 0.0
    losses, evaluations, plan = _Best(), _Best(), ""
    for row in rows:
        if row.get("event") == PLAN:
            plan = str(row["message"]).removeprefix("plan: ")
        if "train/loss" in row:
            before, step = step, int(row["step"])
            seconds += (step - before) * row.get("perf/step_time_seconds", 0.0)
            tokens = row.get("train/tokens_seen", 0.0)
            losses.add(step, row["train/loss"])
        if "eval/loss" in row:
            evaluations.add(int(row["step"]), row["eval/loss"])
    if step:
        seen = f", {count(tokens)} tokens" if tokens else ""
        yield f"steps       {step:,} in {duration(seconds)}{seen}"
    for name, best in (("loss", losses), ("eval loss", evaluations)):
        if best.has_any:
            yield f"{name:<10}  {best}"
    if plan:
        yield f"plan        {plan}"


class _Best:
    """The last of some losses, and the lowest."""

    def __init__(self) -> None:
        self.has_any = False
        self._last, self._lowest = (0, math.nan), (0, math.inf)

    def add(self, step: int, loss: float) -> None:
        self.has_any = True
        self._last = step, loss
        if loss < self._lowest[1]:
            self._lowest = step, loss

    def __str__(self) -> str:
        last = f"{decimals(self._last[1])} at step {self._last[0]}"
        if math.isinf(self._lowest[1]):
            return last
        if self._lowest[0] == self._last[0]:
            return f"{last}, the lowest"
        return f"{last}; lowest {decimals(self._lowest[1])} at step {self._lowest[0]}"
