"""The record knows how many rollbacks there were and what they gave up, also where a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.monitoring.events import ROLLBACK, Event
from pipeline.monitoring.trackers.jsonl import METRICS_FILE, JsonlTracker, replay


def write(folder: Path, start_step: int, *words: tuple) -> None:
    """Rows `(first, last)`, rollbacks `(to, from, "back")`."""
    tracker = JsonlTracker(folder / METRICS_FILE, start_step=start_step)
    for first, last, *back in words:
        if back:
            tracker.tell(first, Event(ROLLBACK, "back", fields={"from_step": last}))
        else:
            for step in range(first, last + 1):
                tracker.write(step, {"train/loss": 1.0})
    tracker.close(0)


def told(folder: Path, start_step: int) -> list[int | tuple]:
    """Steps of rows, and (rollbacks, steps given up) of rollbacks."""
    return [
        (line["rewinds"], line["steps_given_up"]) if "event" in line else line["step"]
        for line in replay(folder / METRICS_FILE, start_step)
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([(1, 3)], [1, 2, 3]),
        ([(1, 6), (4, 6, "back"), (5, 6), (2, 6, "back"), (3, 8)], [1, 2, (2, 6), *range(3, 9)]),
        ([(1, 6), (4, 6, "back"), (5, 7), (4, 7, "back"), (5, 8)], [1, 2, 3, 4, (1, 2), (2, 5), 5, 6, 7, 8]),
    ],
    ids=["none", "one inside of what another gave up", "two to one step"],
)
def test_rollbacks_are_counted_with_what_they_gave_up(tmp_path, words, expected):
    write(tmp_path, 0, *words)
    assert told(tmp_path, 8) == expected
    write(tmp_path, 8, (9, 12), (8, 12, "back"))
    rollbacks = [each for each in expected if isinstance(each, tuple)] or [(0, 0)]
    assert told(tmp_path, 99)[-1] == (rollbacks[-1][0] + 1, rollbacks[-1][1] + 4)


@pytest.mark.parametrize("killed", [1, 2])
def test_a_rollback_that_a_kill_had_come_about_again_counts_once(tmp_path, killed):
    write(tmp_path, 0, (1, 6), (4, 6, "back"), (5, 5))
    for _ in range(killed):
        JsonlTracker(tmp_path / METRICS_FILE, start_step=4).close(0)
        assert told(tmp_path, 4) == [1, 2, 3, 4], "it is still to come"
        write(tmp_path, 4, (5, 6), (4, 6, "back"), (5, 8))
    assert set(told(tmp_path, 8)) == {*range(1, 9), (1, 2)}
