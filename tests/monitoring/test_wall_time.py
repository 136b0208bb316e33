"""Shares of a run's wall time: by a clock of our own, and in real runs with something slow in them."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from support.fake_clock import FakeClock
from support.metrics_rows import read_rows, read_time_events
from support.tiny import MaskedTokens, recipe, resolve, token_bundle

from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.phases import PHASES, PHASES_OUTSIDE_STEPS, Phases
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.monitoring.metrics import PriorUsage, WallTime
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
NAMES = [phase for phase in PHASES if phase != "communication"]
SLOW = 0.05  # seconds at least; a busy machine may add to any phase
BATCHES = 3  # of an evaluation
SAMPLES = 8  # of a step
BATCH = {"micro_batch_size": SAMPLES, "global_batch_size": SAMPLES}


def walls(clock, **how):
    return WallTime(Phases(clock, torch.device("cpu")), clock, **how)


def spend(wall, clock, **seconds):
    for phase, each in seconds.items():
        with wall.phases.measure(phase):
            clock.now += each


def test_start_and_phases_are_the_process():
    clock = FakeClock()
    clock.now = 100.0
    wall = walls(clock)
    wall.start_time = 93.0
    wall.begin()
    spend(wall, clock, evaluation=2.0, data=1.0, forward=4.0, backward=8.0, optimizer=1.0)
    clock.now += 0.5
    wall.end_first_step()
    spend(wall, clock, forward=4.0, checkpoint=3.0, generation=0.5, aside=1.0)
    wall.end_first_step()
    event = wall.build_time_event()
    told = event.fields
    assert (event.name, event.level) == ("time", "info")
    assert (told["startup_seconds"], told["first_step_seconds"]) == (7.0, 23.5)
    assert told["other_seconds"] == 1.5
    assert told["forward_seconds"] == 8.0
    whole = told["startup_seconds"] + sum(told[f"{phase}_seconds"] for phase in NAMES)
    assert whole == told["elapsed_seconds"] == 32.0
    assert told["goodput"] == pytest.approx((1 + 8 + 8 + 1 + 0.5) / 32)
    assert event.message.startswith("Wall time 32s: forward 25%, backward 25%, startup 22%, checkpoint 9%, ")
    assert event.message.endswith(". Goodput 57.8% of the run's 32s")


def test_a_row_says_what_the_run_has_taken_so_far_and_cost():
    clock = FakeClock()
    wall = walls(clock, price=7.2, devices=4)
    spend(wall, clock, forward=75.0, evaluation=25.0)
    assert wall.elapsed_columns() == {"perf/elapsed_seconds": 100.0, "perf/goodput": 0.75, "perf/cost": 0.8}
    assert "perf/cost" not in walls(clock).elapsed_columns()
    assert wall.build_time_event().message.endswith(", cost 0.80")


def test_a_process_goes_on_where_its_run_was_and_what_was_lost_counts_as_lost():
    clock = FakeClock()
    # The checkpoint has 60 of the 100 seconds that the dead process is known to have run.
    wall = walls(clock, earlier=PriorUsage(100.0, 60.0, cost=1.0), price=36.0)
    spend(wall, clock, forward=40.0)
    assert wall.elapsed_columns() == {
        "perf/elapsed_seconds": 140.0,
        "perf/goodput": pytest.approx(100 / 140),
        "perf/cost": pytest.approx(1.4),
    }
    assert wall.state_dict() == {"elapsed_seconds": 140.0, "training_seconds": 100.0}


def test_what_was_before_is_read_from_the_record_as_it_was_left(tmp_path):
    record = tmp_path / "metrics.jsonl"
    state = {"elapsed_seconds": 50.0, "training_seconds": 30.0}
    assert PriorUsage.read(record, {}) == PriorUsage()
    assert PriorUsage.read(record, state) == PriorUsage(50.0, 30.0)
    row = {"step": 7, "perf/elapsed_seconds": 80.0, "perf/cost": 3.0}
    record.write_text(json.dumps(row) + '\n{"step": 7, "eval/loss": 1.0}\n{"step": 8, "perf/elap')
    assert PriorUsage.read(record, state) == PriorUsage(80.0, 30.0, 3.0)
    end = {"step": 7, "event": "time", "elapsed_seconds": 90.0, "cost": 4.0}
    record.write_text("".join(json.dumps(each) + "\n" for each in (row, end)))
    assert PriorUsage.read(record, state) == PriorUsage(90.0, 30.0, 4.0)


def trained(folder, data=None, changed=lambda parts: None, **changes):
    """Step -> row of training, of a run."""
    config, resolved = resolve(recipe(batch=BATCH, **changes), None, 1)
    parts = assemble(config, resolved, ALONE, data or token_bundle(), folder)
    changed(parts)
    try:
        with parts.trackers, TrainLoop(parts) as loop:
            loop.train()
    finally:
        parts.loader.close()
    return rows_by_step(folder)


def rows_by_step(folder):
    return {row["step"]: row for row in read_rows(folder) if "train/loss" in row}


def column(rows, phase):
    return [row[f"time/{phase}_seconds"] for row in rows.values()]


@pytest.mark.slow
def test_rows_and_the_last_line_have_all_of_the_time(tmp_path):
    changes = {"eval": {"every": 4}, "checkpoint": {"every": 4}, "log": {"every": 2}, "max_steps": 12}
    rows = trained(tmp_path, **changes)
    assert list(rows) == [1, 2, 4, 6, 8, 10, 12]
    columns = [{key for key in row if key.startswith("time/")} for row in rows.values()]
    assert columns == [{f"time/{phase}_seconds" for phase in NAMES}] * len(rows)
    counted = sum(sum(column(rows, phase)) for phase in NAMES)
    (end,) = read_time_events(tmp_path)
    assert end["step"] == 12
    elapsed = rows[12]["perf/elapsed_seconds"] - end["startup_seconds"]
    assert counted == pytest.approx(elapsed, rel=0.25)  # which is read a moment later
    whole = end["startup_seconds"] + sum(end[f"{phase}_seconds"] for phase in NAMES)
    assert whole == pytest.approx(end["elapsed_seconds"], rel=0.1)
    assert end["evaluation_seconds"] > sum(column(rows, "evaluation"))
    assert end["checkpoint_seconds"] > sum(column(rows, "checkpoint"))
    assert [step for step, row in rows.items() if "perf/first_step_seconds" in row] == [1]
    assert rows[1]["perf/first_step_seconds"] == end["first_step_seconds"]
    assert 0 < end["startup_seconds"] < end["first_step_seconds"] < end["elapsed_seconds"]
    assert end["other_seconds"] < 0.5 * end["elapsed_seconds"]  # with a model that is next to nothing
    for row in rows.values():
        steps = sum(row[f"time/{phase}_seconds"] for phase in NAMES if phase not in PHASES_OUTSIDE_STEPS)
        number = 1 if row["step"] < 3 else 2
        assert row["perf/step_time_seconds"] == pytest.approx(steps / number)
    for phase in ("data", "forward", "backward", "optimizer"):
        assert end[f"{phase}_seconds"] > 0


def sleep_in_evaluation(parts):
    """Have a model sleep in each forward of an evaluation."""
    module = parts.engine.module
    module.register_forward_pre_hook(lambda m, _: time.sleep(0 if m.training else SLOW))


@pytest.mark.slow
def test_a_slow_evaluation_stands_in_the_next_row_and_is_no_part_of_a_step(tmp_path):
    rows = trained(tmp_path, None, sleep_in_evaluation, max_steps=6, eval={"every": 3})
    seconds = column(rows, "evaluation")
    assert [each >= BATCHES * SLOW for each in seconds] == [True, False, False] * 2
    assert [each == 0 for each in seconds] == [False, True, True] * 2
    lost = (1 - rows[6]["perf/goodput"]) * rows[6]["perf/elapsed_seconds"]
    assert lost >= 2 * BATCHES * SLOW


class SlowTokens(MaskedTokens):
    def __getitem__(self, index):
        time.sleep(SLOW)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_slow_data_set_is_data(tmp_path):
    data = replace(token_bundle(), train=SlowTokens(), eval={})
    rows = trained(tmp_path, data, max_steps=3)
    assert min(column(rows, "data")) >= SAMPLES * SLOW
    assert all(row["perf/data_time_seconds"] >= SAMPLES * SLOW for row in rows.values())


@pytest.mark.slow
def test_a_slow_save_is_checkpoint(tmp_path, monkeypatch):
    save = CheckpointStore.save

    def slow(*arguments, **named):
        time.sleep(SLOW)
        return save(*arguments, **named)

    monkeypatch.setattr(CheckpointStore, "save", slow)
    data = replace(token_bundle(), eval={})
    rows = trained(tmp_path, data, max_steps=5, checkpoint={"every": 3})
    seconds = column(rows, "checkpoint")
    assert seconds[3] >= SLOW
    assert [seconds[number] for number in (1, 2, 4)] == [0, 0, 0]  # the first has what saves are prepared by
    (end,) = read_time_events(tmp_path)
    assert end["checkpoint_seconds"] >= 2 * SLOW  # the last one too
    lost = (1 - rows[5]["perf/goodput"]) * rows[5]["perf/elapsed_seconds"]
    assert lost >= SLOW


class Killed(BaseException):
    """Copy what SIGKILL leaves on the disk, and no more."""


class Mortal:
    """An engine whose steps from one on are slow, and that dies in another."""

    def __init__(self, engine, slow, dies):
        self._engine = engine
        self._slow = slow
        self._dies = dies
        self._steps = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train_step(self, *arguments):
        self._steps += 1
        if self._steps == self._dies:
            raise Killed
        time.sleep(10 * SLOW if self._steps >= self._slow else 0)
        return self._engine.train_step(*arguments)


@pytest.mark.slow
def test_steps_that_are_made_again_are_lost_and_all_else_goes_on(tmp_path):
    changes = {"max_steps": 8, "checkpoint": {"every": 4}, "log": {"price_per_device_hour": 36.0}}
    config, resolved = resolve(recipe(batch=BATCH, **changes), None, 1)
    parts = assemble(config, resolved, ALONE, token_bundle(), tmp_path)
    parts = replace(parts, engine=Mortal(parts.engine, slow=5, dies=8))
    with pytest.raises(Killed), parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    dead = rows_by_step(tmp_path)
    assert not read_time_events(tmp_path)
    lost = dead[7]["perf/elapsed_seconds"] - dead[4]["perf/elapsed_seconds"]
    assert lost > 30 * SLOW
    rows = trained(tmp_path, **changes)
    assert list(rows) == list(range(1, 9))
    elapsed = [row["perf/elapsed_seconds"] for row in rows.values()]
    assert elapsed == sorted(elapsed)
    assert elapsed[4] > dead[7]["perf/elapsed_seconds"]
    (end,) = read_time_events(tmp_path)
    # What counts is in the rows that have stayed.
    steps = [phase for phase in NAMES if phase not in PHASES_OUTSIDE_STEPS]
    counted = sum(sum(column(rows, phase)) for phase in steps)
    assert end["goodput"] * end["elapsed_seconds"] == pytest.approx(counted, rel=0.2)
    assert end["elapsed_seconds"] - counted > lost
    assert end["cost"] == pytest.approx(end["elapsed_seconds"] / 100, rel=0.2)
    costs = [row["perf/cost"] for row in rows.values()]
    assert costs == sorted(costs)


@pytest.mark.slow
def test_a_stop_and_a_further_start_lose_nothing_but_the_start(tmp_path):
    for last in (3, 6):
        trained(tmp_path, max_steps=last)
    first, second = read_time_events(tmp_path)
    assert (first["step"], second["step"]) == (3, 6)
    own = second["startup_seconds"] + sum(second[f"{phase}_seconds"] for phase in NAMES)
    assert second["elapsed_seconds"] == pytest.approx(first["elapsed_seconds"] + own, rel=0.02)
