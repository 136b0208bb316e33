"""What a run did by its own record, and by what arrived at W&B: alike, row by row."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.monitoring.events import ROLLBACK
from pipeline.monitoring.trackers.jsonl import iterate_record


def iterate_with_rolled_back(run: Path) -> Iterator[dict]:
    """The record, with what a rollback moved out of it before that rollback."""
    for record in iterate_record(run / "metrics.jsonl"):
        if record.get("event") == ROLLBACK:
            yield from iterate_record(run / f"metrics-until-step-{record['from_step']:.0f}.jsonl")
        yield record


def read_recorded_losses(run: Path) -> list[tuple]:
    """Global step, rewinds, losses of all that the run did."""
    rewinds, rows = 0, dict[tuple, dict]()
    for record in iterate_with_rolled_back(run):
        rewinds += record.get("event") == ROLLBACK
        if "event" not in record:
            rows.setdefault((record["step"], rewinds), {}).update(record)
    return [(*key, row.get("train/loss"), row.get("eval/loss")) for key, row in rows.items()]


def extract_server_losses(rows: list[dict]) -> list[tuple]:
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    columns = ("train/loss", "eval/loss")
    return [(row["global_step"], row.get("rewinds", 0), *(row.get(key) for key in columns)) for row in rows]
