"""Rows that are read a step late, as on a GPU: the record and what it decides are as if they were not."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.metrics_rows import read_reproducible_rows
from support.tiny import recipe, resolve, token_bundle

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import NonFiniteLossError
from pipeline.monitoring.alerts import RowDetails
from pipeline.monitoring.report.runs import summary_lines
from pipeline.monitoring.row_queue import DeferredRow, RowQueue
from pipeline.monitoring.trackers.interface import Trackers
from pipeline.monitoring.trackers.jsonl import iterate_record
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
CHANGES = {
    "batch": {"micro_batch_size": 8, "global_batch_size": 8},
    "eval": {"every": 3},
    "checkpoint": {"every": 2, "keep_last": 20},
}
STEPS = 8


class Broken(Exception):
    """An error that ends a run."""


class Engine:
    """An engine that in one step is sent a signal or fails, or whose gradients are infinite."""

    def __init__(self, engine, event=None, at=0, skips=False):
        self._engine = engine
        self._event = event
        self._at = at
        self._skips = skips
        self.steps = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train_step(self, *arguments, **named):
        self.steps += 1
        if self.steps == self._at and isinstance(self._event, BaseException):
            raise self._event
        if self.steps == self._at and self._event is not None:
            signal.raise_signal(self._event)
        result = self._engine.train_step(*arguments, **named)
        return replace(result, skipped=torch.ones(())) if self._skips else result


class Watched:
    """A tracker that notes how many steps were launched when a row came."""

    def __init__(self, engine):
        self._engine = engine
        self.lag = []

    def write(self, step, row):
        if "train/loss" in row:
            self.lag.append(self._engine.steps - step)

    def tell(self, step, event):
        pass

    def close(self, exit_code):
        pass


def run(folder: Path, behind: int = 1, tracker=None, changes=None, **engine):
    config, resolved = resolve(recipe(**(CHANGES | (changes or {}))), None, 1)
    parts = assemble(config, resolved, ALONE, token_bundle(), folder)
    schedule = replace(parts.schedule, rows_behind=behind)
    parts = replace(parts, schedule=schedule, engine=Engine(parts.engine, **engine))
    if tracker is not None:
        parts = replace(parts, trackers=Trackers([*parts.trackers._trackers, tracker(parts.engine)]))
    try:
        with parts.trackers, TrainLoop(parts) as loop:
            while loop.step() is not None:
                pass
    finally:
        parts.loader.close()
    return read_reproducible_rows(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unbroken"), behind=0)


@pytest.mark.slow
def test_no_step_reads_its_own_row(tmp_path, unbroken):
    """But where its weights are evaluated or saved, which waits for them anyway."""
    watched = []
    run(tmp_path, tracker=lambda engine: watched.append(Watched(engine)) or watched[0])
    assert read_reproducible_rows(tmp_path) == unbroken
    waited = {3, 6, STEPS} | {2, 4, 6, 8}
    assert watched[0].lag == [0 if step in waited else 1 for step in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.daily("stops1")
@pytest.mark.parametrize("stops", [[5], [3, 2]])
def test_a_signal_loses_no_row(tmp_path, unbroken, stops):
    for step in stops:
        run(tmp_path, event=signal.SIGTERM, at=step)
    assert run(tmp_path) == unbroken


@pytest.mark.slow
@pytest.mark.daily("6")
@pytest.mark.parametrize("at", [2, 6])
def test_an_error_loses_no_row(tmp_path, unbroken, at):
    with pytest.raises(Broken):
        run(tmp_path, event=Broken(), at=at)
    assert [row["step"] for row in read_reproducible_rows(tmp_path) if "train/loss" in row] == list(
        range(1, at)
    )
    assert run(tmp_path) == unbroken


@pytest.mark.slow
@pytest.mark.daily("5")
@pytest.mark.parametrize("at", [5, 6])
def test_a_kill_loses_one_row_at_the_most_and_it_comes_again(tmp_path, unbroken, monkeypatch, at):
    with monkeypatch.context() as patch:
        patch.setattr(RowQueue, "write_what_arrives", lambda rows: None)
        with pytest.raises(Broken):
            run(tmp_path, event=Broken(), at=at)
    written = [row["step"] for row in read_reproducible_rows(tmp_path) if "train/loss" in row]
    assert written in (list(range(1, at)), list(range(1, at - 1)))
    assert run(tmp_path) == unbroken


@pytest.mark.slow
@pytest.mark.daily("changes0")
@pytest.mark.parametrize("changes", [{}, {"eval": {"every": 0}, "checkpoint": {"every": 0}, "max_steps": 20}])
def test_steps_without_a_gradient_end_the_run_at_the_same_row(tmp_path, changes):
    told = []
    for behind in (0, 1):
        folder = tmp_path / str(behind)
        folder.mkdir()
        with pytest.raises(NonFiniteLossError) as ended:
            run(folder, behind, changes=changes, skips=True)
        told.append((str(ended.value), read_reproducible_rows(folder)))
    assert told[0] == told[1]
    assert len([row for row in told[0][1] if "train/loss" in row]) == min(9, STEPS - 1 if not changes else 9)


class Slow(DeferredRow):
    """Numbers that the device never comes to."""

    def has_arrived(self):
        return False


def test_after_a_failure_a_row_is_waited_for_no_longer_than_a_moment(monkeypatch):
    monkeypatch.setattr("pipeline.monitoring.row_queue.FAILURE_WAIT_SECONDS", 0.02)
    written = []

    class Kept:
        def write(self, step, row):
            written.append(step)

        def close(self, exit_code):
            pass

    rows = RowQueue((), Trackers([Kept()]), lambda step, event: None)
    for step, kind in enumerate((DeferredRow, Slow, DeferredRow), 1):
        rows.add(
            step, kind({"loss": torch.ones(())}, lambda host: RowDetails({"train/loss": float(host["loss"])}))
        )
    rows.write_what_arrives()
    assert written == [1]


def test_numbers_of_any_shape_come_over_in_one_piece():
    numbers = {"a": torch.tensor(3), "b": torch.arange(2.0), "c": torch.tensor(True)}
    late = DeferredRow(numbers, lambda host: RowDetails({n: float(each.sum()) for n, each in host.items()}))
    numbers["b"].zero_()  # the next step has begun
    assert late.read().row == {"a": 3.0, "b": 1.0, "c": 1.0}


@pytest.mark.slow
def test_the_closing_lines_have_the_steps_behind_the_last_row(tmp_path):
    """It was stopped at step 6, has a row of step 4, and its stop is agreed a step later."""
    run(tmp_path, event=signal.SIGTERM, at=6, changes={"log": {"every": 4}, "max_steps": 20})
    (saved,) = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1:]
    stopped_at = int(saved.removeprefix("step-"))
    assert stopped_at >= 6
    rows = [row for row in iterate_record(tmp_path / "metrics.jsonl") if "train/tokens_seen" in row]
    assert rows[-1]["step"] == 4
    found = re.fullmatch(rf"steps          {stopped_at} in \S+, (\d+) tokens", summary_lines(tmp_path)[0])
    assert int(found[1]) > rows[-1]["train/tokens_seen"]
