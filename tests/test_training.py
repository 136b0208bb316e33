"""When the loop saves and stops: by the clock, on a signal, within the grace before a kill."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny import recipe, resolve, token_bundle

from pipeline.assemble import assemble
from pipeline.checkpoint.folders import steps_in
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.stopping import SAVE_VOTE, STOP_VOTE, Agreement, StopOnSignal
from pipeline.run_directory import RunDirectory
from pipeline.training import train

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


class Disturbed:
    """An engine in the given step of which, or the given micro-batch of an evaluation, a signal arrives."""

    def __init__(self, engine, number, step, evaluation):
        self._engine, self._number = engine, number
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


def ended(job: Job, folder: Path, changes=None, on_rank=0, number=signal.SIGUSR1, step=None, evaluation=None):
    """(last step, signal) of a run in which a signal arrives on one rank."""
    config, resolved = resolve(recipe(**(changes or {})), None, job.ranks.world_size)
    run = assemble(config, resolved, job, token_bundle(), RunDirectory(folder, None))
    if job.ranks.rank == on_rank:
        run = replace(run, engine=Disturbed(run.engine, number, step, evaluation))
    with run.sinks:
        state, number = train(run)
    run.loader.close()
    return state.global_step, number


def rows(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved(folder: Path) -> list[int]:
    return sorted(steps_in(folder / "checkpoints"))


def test_saved_by_the_clock_besides_the_steps(tmp_path):
    each = {"checkpoint": {"every": 5, "every_minutes": 1e-6, "keep_last": 20}}
    assert ended(ALONE, tmp_path, each) == (8, None)
    assert saved(tmp_path) == list(range(1, 9))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_saves_this_step_and_names_itself(tmp_path, number):
    # It comes in the third step and is agreed with the fourth; no evaluation takes of the time until then.
    assert ended(ALONE, tmp_path, changes={"eval": {"every": 1}}, number=number, step=3) == (4, number)
    assert saved(tmp_path) == [4]
    assert [row["step"] for row in rows(tmp_path) if "eval/loss" in row] == [0, 1, 2]
    assert ended(ALONE, tmp_path) == (8, None)


def test_a_signal_ends_an_evaluation(tmp_path):
    changes = {"eval": {"every": 2}, "batch": {"micro_batch_size": 2, "global_batch_size": 8}}
    batches = 10  # of 19 samples
    assert ended(ALONE, tmp_path, changes=changes, evaluation=batches + 3) == (3, signal.SIGUSR1)
    assert [row["step"] for row in rows(tmp_path) if "eval/loss" in row] == [0]


def test_a_save_longer_than_the_grace_is_not_begun(tmp_path, caplog):
    for grace, last in ((1e-9, [2]), (60, [2, 4])):
        folder = tmp_path / str(grace)
        changes = {"checkpoint": {"every": 2, "keep_last": 9, "grace_seconds": grace}}
        assert ended(ALONE, folder, changes=changes, step=3) == (4, signal.SIGUSR1)
        assert saved(folder)[: len(last)] == last
        assert ("not saved once more" in caplog.text) == (grace < 1)
        caplog.clear()


def test_the_best_is_judged_by_an_evaluation_of_its_own_step(tmp_path):
    changes = {"eval": {"every": 3}, "checkpoint": {"every": 2, "keep_last": 9}}
    ended(ALONE, tmp_path, changes)
    losses = {}
    for step, path in steps_in(tmp_path / "checkpoints").items():
        losses[step] = json.loads((path / "manifest.json").read_text())["manifest"]["state"]["eval_loss"]
    assert {step for step, loss in losses.items() if loss is not None} == {6, 8}


def test_all_ranks_stop_and_save_at_the_same_step(ranks, tmp_path):
    """A signal, or the clock, of one rank is enough."""
    changes = {"engine": {"parallel": "ddp"}, "checkpoint": {"every_minutes": 1e-6, "keep_last": 20}}
    results = ranks(2).run(ended, tmp_path, changes, 1, signal.SIGUSR1, 3)
    assert [step for step, _ in results] == [4, 4]
    assert [number for _, number in results] == [signal.SIGTERM, signal.SIGUSR1]
    assert saved(tmp_path) == [1, 2, 3, 4]


def test_votes_of_many_ranks_are_told_apart():
    agreement = Agreement(torch.device("cpu"))

    def agreed(saves, stops):
        return agreement.submit(torch.tensor(saves * SAVE_VOTE + stops * STOP_VOTE, dtype=torch.float64))

    assert agreed(0, 0) == (False, False)
    assert agreed(4096, 0) == (True, False)
    assert agreed(0, 4096) == (False, True)
    assert agreed(3, 4093) == (True, True)


def test_a_second_interrupt_ends_at_once():
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
