"""W&B after a rollback, the real client: what was given up stays, marked, every row once and in order."""

import json
from pathlib import Path

import pytest
from monitoring.trackers.wandb_program import run
from support.wandb_server import KEY, WandbServer, make_environment, read_run_id

pytestmark = pytest.mark.slow


def told(rows: list[dict]) -> list[tuple]:
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    for row in rows:
        is_evaluated = row["global_step"] % 5 == 0
        assert ("eval/loss" in row) == is_evaluated
    return [
        (row["global_step"], row.get("rewinds", 0), round(row["train/loss"] - row["global_step"] / 7, 6))
        for row in rows
    ]


def stretch(first: int, last: int, rewinds: int, value: float) -> list[tuple]:
    return [(step, rewinds, value) for step in range(first, last + 1)]


# Back from 12 to 8, on, and from 15 to 6: a rollback whose rows hold another one.
WORDS = [["rows", 1, 12, 0], ["back", 8, 12], ["rows", 9, 15, 1], ["back", 6, 15], ["rows", 7, 16, 2]]
EXPECTED = stretch(1, 12, 0, 0) + stretch(9, 15, 1, 1) + stretch(7, 16, 2, 2)


def test_what_a_rollback_gave_up_stays_and_is_marked(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    run(folder, env, 0, *WORDS)
    assert told(server.rows(read_run_id(folder))) == EXPECTED
    run(folder, env, 16, ["rows", 17, 20, 2])
    assert told(server.rows(read_run_id(folder))) == EXPECTED + stretch(17, 20, 2, 2)
    kept = server.runs()[read_run_id(folder)]
    defined = json.loads(kept["config"])["_wandb"]["value"]["m"]
    names = {each.get("1", each.get("2")): each for each in defined}
    assert defined[names["*"]["5"] - 1]["1"] == "global_step", "what curves are drawn over"
    summary = json.loads(kept["summary"])
    assert summary["train/loss"] == pytest.approx({"min": 1 / 7, "last": 2 + 20 / 7})
    assert summary["eval/loss"] == pytest.approx({"min": 5 / 9, "last": 2 + 20 / 9})
    assert summary["train/accuracy"] == pytest.approx({"max": 20 / 99, "last": 20 / 99})


@pytest.mark.nightly
def test_killed_before_the_next_checkpoint_goes_back_again(tmp_path: Path, server: WandbServer):
    """The checkpoint does not know of the rollback: what came after it comes again and counts once."""
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    again = [["rows", 9, 12, 0], ["back", 8, 12]]
    run(folder, env, 0, ["rows", 1, 8, 0])
    kept = server.folder / f"history-{read_run_id(folder)}.jsonl"
    run(folder, env, 8, *again, ["rows", 9, 11, 1], ["wait", 14], ["kill"], kept=kept)
    run(folder, env, 8, *again, ["rows", 9, 14, 1], ["wait", 17], ["kill"], kept=kept)
    run(folder, env, 12, ["rows", 13, 16, 1])
    assert told(server.rows(read_run_id(folder))) == stretch(1, 12, 0, 0) + stretch(9, 16, 1, 1)
