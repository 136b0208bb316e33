"""What a run did by its own record, and by what arrived at W&B: alike, row by row."""

from pathlib import Path

from pipeline.monitoring.events import ROLLBACK
from pipeline.monitoring.trackers.jsonl import replay


def of_record(run: Path) -> list[tuple]:
    """Global step, rewinds, losses of all that the run did."""
    rewinds, rows = 0, dict[tuple, dict]()
    for record in replay(run / "metrics.jsonl", 10**9):
        rewinds += record.get("event") == ROLLBACK
        if "event" not in record:
            rows.setdefault((record["step"], rewinds), {}).update(record)
    return [(*key, row.get("train/loss"), row.get("eval/loss")) for key, row in rows.items()]


def of_server(rows: list[dict]) -> list[tuple]:
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    columns = ("train/loss", "eval/loss")
    return [(row["global_step"], row.get("rewinds", 0), *(row.get(key) for key in columns)) for row in rows]
