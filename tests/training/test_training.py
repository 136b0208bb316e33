"""Saves and stops of the loop: by the clock, on a signal, within the grace before a kill."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.metrics_rows import read_reproducible_rows, read_rows
from support.tiny import recipe, resolve, token_bundle

from pipeline.checkpoint.catalog import list_published_folders
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.signals import ignore_stop_signals
from pipeline.distributed.stopping import (
    END_FLAG,
    EVALUATE_FLAG,
    SAVE_FLAG,
    STOP_FLAG,
    FlagReader,
    Flags,
    StopOnSignal,
)
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


class Disturbed:
    """An engine in the given step of which, or the given micro-batch of an evaluation, a signal arrives."""

    def __init__(self, engine, number, step, evaluation):
        self._engine = engine
        self._number = number
        self._left = {"train_step": step, "eval_step": evaluation}

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train_step(self, *arguments):
        return self._take("train_step", arguments)

    def eval_step(self, *arguments):
        return self._take("eval_step", arguments)

    def _take(self, method, arguments):
        if self._left[method] is not None:
            self._left[method] -= 1
            if self._left[method] == 0:
                os.kill(os.getpid(), self._number)
        return getattr(self._engine, method)(*arguments)


def ended(
    job: Job,
    folder: Path,
    changes=None,
    on_rank=0,
    number=signal.SIGUSR1,
    step=None,
    evaluation=None,
    deepspeed=None,
    data=None,
):
    """(last step, signal) of a run in which a signal arrives on one rank."""
    config, resolved = resolve(recipe(**(changes or {})), deepspeed, job.ranks.world_size)
    run = assemble(config, resolved, job, data or token_bundle(), folder)
    if job.ranks.rank == on_rank:
        run = replace(run, engine=Disturbed(run.engine, number, step, evaluation))
    with run.trackers, TrainLoop(run) as loop:
        while loop.step() is not None:
            pass
    run.loader.close()
    return loop.state.global_step, loop.stopped_by


def saved(folder: Path) -> list[int]:
    return sorted(list_published_folders(folder / "checkpoints"))


def test_saved_by_the_clock_besides_the_steps(tmp_path):
    each = {"checkpoint": {"every": 5, "every_minutes": 1e-6, "keep_last": 20}}
    assert ended(ALONE, tmp_path, each) == (8, None)
    assert saved(tmp_path) == list(range(1, 9))


@pytest.mark.slow
def test_a_signal_saves_this_step_and_names_itself(tmp_path):
    # It comes in the third step and is agreed in the evaluation behind it, which takes no further time.
    number = signal.SIGTERM
    assert ended(ALONE, tmp_path, changes={"eval": {"every": 1}}, number=number, step=3) == (3, number)
    assert saved(tmp_path) == [3]
    assert [row["step"] for row in read_rows(tmp_path) if "eval/loss" in row] == [0, 1, 2]
    assert ended(ALONE, tmp_path) == (8, None)


SMALL = {"eval": {"every": 2}, "batch": {"micro_batch_size": 2, "global_batch_size": 8}}
SMALL |= {"checkpoint": {"every": 4, "keep_last": 20, "keep_best": True}}
BATCHES = 10  # of an evaluation: 19 samples


@pytest.mark.slow
def test_a_signal_ends_an_evaluation(tmp_path):
    assert ended(ALONE, tmp_path, changes=SMALL, evaluation=BATCHES + 3) == (2, signal.SIGUSR1)
    assert [row["step"] for row in read_rows(tmp_path) if "eval/loss" in row] == [0]


def record(folder: Path):
    """Results of a run: its rows without times, and the loss that each checkpoint is judged by."""
    losses = {}
    for step, path in list_published_folders(folder / "checkpoints").items():
        losses[step] = json.loads((path / "manifest.json").read_text())["manifest"]["state"]["eval_loss"]
    return read_reproducible_rows(folder), losses


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert ended(ALONE, folder, SMALL) == (8, None)
    return record(folder)


@pytest.mark.daily("last step, then its evaluation", "many")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "steps"),
    [
        pytest.param([{"evaluation": 3}], [0], id="before the first step"),
        pytest.param([{"evaluation": 2 * BATCHES + 5}], [4], id="where a checkpoint is due too"),
        pytest.param([{"evaluation": 4 * BATCHES + 9}], [8], id="last batch of the last evaluation"),
        pytest.param([{"step": 8}], [8], id="last step"),
        pytest.param(
            [{"step": 6}, {"evaluation": 1}, {"evaluation": 7}], [6, 6, 6], id="one evaluation, thrice"
        ),
        pytest.param([{"step": 8}, {"evaluation": 2}], [8, 8], id="last step, then its evaluation"),
        pytest.param([{"evaluation": 2}, {"evaluation": BATCHES + 2}, {"step": 1}], [0, 2, 4], id="many"),
    ],
)
def test_stopped_anywhere_and_started_again_is_the_unbroken_run(tmp_path, unbroken, stops, steps):
    for stop, step in zip(stops, steps, strict=True):
        assert ended(ALONE, tmp_path, SMALL, **stop) == (step, signal.SIGUSR1)
    assert ended(ALONE, tmp_path, SMALL) == (8, None)
    kept, losses = record(tmp_path)
    assert kept == unbroken[0]
    # A stop adds a checkpoint; those of the unbroken run are there, judged by the same losses.
    assert losses | unbroken[1] == losses
    evaluated = {row["step"]: row["eval/loss"] for row in kept if "eval/loss" in row}
    assert all(loss == evaluated.get(step) for step, loss in losses.items())


class Killed(BaseException):
    """Copy what SIGKILL leaves on the disk, and no more."""


@pytest.mark.slow
def test_killed_between_an_evaluation_that_was_owed_and_its_checkpoint(tmp_path, unbroken, monkeypatch):
    assert ended(ALONE, tmp_path, SMALL, step=4) == (4, signal.SIGUSR1)

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.checkpoint.store.CheckpointStore.save", kill)
        with pytest.raises(Killed):
            ended(ALONE, tmp_path, SMALL)
    assert [row["step"] for row in read_rows(tmp_path)][-2:] == [4, 4]
    assert ended(ALONE, tmp_path, SMALL) == (8, None)
    assert record(tmp_path)[0] == unbroken[0]


@pytest.mark.slow
def test_a_save_longer_than_the_grace_is_not_begun(tmp_path, caplog):
    for grace, last in ((1e-9, [2]), (60, [2, 4])):
        folder = tmp_path / str(grace)
        changes = {"checkpoint": {"every": 2, "keep_last": 9, "grace_seconds": grace}}
        assert ended(ALONE, folder, changes=changes, step=3) == (4, signal.SIGUSR1)
        assert saved(folder)[: len(last)] == last
        assert ("the final checkpoint is skipped" in caplog.text) == (grace < 1)
        caplog.clear()


@pytest.mark.slow
def test_the_best_is_judged_by_an_evaluation_of_its_own_step(tmp_path):
    changes = {"eval": {"every": 3}, "checkpoint": {"every": 2, "keep_last": 9}}
    ended(ALONE, tmp_path, changes)
    losses = {}
    for step, path in list_published_folders(tmp_path / "checkpoints").items():
        losses[step] = json.loads((path / "manifest.json").read_text())["manifest"]["state"]["eval_loss"]
    assert {step for step, loss in losses.items() if loss is not None} == {6, 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda lines: lines, None),
        (lambda lines: [*lines, b'{"step": 4, "eval'], None),  # torn by a kill: nothing of before is lost
        (lambda lines: [b"\x00\xff{[" * 99, *lines[1:]], "had damaged lines (1)"),
        (lambda lines: [b"[" * 9999, b"7", *lines], "had damaged lines (2)"),
        (None, "does not exist, so the rows up to step 4 are lost"),
    ],
)
def test_a_record_that_is_gone_or_damaged_is_told_in_one_line(tmp_path, unbroken, caplog, spoil, said):
    changes = SMALL | {"max_steps": 8}
    assert ended(ALONE, tmp_path, changes, step=4) == (4, signal.SIGUSR1)
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row).encode() for row in read_rows(tmp_path)]
    path.unlink()
    if spoil is not None:
        path.write_bytes(b"\n".join(spoil(lines)) + b"\n")
    config, resolved = resolve(recipe(**changes), None, 1)
    caplog.clear()
    run = assemble(config, resolved, ALONE, token_bundle(), tmp_path)
    run.trackers.close(0)
    told = [line for line in caplog.messages if "metrics.jsonl" in line]
    assert told == ([] if said is None else [f"{path} {said}; the run continues without them"])


@pytest.mark.slow
def test_all_ranks_leave_an_evaluation_together_and_do_it_again(ranks, tmp_path):
    """The evaluation has five batches on two ranks; one rank gets a signal in its third."""
    changes = SMALL | {"engine": {"parallel": "ddp"}}
    results = ranks(2).run(ended, tmp_path, changes, 1, signal.SIGUSR1, None, 8)
    assert results == [(2, signal.SIGTERM), (2, signal.SIGUSR1)]
    assert ranks(2).run(ended, tmp_path, changes) == [(8, None)] * 2
    assert ranks(2).run(ended, tmp_path / "whole", changes) == [(8, None)] * 2
    assert record(tmp_path)[0] == record(tmp_path / "whole")[0]


@pytest.mark.slow
def test_all_ranks_stop_and_save_at_the_same_step(ranks, tmp_path):
    """A signal, or the clock, of one rank is enough."""
    changes = {"engine": {"parallel": "ddp"}, "checkpoint": {"every_minutes": 1e-6, "keep_last": 20}}
    results = ranks(2).run(ended, tmp_path, changes, 1, signal.SIGUSR1, 3)
    assert [step for step, _ in results] == [4, 4]
    assert [number for _, number in results] == [signal.SIGTERM, signal.SIGUSR1]
    assert saved(tmp_path) == [1, 2, 3, 4]


def test_flags_of_many_ranks_are_told_apart():
    flag_reader = FlagReader(torch.device("cpu"))

    def agreed(saves, stops):
        return flag_reader.read(torch.tensor(saves * SAVE_FLAG + stops * STOP_FLAG, dtype=torch.float64))

    assert agreed(0, 0) == Flags()
    assert agreed(4096, 0) == Flags(save=True)
    assert agreed(0, 4096) == Flags(stop=True)
    assert agreed(3, 4093) == Flags(save=True, stop=True)
    of_rank_0 = torch.tensor(4096.0 * STOP_FLAG + EVALUATE_FLAG, dtype=torch.float64)
    assert flag_reader.read(of_rank_0) == Flags(stop=True, evaluate=True)
    assert flag_reader.read(of_rank_0 + END_FLAG + 4096) == Flags(True, True, True, True)
    assert flag_reader.read(of_rank_0 - EVALUATE_FLAG + END_FLAG) == Flags(stop=True, end=True)


def test_a_second_interrupt_ends_at_once():
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_that_the_end_of_a_process_ignores_stay_ignored():
    before = {number: signal.getsignal(number) for number in StopOnSignal.SIGNALS}
    try:
        with StopOnSignal():
            ignore_stop_signals()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.daily("2-1")
@pytest.mark.parametrize(("every", "times"), [(2, 1), (0, 0)])
def test_memory_for_saves_is_prepared_after_the_first_step(tmp_path, monkeypatch, every, times):
    """A new run and a resumed one save it; not if only the end is to be saved."""
    prepared = []
    monkeypatch.setattr(CheckpointStore, "prepare", lambda store, engine: prepared.append(engine))
    for last in (3, 6):
        prepared.clear()
        assert ended(ALONE, tmp_path, {"max_steps": last, "checkpoint": {"every": every}}) == (last, None)
        assert len(prepared) == times
