"""The learning rate of a step: its corners, its continuity, and that it depends on the step alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.optimizer_schema import ScheduleConfig
from pipeline.engine.schedule import check_user_schedule, describe_missed_peak, learning_rate_multiplier
from pipeline.errors import ConfigError

KINDS = ("cosine", "linear", "constant", "wsd")
kinds = st.sampled_from(KINDS)
ratios = st.floats(0.0, 1.0)


@st.composite
def runs(draw):
    """A schedule that fits into its run."""
    max_steps = draw(st.integers(2, 2000))
    warmup = draw(st.integers(0, max_steps - 1))
    kind = draw(kinds)
    decay = draw(st.integers(1, max_steps - warmup)) if kind == "wsd" else None
    config = ScheduleConfig(kind=kind, warmup=warmup, decay_steps=decay, min_learning_rate_ratio=draw(ratios))
    return config, max_steps


def curve(config, max_steps):
    return [learning_rate_multiplier(config, step, max_steps) for step in range(max_steps + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_by_equal_steps_from_above_zero_to_the_peak(kind):
    config = ScheduleConfig(kind=kind, warmup=4)
    rates = curve(config, 100)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert learning_rate_multiplier(ScheduleConfig(kind=kind), 0, 10) == 1.0, "the first step without warm-up"


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("low", [0.0, 0.1, 1.0])
def test_the_end_of_the_run_is_the_minimum(kind, low):
    config = ScheduleConfig(kind=kind, warmup=10, min_learning_rate_ratio=low)
    assert learning_rate_multiplier(config, 100, 100) == pytest.approx(low)
    assert learning_rate_multiplier(config, 99, 100) == pytest.approx(low, abs=0.06)
    assert learning_rate_multiplier(config, 1000, 100) == pytest.approx(low), "past the end it stays there"


def test_constant_stays_at_the_peak():
    assert set(curve(ScheduleConfig(kind="constant", warmup=3), 20)[3:]) == {1.0}


def test_cosine_is_a_cosine_and_linear_a_line():
    cosine = ScheduleConfig(kind="cosine", min_learning_rate_ratio=0.0)
    line = ScheduleConfig(kind="linear", min_learning_rate_ratio=0.0)
    for step in range(101):
        assert learning_rate_multiplier(cosine, step, 100) == pytest.approx(
            0.5 * (1 + math.cos(math.pi * step / 100))
        )
        assert learning_rate_multiplier(line, step, 100) == pytest.approx(1 - step / 100)


def test_wsd_is_stable_and_then_decays_over_its_last_steps():
    config = ScheduleConfig(kind="wsd", warmup=10, decay_steps=20, min_learning_rate_ratio=0.0)
    rates = curve(config, 100)
    assert set(rates[10:81]) == {1.0}
    assert rates[81] == pytest.approx(0.95)
    assert rates[90] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.05)
    by_default = curve(ScheduleConfig(kind="wsd", min_learning_rate_ratio=0.0), 100)
    assert by_default.count(1.0) == 81, "a fifth of the run"


@settings(deadline=None, max_examples=40)
@given(runs())
def test_no_step_leaves_the_range_or_jumps(run):
    config, max_steps = run
    rates = curve(config, max_steps)
    low = config.min_learning_rate_ratio
    assert all(0.0 < rate <= 1.0 for rate in rates[: config.warmup])
    assert all(low - 1e-12 <= rate <= 1.0 for rate in rates[config.warmup :])
    assert rates[: config.warmup] == sorted(rates[: config.warmup])
    assert rates[config.warmup :] == sorted(rates[config.warmup :], reverse=True)
    shape = config.decay_steps or max(1, max_steps - config.warmup)
    steepest = max(1 / (config.warmup + 1), math.pi / 2 / shape)
    jumps = [abs(b - a) for a, b in pairwise(rates)]
    assert max(jumps) <= steepest + 1e-9
    assert rates[config.warmup] == 1.0
    assert rates[::-1] == [
        learning_rate_multiplier(config, step, max_steps) for step in range(max_steps, -1, -1)
    ]


@settings(deadline=None)
@given(kinds, st.integers(0, 50), st.none() | st.integers(1, 50), st.integers(1, 40))
def test_a_run_shorter_than_its_schedule_is_remarked_and_has_a_rate_for_every_step(
    kind, warmup, decay, max_steps
):
    config = ScheduleConfig(kind=kind, warmup=warmup, decay_steps=decay)
    assert all(0.0 < rate <= 1.0 for rate in curve(config, max_steps)[:-1])
    needed = warmup + ((decay or max(1, max_steps // 5)) if kind == "wsd" else 0)
    line = describe_missed_peak(config, max_steps)
    assert (line is not None) == (needed > max_steps)
    if line is not None:
        assert f"warmup {warmup}" in line
        assert f"the run of {max_steps} steps" in line


# --- a function of the user's own ---------------------------------------------------------------------


def halved(step, total_steps):
    return 1 - step / total_steps / 2


def late_negative(step, total_steps):
    return 1.0 if step < total_steps - 1 else -0.1


def dividing(step, total_steps):
    return 1 / (7 - step) if step < 8 else 1.0


def named(step, total_steps):
    return "half"


def of_one(step):
    return 1.0


calls = iter(range(1_000_000))


def counting(step, total_steps):
    return next(calls) / 1e6


def own(name):
    return ScheduleConfig(kind=f"test_schedule:{name}")


def test_an_own_function_decides_the_whole_curve_and_hears_of_another_length():
    check_user_schedule(own("halved"), 100)
    assert curve(own("halved"), 4) == [1.0, 0.875, 0.75, 0.625, 0.5]
    assert learning_rate_multiplier(own("halved"), 4, 8) == 0.75
    assert describe_missed_peak(own("halved"), 4) is None


@pytest.mark.parametrize("max_steps", [1, 2, 3, 999, 1000, 1001, 123_457])
def test_the_last_step_of_a_run_of_any_length_is_tried(max_steps):
    with pytest.raises(ConfigError, match=f"returned -0.1 for step {max_steps - 1} of {max_steps};"):
        check_user_schedule(own("late_negative"), max_steps)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dividing", r"for step 7 of 100 raised ZeroDivisionError: .*tests/engine/test_schedule\.py:\d+"),
        ("named", r"returned 'half' for step 0 of 100; expected a finite number"),
        ("of_one", r"cannot be called with \(step, total_steps\)"),
        ("counting", r"for step 99 of 100; make its result depend on its arguments only"),
        ("halve", r"has no 'halve'; did you mean 'halved'\?"),
    ],
)
def test_an_own_function_that_is_no_schedule_is_one_line(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_user_schedule(own(name), 100)
    assert "test_schedule:" in str(caught.value)


def test_a_step_of_the_run_is_held_to_the_same():
    with pytest.raises(ConfigError, match="for step 7 of 100 raised ZeroDivisionError"):
        learning_rate_multiplier(own("dividing"), 7, 100)


def test_built_in_shapes_are_not_tried():
    check_user_schedule(ScheduleConfig(), 10)
