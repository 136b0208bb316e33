"""Every engine says where its steps go: all columns in every row, and who waits for whom is communication."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.metrics_rows import read_rows, read_time_events
from support.tiny import deepspeed_json, recipe, resolve, token_bundle

from pipeline.distributed.phases import PHASES
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

pytestmark = pytest.mark.slow

DDP = {"torch": {"parallel": "ddp"}}
SPLITS = {
    "ddp": DDP,
    **{f"ZeRO {stage}": deepspeed_json(stage) for stage in (0, 2, 3)},
    "stages": deepspeed_json(0) | {"pipeline": {"stages": 2}},
}
BATCH = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}


class Late:
    """A loader whose batches come late."""

    def __init__(self, loader, seconds):
        self._loader = loader
        self._seconds = seconds

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def next_group(self):
        time.sleep(self._seconds)
        return self._loader.next_group()


def run(job, split, folder, late_rank=None, slow_evaluation=False):
    tree = recipe(max_steps=6, batch=BATCH, eval={"every": 3}, checkpoint={"every": 4})
    config, resolved = resolve(tree, dict(split), job.ranks.world_size)
    parts = assemble(config, resolved, job, token_bundle(), folder)
    if slow_evaluation:
        evaluates = parts.engine.eval_step
        parts.engine.eval_step = lambda *given: time.sleep(0.05) or evaluates(*given)
    if job.ranks.rank == late_rank:
        parts = replace(parts, loader=Late(parts.loader, 1.0))
    with parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    parts.loader.close()
    parts.engine.close()


@pytest.mark.daily("ZeRO 3")
@pytest.mark.parametrize("name", SPLITS)
def test_the_columns_are_all_there_and_hold_the_step(ranks, tmp_path, name):
    ranks(2).run(run, SPLITS[name], tmp_path, None, True)
    rows = [row for row in read_rows(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        seconds = {key: value for key, value in row.items() if key.startswith("time/")}
        assert set(seconds) == {f"time/{phase}_seconds" for phase in PHASES}
        assert min(seconds[f"time/{phase}_seconds"] for phase in ("forward", "backward", "optimizer")) > 0
    (end,) = read_time_events(tmp_path)
    assert end["other_seconds"] < 0.6 * sum(end[f"{phase}_seconds"] for phase in PHASES)
    evaluated = [row["time/evaluation_seconds"] > 0 for row in rows]
    assert evaluated == [True, False, False, True, False, False]  # the last one is in the last line
    assert end["evaluation_seconds"] > 1.2 * sum(row["time/evaluation_seconds"] for row in rows)


@pytest.mark.daily("ddp")
@pytest.mark.parametrize("name", ["ddp", "ZeRO 2", "stages"])
def test_a_rank_that_comes_late_is_communication_for_the_other(ranks, tmp_path, name):
    ranks(2).run(run, SPLITS[name], tmp_path, 1)
    rows = [row for row in read_rows(tmp_path) if "train/loss" in row]
    steps = ("data", "forward", "backward", "optimizer", "communication", "other")
    seconds = {phase: sum(row[f"time/{phase}_seconds"] for row in rows[1:]) for phase in steps}
    assert max(seconds, key=lambda phase: seconds[phase]) == "communication"
