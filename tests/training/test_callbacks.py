"""Callbacks see every moment of a run, and all ranks act on their answers; early stopping is one of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from support.corrupted_data import train as train_corrupted
from support.launch import run_directories, write_recipe
from support.metrics_rows import read_reproducible_rows, read_rows
from support.tiny import deepspeed_json, recipe, resolve
from training.test_training import ALONE, ended, saved

from pipeline.cli.train import main
from pipeline.config.schema import RunConfig
from pipeline.errors import CallbackError, ConfigError
from pipeline.monitoring.events import Event
from pipeline.monitoring.report.runs import summary_lines
from pipeline.training.callbacks import MOMENTS, Answer, Callback, EarlyStopping, Moment

pytestmark = pytest.mark.slow


class Scripted(Callback):
    """Writes each call to a file, and answers as its arguments say.

    Args:
        log: The file.
        answers: Moment -> step -> fields of the answer.
    """

    def __init__(self, log, **answers):
        self.log = Path(log)
        self.answers = answers
        self.calls = 0

    def _take(self, moment, now):
        self.calls += 1
        call = [moment, now.step, now.samples, now.tokens, dict(now.metrics), self.calls]
        with self.log.open("a") as file:
            file.write(json.dumps(call) + "\n")
        fields = dict(self.answers.get(moment, {}).get(str(now.step), {}))
        if "alert" in fields:
            fields["alert"] = Event(*fields["alert"])
        return Answer(**fields) if fields else None

    def run_begins(self, now):
        return self._take("run_begins", now)

    def after_row(self, now):
        return self._take("after_row", now)

    def after_evaluation(self, now):
        return self._take("after_evaluation", now)

    def before_save(self, now):
        return self._take("before_save", now)

    def run_ends(self, now):
        return self._take("run_ends", now)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def scripted(folder, **answers):
    return {"kind": "test_callbacks:Scripted", "args": {"log": str(folder / "calls"), **answers}}


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def events(run, name):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == name]


def evaluated(run):
    return [row["step"] for row in read_rows(run) if "eval/loss" in row]


EVERY = {"eval": {"every": 4}, "checkpoint": {"every": 4, "keep_last": 20}, "log": {"every": 2}}


def test_each_moment_is_given_the_step_the_counts_and_the_row_of_the_record(tmp_path):
    assert ended(ALONE, tmp_path / "run", EVERY | {"callbacks": [scripted(tmp_path)]}) == (8, None)
    found = calls(tmp_path)
    assert [(moment, step) for moment, step, *_ in found] == [
        ("run_begins", 0),
        ("after_evaluation", 0),
        ("after_row", 1),
        ("after_row", 2),
        ("after_row", 4),
        ("after_evaluation", 4),
        ("before_save", 4),
        ("after_row", 6),
        ("after_row", 8),
        ("after_evaluation", 8),
        ("before_save", 8),
        ("run_ends", 8),
    ]
    assert all(samples == 8 * step for _, step, samples, *_ in found)
    tokens = {
        row["step"]: row["train/tokens_seen"] for row in read_rows(tmp_path / "run") if "train/loss" in row
    }
    assert all(counted == ({0: 0.0} | tokens)[step] for _, step, _, counted, *_ in found)
    given = [{"step": step, **row} for moment, step, _, _, row, _ in found if row]
    assert given == read_rows(tmp_path / "run")


ANSWERS = {
    "run_begins": {"0": {"alert": ["hello", "the run begins"]}},
    "after_row": {
        "1": {"alert": ["odd_row", "step 1 is odd", "look at it"]},
        "2": {"save": True},
        "4": {"evaluate": True},
    },
    "after_evaluation": {"6": {"stop": "that is enough"}},
}
CHANGES = {"eval": {"every": 3}, "checkpoint": {"keep_last": 20}}


def test_all_ranks_act_on_what_rank_0_is_answered(ranks, tmp_path):
    changes = CHANGES | {"callbacks": [scripted(tmp_path, **ANSWERS)]}
    results = ranks(2).run(ended_under, deepspeed_json(2), tmp_path / "run", changes, {})
    assert results == [(6, None)] * 2
    check_answers(tmp_path / "run")
    assert sum(moment == "run_begins" for moment, *_ in calls(tmp_path)) == 1, "on rank 0 alone"


def check_answers(run):
    assert [line["step"] for line in events(run, "hello")] == [0]
    (alert,) = events(run, "odd_row")
    assert (alert["level"], alert["message"], alert["advice"]) == ("warning", "step 1 is odd", "look at it")
    assert evaluated(run) == [0, 3, 5, 6]  # that of step 5 was asked for by the row of step 4
    assert saved(run) == [3, 6]
    (stopped,) = events(run, "stopped_early")
    assert stopped["step"] == 6
    assert stopped["message"].startswith("the run ends at step 6 of ")
    assert stopped["message"].endswith("test_callbacks:Scripted: that is enough")


def ended_under(job, split, folder, changes, disturbed):
    return ended(job, folder, changes, deepspeed=split, **disturbed)


def test_a_command_does_what_a_callback_asks_for(tmp_path, capfd):
    changes = {"max_steps": 50, "checkpoint": {"keep_last": 20}, "eval": {"every": 3, "max_samples": 20}}
    path = write_recipe(tmp_path, **changes, callbacks=[scripted(tmp_path, **ANSWERS)])
    assert main(["--config", str(path), "engine.parallel=single"]) == 0
    (run,) = run_directories(tmp_path)
    check_answers(run)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["global_step"] == 6
    assert summary["stopped_early"] == "test_callbacks:Scripted: that is enough"
    said = "stopped early  the run ends at step 6 of 50: test_callbacks:Scripted: that is enough"
    assert said in capfd.readouterr().out


@pytest.mark.daily("3")
@pytest.mark.parametrize("interrupted", [None, 2, 3])
def test_a_run_that_was_interrupted_stops_where_the_unbroken_one_does(tmp_path, interrupted):
    """The row of step 3 asks for the end, which comes behind step 4: so does the signal of step 3."""
    asks = {"after_row": {"3": {"stop": "why not"}}}
    changes = {"eval": {"every": 5}, "callbacks": [scripted(tmp_path, **asks)]}
    run = tmp_path / "run"
    if interrupted is not None:  # ranks agree on a signal one step after it came
        assert ended(ALONE, run, changes, step=interrupted) == (interrupted + 1, signal.SIGUSR1)
    assert ended(ALONE, run, changes) == (4, None)
    assert evaluated(run) == [0, 4]
    assert [line["step"] for line in events(run, "stopped_early")] == [4]


NEVER_BETTER = {"early_stopping": {"patience": 2, "min_delta": 100.0}, "eval": {"every": 2}}


def test_early_stopping_counts_on_in_a_resumed_run(ranks, tmp_path):
    """Interrupted in the evaluation of step 2: the resumed run repeats it, and knows of that of step 0."""
    stages = deepspeed_json(0) | {"pipeline": {"stages": 2}}
    for split, disturbed, end in (
        (deepspeed_json(2), {"step": 2}, (2, signal.SIGUSR1)),
        (stages, {}, (4, None)),
    ):
        assert ranks(2).run(ended_under, split, tmp_path, NEVER_BETTER, disturbed)[0] == end
    assert evaluated(tmp_path) == [0, 2, 4]
    (stopped,) = events(tmp_path, "stopped_early")
    assert "early_stopping: eval/loss did not improve in 2 evaluations, best" in stopped["message"]
    assert "stopped early  the run ends at step 4 of 8" in "\n".join(summary_lines(tmp_path))


@pytest.mark.nightly
def test_a_run_that_early_stopping_ended_goes_on_with_a_higher_patience_alone(tmp_path):
    assert ended(ALONE, tmp_path, NEVER_BETTER) == (4, None)
    before = read_reproducible_rows(tmp_path)
    assert ended(ALONE, tmp_path, NEVER_BETTER) == (4, None)
    assert read_reproducible_rows(tmp_path) == before, "neither a step nor an evaluation"
    patient = NEVER_BETTER | {"early_stopping": {"patience": 3, "min_delta": 100.0}}
    assert ended(ALONE, tmp_path, patient) == (6, None)
    assert evaluated(tmp_path) == [0, 2, 4, 6]
    unbroken = tmp_path / "unbroken"
    assert ended(ALONE, unbroken, patient) == (6, None)
    assert read_reproducible_rows(tmp_path) == read_reproducible_rows(unbroken)
    assert "stopped early  the run ends at step 6 of 8" in "\n".join(summary_lines(tmp_path))


def moments(*values, key="eval/loss"):
    config = RunConfig.model_validate(recipe())
    return [Moment(step, 0, 0.0, config, {key: value}) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "settings", "stops_at"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 5, 5, 5], {"patience": 2}, 2),
        ([5, 6, 4, 4.5, 4.2], {"patience": 2}, 4),
        ([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 0.15}, None),  # 4.8 is 0.2 below the best
        ([5, 4.9, 4.95, 4.91], {"patience": 3, "min_delta": 0.15}, 3),
        ([1, 2, 3, 2, 1], {"patience": 2, "is_lowest": False}, 4),
        ([float("nan"), float("nan")], {"patience": 2}, 1),
        ([float("nan"), 3, 2], {"patience": 2}, None),
    ],
)
def test_early_stopping_counts_evaluations_without_an_improvement(values, settings, stops_at):
    stopping = EarlyStopping(**settings)
    answers = [stopping.after_evaluation(now) for now in moments(*values)]
    stopped = [step for step, answer in enumerate(answers) if answer is not None and answer.stop]
    assert stopped[:1] == ([] if stops_at is None else [stops_at])


def test_early_stopping_watches_the_metric_that_the_recipe_calls_best(tmp_path):
    changes = NEVER_BETTER | {"eval": {"every": 2, "best_metric": "bleu", "best_mode": "max"}}
    with pytest.raises(ConfigError, match=r"'bleu' is no metric of this run's evaluation; it has loss"):
        ended(ALONE, tmp_path, changes)


@pytest.mark.nightly
def test_a_rollback_brings_back_the_state_of_the_checkpoint(tmp_path):
    """The corrupted step 41 goes back to step 30: the calls after that are counted once."""
    changes = {
        "checkpoint": {"every": 10, "keep_last": 9},
        "watch": {"on_spike": "rollback", "rollback_steps": 4},
        "callbacks": [scripted(tmp_path)],
    }
    train_corrupted(ALONE, None, str(tmp_path / "run"), {40 * 8: 1e4}, **changes)
    at = {step: count for moment, step, *_, count in calls(tmp_path) if moment == "before_save"}
    after = [call for call in calls(tmp_path) if call[0] == "after_row" and call[1] == 31]
    assert [call[-1] for call in after] == [at[30] + 1] * 2


class Raises(Callback):
    def after_row(self, now):
        if now.step == 2:
            raise KeyError("mine")


class NoJson(Callback):
    def before_save(self, now):
        pass

    def state_dict(self):
        return {"tensor": torch.zeros(3)}


class NoAnswer(Callback):
    def run_begins(self, now):
        return "stop"


class NamesAnEvent(Callback):
    def run_begins(self, now):
        return Answer(alert=Event("rollback", "back to step 0"))


class Ends(Callback):
    def run_begins(self, now):
        raise SystemExit(3)


class Misnamed(Callback):
    def after_evaluate(self, now):
        pass


class Unrelated:
    pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Raises",
            r"Raises.after_row at step 2 raised KeyError: 'mine' \(.*test_callbacks.py:\d+\)",
        ),
        ("NoJson", "NoJson.state_dict raised TypeError: Object of type Tensor is not JSON serializable"),
        ("NoAnswer", "it returned 'stop'; expected None or a pipeline.Answer"),
        ("NamesAnEvent", "'rollback' is an event of the run itself; give the alert another name"),
        ("Ends", r"callbacks: test_callbacks:Ends.run_begins at step 0 ended the program \(SystemExit: 3\)"),
    ],
)
def test_a_callback_that_raises_ends_the_run_and_is_named(tmp_path, name, message):
    with pytest.raises(CallbackError, match=message):
        ended(ALONE, tmp_path, {"callbacks": [f"test_callbacks:{name}"]})


def test_the_command_shows_one_line_and_the_log_has_the_traceback(tmp_path, capfd):
    path = write_recipe(tmp_path, callbacks=["test_callbacks:Raises"], run_dir=str(tmp_path / "run"))
    assert main(["--config", str(path), "engine.parallel=single"]) == 1
    error = capfd.readouterr().err
    assert "error: callbacks: test_callbacks:Raises.after_row at step 2 raised KeyError: 'mine'" in error
    assert "Traceback" not in error
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text()
    assert 'raise KeyError("mine")' in log
    assert events(tmp_path / "run", "run_failed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"callbacks": ["test_callbacks:Unrelated"]}, "Unrelated is no subclass of pipeline.Callback"),
        (
            {"callbacks": ["test_callbacks:Misnamed"]},
            "Misnamed overrides no method of Callback; override one of run_begins, after_row",
        ),
        ({"callbacks": ["test_callbacks:Scripted"]}, "cannot be called with its args: missing a required"),
        ({"callbacks": ["no_such_module:C"]}, "there is no module 'no_such_module'"),
        (
            {"early_stopping": {"patience": 2}},
            "eval.every: 0 there are none between the first and the last step; set eval.every",
        ),
        ({"early_stopping": {"patience": 0}, "eval": {"every": 2}}, "should be greater than 0"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line_before_the_data_is_prepared(tmp_path, capfd, changes, message):
    path = write_recipe(tmp_path, **{"eval": {"every": 0}, **changes})
    assert main(["--config", str(path), "engine.parallel=single"]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_early_stopping_without_held_out_data_is_refused(tmp_path, capfd):
    path = write_recipe(tmp_path, early_stopping={"patience": 2})
    assert main(["--config", str(path), "engine.parallel=single", "data.eval_fraction=0"]) == 2
    assert "early_stopping: nothing is held out to evaluate on" in capfd.readouterr().err


def test_every_moment_is_documented():
    assert [name for name in vars(Callback) if name in MOMENTS] == list(MOMENTS)
    config, _ = resolve(recipe(callbacks=["a:B"]), None, 1)
    assert config.callbacks[0].kind == "a:B"
