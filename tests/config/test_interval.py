"""Intervals and warm-ups as people write them, and the whole steps that they mean."""

from __future__ import annotations

import pytest
import yaml

from pipeline.config.interval import IntervalSteps, StepsOrEpochs, resolve_intervals
from pipeline.config.optimizer_schema import ScheduleConfig
from pipeline.config.settings import format_recipe_yaml, load_settings
from pipeline.errors import ConfigError

RECIPE = "max_epochs: 3\nmodel: {kind: cnn}\ndata: {kind: digits}\n"


@pytest.fixture
def load(tmp_path):
    def function(*overrides, recipe=RECIPE):
        (tmp_path / "recipe.yaml").write_text(recipe)
        return load_settings(tmp_path / "recipe.yaml", None, list(overrides)).config

    return function


@pytest.mark.parametrize(
    ("written", "steps_per_epoch", "steps"),
    [
        (500, 7.0, 500),
        ("500 steps", 7.0, 500),
        ("1 step", 7.0, 1),
        (0, 7.0, 0),
        (0.0, 7.0, 0),
        ("0 epochs", 7.0, 0),
        (0.25, 48.0, 12),
        (0.25, 10.5, 3),  # of 2.625
        ("0.25 epochs", 48.0, 12),
        ("1 epoch", 48.0, 48),
        ("2 epochs", 48.5, 97),
        (" 2  Epochs ", 48.0, 96),
        (0.01, 7.0, 1),  # less than a step
        (500, None, 500),
        (0.25, None, None),
    ],
)
def test_an_interval_in_whole_steps(written, steps_per_epoch, steps):
    assert StepsOrEpochs.parse(written).to_steps(steps_per_epoch) == steps


@pytest.mark.parametrize("key", ["eval.every", "checkpoint.every", "log.every"])
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("2.0", '2.0 may be steps or epochs; write 2 or "2 epochs"'),
        ("1.0", '1.0 may be steps or epochs; write 1 or "1 epoch"'),
        ("1.5", '1.5 may be steps or epochs; write 2 or "1.5 epochs"'),
        ("-1", "given -1"),
        ("-0.5", "given -0.5"),
        ("1.5 steps", "given '1.5 steps'"),
        ("2 days", "given '2 days'"),
        ("true", "given True"),
        ("null", "given None"),
        (".nan", "given nan"),
        ("[1]", "given [1]"),
    ],
)
def test_an_interval_without_a_clear_meaning_is_refused(load, key, written, said):
    with pytest.raises(ConfigError) as caught:
        load(f"{key}={written}")
    assert str(caught.value).startswith(f"command line: {key}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_of_the_log_comes_at_some_time(load):
    with pytest.raises(ConfigError, match=r"log\.every: expected a number above 0, given 0"):
        load("log.every=0")


@pytest.mark.parametrize(
    ("written", "max_steps", "steps"),
    [(30, 100, 30), (0, 100, 0), (0.0, 100, 0), (0.03, 100, 3), (0.03, 150, 5), (0.001, 100, 1)],
)
def test_a_warm_up_in_whole_steps(written, max_steps, steps):
    """A share is rounded up, as transformers does it."""
    assert ScheduleConfig(warmup=written).warmup_steps(max_steps) == steps


@pytest.mark.parametrize("written", ["1.0", "1.5", "-0.1", "-3", "true", "'2 epochs'", "null"])
def test_a_warm_up_without_a_clear_meaning_is_refused(load, written):
    with pytest.raises(ConfigError) as caught:
        load(f"schedule.warmup={written}")
    assert str(caught.value).startswith("command line: schedule.warmup: expected steps (a whole number)")


def test_the_recipe_of_a_run_keeps_what_was_written(load):
    tree = yaml.safe_load(
        format_recipe_yaml(
            load("eval.every=0.25", "checkpoint.every=1 epoch", "log.every=5 steps", "schedule.warmup=0.1")
        )
    )
    assert (tree["eval"]["every"], tree["checkpoint"]["every"]) == (0.25, "1 epoch")
    assert (tree["log"]["every"], tree["schedule"]["warmup"]) == ("5 steps", 0.1)


def test_intervals_of_a_recipe_in_whole_steps(load):
    config = load("eval.every=0.25", "checkpoint.every=1 epoch", "log.every=5 steps")
    assert resolve_intervals(config, 48.0) == IntervalSteps(log=5, eval=12, save=48)


def test_saves_stay_at_evaluations_where_both_are_rounded(load):
    config = load("eval.every=0.25", "checkpoint.every=1 epoch", "checkpoint.keep_best=true")
    assert resolve_intervals(config, 10.5) == IntervalSteps(log=1, eval=3, save=12)  # not 10


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["checkpoint.every=10", "eval.every=0.25"],
            r"checkpoint.every \(10\) a multiple of eval.every \(3\)",
        ),
        (["checkpoint.every=1 epoch"], r"checkpoint.every \(12\) a multiple of eval.every \(0\)"),
        (["wandb.histograms_every=10", "log.every=0.25"], r"every \(10\) a multiple of log.every \(3\)"),
    ],
)
def test_what_does_not_go_together_in_whole_steps_is_refused(load, overrides, message):
    config = load("checkpoint.keep_best=true", *overrides)
    with pytest.raises(ConfigError, match=message):
        resolve_intervals(config, 12.0)


@pytest.mark.parametrize(
    ("overrides", "is_lowest"),
    [
        ([], True),
        (["eval.best_metric=accuracy"], False),
        (["eval.best_metric=loss", "eval.best_mode=max"], False),
        (["eval.best_metric=held_out/loss"], True),
    ],
)
def test_which_evaluation_is_the_best(load, overrides, is_lowest):
    assert load(*overrides).eval.best_is_lowest is is_lowest


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("f1", "f1: write best_mode too, min or max"),
        ("set/acuracy", 'set/acuracy (did you mean "accuracy"?): write best_mode too'),
    ],
)
def test_a_metric_of_another_name_says_which_value_is_the_best(load, name, told):
    with pytest.raises(ConfigError) as caught:
        load(f"eval.best_metric={name}")
    assert str(caught.value).startswith(f"command line: eval: best_metric is {told}")
