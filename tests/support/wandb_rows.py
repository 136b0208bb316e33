"""Reads a run's losses from metrics.jsonl and from the rows that W&B received, in the same form."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.monitoring.events import ROLLBACK
from pipeline.monitoring.trackers.jsonl import iterate_record


def iterate_with_rolled_back(run: Path) -> Iterator[dict]:
    """Yield the lines of metrics.jsonl, and before each rollback the rows that it moved to another file."""
    for line in iterate_record(run / "metrics.jsonl"):
        if line.get("event") == ROLLBACK:
            yield from iterate_record(run / f"metrics-until-step-{line['from_step']:.0f}.jsonl")
        yield line


def read_recorded_losses(run: Path) -> list[tuple]:
    """Return (global step, rewinds so far, training loss, held-out loss) of each row.

    Rows that a rollback discarded are included.
    """
    rewinds = 0
    rows: dict[tuple, dict] = {}
    for line in iterate_with_rolled_back(run):
        rewinds += line.get("event") == ROLLBACK
        if "event" not in line:
            rows.setdefault((line["step"], rewinds), {}).update(line)
    return [(*key, row.get("train/loss"), row.get("eval/loss")) for key, row in rows.items()]


def extract_server_losses(rows: list[dict]) -> list[tuple]:
    """Return the same of the rows at W&B, whose `_step` must ascend."""
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    columns = ("train/loss", "eval/loss")
    return [(row["global_step"], row.get("rewinds", 0), *(row.get(key) for key in columns)) for row in rows]
