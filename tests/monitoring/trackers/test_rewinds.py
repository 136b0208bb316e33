"""The record with what rollbacks moved out of it, in the order in which it came about."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.monitoring.events import ROLLBACK, Event
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, JsonlTracker, replay


def write(folder: Path, start_step: int, *words: tuple) -> None:
    """Rows `(first, last)` with a value of their own each, rollbacks `(to, from, "back")`."""
    tracker = JsonlTracker(folder / METRICS_FILE, start_step=start_step)
    for first, last, *rest in words:
        if rest == ["back"]:
            fields = {"from_step": last, "first_sample": 0, "last_sample": last}
            tracker.tell(first, Event(ROLLBACK, "back", fields=fields))
        else:
            for step in range(first, last + 1):
                tracker.write(step, {"train/loss": float(*rest)})
    tracker.close(0)


def told(folder: Path, start_step: int) -> list[tuple]:
    return [
        (record["step"], record.get("train/loss", "back"))
        for record in replay(folder / METRICS_FILE, start_step)
    ]


def rows(first: int, last: int, value: float) -> list[tuple]:
    return [(step, value) for step in range(first, last + 1)]


def test_without_a_rollback_it_is_the_record(tmp_path):
    write(tmp_path, 0, (1, 3, 0))
    assert told(tmp_path, 3) == rows(1, 3, 0)


def test_a_rollback_inside_of_what_another_gave_up(tmp_path):
    write(tmp_path, 0, (1, 6, 0), (4, 6, "back"), (5, 6, 1), (2, 6, "back"), (3, 8, 2))
    expected = [*rows(1, 6, 0), (4, "back"), *rows(5, 6, 1), (2, "back"), *rows(3, 8, 2)]
    assert told(tmp_path, 8) == expected


def test_two_rollbacks_from_one_step_to_one_step(tmp_path):
    write(tmp_path, 0, (1, 6, 0), (4, 6, "back"), (5, 7, 1), (4, 7, "back"), (5, 8, 2))
    assert told(tmp_path, 8) == [*rows(1, 6, 0), (4, "back"), *rows(5, 7, 1), (4, "back"), *rows(5, 8, 2)]


@pytest.mark.parametrize("killed", [1, 2])
def test_a_rollback_that_a_kill_had_come_about_again_counts_once(tmp_path, killed):
    write(tmp_path, 0, (1, 6, 0), (4, 6, "back"), (5, 5, 1))
    for _ in range(killed):
        JsonlTracker(tmp_path / METRICS_FILE, start_step=4).close(0)
        assert told(tmp_path, 4) == rows(1, 4, 0), "it is still to come"
        write(tmp_path, 4, (5, 6, 0), (4, 6, "back"), (5, 8, 1))
    assert told(tmp_path, 8) == [*rows(1, 6, 0), (4, "back"), *rows(5, 8, 1)]
