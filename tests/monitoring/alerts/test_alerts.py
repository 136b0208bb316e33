"""What each alert answers to rows that were made up: when it speaks, how often, and when it does not."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from pipeline.monitoring.alerts import Seen, restore, state_of
from pipeline.monitoring.alerts.rules import (
    CALM,
    GRADIENT_NORM,
    LOSS,
    DataStarvation,
    EvalDivergence,
    LossRise,
    MemoryGrowth,
    NonFinite,
    NonFiniteEval,
    SpikeDetector,
    Spikes,
    ThroughputDrop,
    no_targets,
)


def asked(alert, rows, step=0):
    """(step, event) of all that it says; steps are counted on over the rows."""
    told = []
    for seen in rows:
        step += seen.steps
        if (event := alert(step, seen)) is not None:
            told.append((step, event))
    return told


def of_losses(*rows):
    return [Seen({"train/loss": row[-1]}, row, [1.0] * len(row), [False] * len(row)) for row in rows]


def timed(seconds, data=0.0, steps=1):
    return Seen({}, [1.0] * steps, own={"step": [seconds], "data": [data]})


def test_a_spike_between_two_rows_is_told_once_with_its_step():
    rows = of_losses(*[[2.0] * 10] * 5, [2.0, 2.0, 7.0, 6.0, *[2.0] * 6], [2.0] * 10)
    ((step, event),) = asked(Spikes("loss_spike", SpikeDetector(LOSS)), rows)
    assert (step, event.name, event.level) == (60, "loss_spike", "warning")
    assert event.message.startswith("the loss of step 53 is 7, 3.5 times what was normal before (2, up to 3)")
    assert "optimizer.learning_rate" in event.advice
    assert event.fields == {"at_step": 53, "value": 7.0, "normal": 2.0, "limit": pytest.approx(3.0)}


def test_a_step_without_a_target_is_told_with_its_number():
    rows = [Seen({}, [1.0] * 3, counts=[4.0, 0.5, 1.0]), Seen({}, [1.0, 0.0, 0.0], counts=[2.0, 0.0, 0.0])]
    ((step, event),) = asked(no_targets, [*rows, Seen({"eval/loss": 0.0})])
    assert (step, event.name, event.level, event.fields) == (
        6,
        "no_targets",
        "warning",
        {"at_step": 5, "steps": 3},
    )
    assert event.message == "no target counts in the global batch of 2 of 3 steps, first of step 5"


def test_a_spike_is_told_again_after_a_time_without_one():
    calm = [[2.0]] * 40
    soon, late = [[7.0], *[[2.0]] * (CALM - 1), [7.0]], [[7.0], *[[2.0]] * CALM, [7.0]]
    assert len(asked(Spikes("loss_spike", SpikeDetector(LOSS)), of_losses(*calm, *soon))) == 1
    assert len(asked(Spikes("loss_spike", SpikeDetector(LOSS)), of_losses(*calm, *late))) == 2
    assert (
        len(asked(Spikes("loss_spike", SpikeDetector(LOSS)), of_losses(*calm, *[[7.0]] * 300))) == 1
    )  # how things are now


def test_norms_are_looked_at_apart_and_need_not_be_there():
    rows = [Seen({}, [2.0], [0.5 if step < 50 else 9.0]) for step in range(51)]
    ((step, event),) = asked(Spikes("grad_norm_spike", SpikeDetector(GRADIENT_NORM)), rows)
    assert (step, event.name) == (51, "grad_norm_spike")
    assert event.message.startswith("the gradient norm of step 51 is 9, 18.0 times")
    assert asked(Spikes("grad_norm_spike", SpikeDetector(GRADIENT_NORM)), of_losses(*[[2.0]] * 3)) == []
    assert asked(Spikes("grad_norm_spike", SpikeDetector(GRADIENT_NORM)), [Seen({}, [2.0])] * 50) == []


def skipping(skipped, scale=None, loss=1.0):
    row = {"train/loss": loss} | ({} if scale is None else {"train/loss_scale": scale})
    return Seen(row, [loss] * len(skipped), [1.0] * len(skipped), skipped)


@pytest.mark.parametrize(
    ("lowest", "scale", "name", "level", "said"),
    [
        (
            None,
            None,
            "non_finite",
            "warning",
            "steps 1, 3 skipped: the gradient was infinite or NaN; look at",
        ),
        (1.0, 64.0, "non_finite", "info", "NaN; the fp16 loss scale is now 64"),
        (1.0, 1.0, "loss_scale_floor", "warning", "the fp16 loss scale cannot fall below 1; use bf16"),
    ],
)
def test_skipped_steps_are_told_once_a_row(lowest, scale, name, level, said):
    alert = NonFinite(lowest)
    event = alert(3, skipping([True, False, True], scale))
    assert (event.name, event.level) == (name, level)
    assert said in event.line
    assert event.fields["skipped"] == 2
    assert alert(6, skipping([False] * 3, scale)) is None


def test_a_loss_that_is_none_beside_a_gradient_that_is_one():
    event = NonFinite(None)(2, skipping([False, False], loss=math.nan))
    assert event.name == "non_finite"
    assert event.message.startswith("the loss of steps 1 to 2 is infinite or NaN")


def test_in_fp16_a_loss_that_is_none_is_no_search_for_a_scale():
    event = NonFinite(1.0)(9, skipping([False, True, True], 64.0, loss=math.nan))
    assert (event.name, event.level, event.fields["at_step"]) == ("non_finite", "warning", 8)
    assert event.message.startswith("steps 8 to 9 skipped: ")


def held_out(**values):
    return Seen({f"eval/{name.replace('_', '/')}": value for name, value in values.items()})


def test_an_evaluation_that_is_not_finite_is_told_once_until_it_is_finite_again():
    nan, fine = held_out(loss=math.nan, a_loss=2.0), held_out(loss=1.0, a_loss=2.0)
    more = held_out(loss=math.nan, a_loss=math.inf)
    rows = [fine, nan, Seen({"train/loss": math.nan}, [math.nan]), nan, more, more, fine, nan]
    told = asked(NonFiniteEval(), rows)
    assert [(step, event.name, event.level) for step, event in told] == [
        (at, "non_finite_eval", "warning") for at in (0, 1, 1)
    ]
    assert told[0][1].message == "the evaluation after step 0 gave eval/loss: infinite or NaN"
    assert "eval/a/loss, eval/loss" in told[1][1].message


def test_an_evaluation_without_a_target_is_told_by_one_event_alone():
    assert asked(NonFiniteEval(), [held_out(loss=math.nan, targets=0.0, perplexity=math.nan)]) == []
    (told,) = asked(NonFiniteEval(), [held_out(loss=math.nan, a_loss=math.nan, a_targets=0.0)])
    assert "gave eval/loss: " in told[1].message


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_evaluation_or_a_loss_that_is_not_finite_disarms_no_alert(bad):
    alert = EvalDivergence()
    losses = [bad, 2.0, 1.0, 1.5, bad, 2.0, 3.0]
    rows = []
    for at, loss in enumerate(losses):
        rows += [Seen({}, [9.0 - at, bad]), held_out(loss=loss)]
    assert len(asked(alert, rows)) == 1


def test_a_step_that_waits_for_data_is_told_of_once():
    rows = [timed(5.0, 4.0), *[timed(0.1, 0.03)] * 80]  # workers start
    ((step, event),) = asked(DataStarvation(num_workers=0), rows)
    assert (step, event.name) == (31, "data_starvation")
    assert event.message == "waiting for data is 30% of the step (30 of 100 ms)"
    assert event.line.endswith("loader.num_workers=2")


def test_a_wait_for_data_that_passes_is_not_worth_a_line():
    rows = [timed(1.0), *([timed(1.0, 0.5)] * 20 + [timed(1.0)] * 10) * 30]
    assert asked(DataStarvation(0), rows) == []


@pytest.mark.parametrize(("seconds", "data"), [(0.1, 0.009), (0.001, 0.0009)], ids=["a tenth", "short"])
def test_a_short_wait_for_data_is_not_worth_a_line(seconds, data):
    assert asked(DataStarvation(0), [timed(seconds, data, 20)] * 5) == []


def test_more_workers_are_asked_for_where_there_are_some():
    ((_, event),) = asked(DataStarvation(4), [timed(1.0, 0.5, 20)] * 4)
    assert "loader.num_workers=8" in event.line


def test_steps_that_stay_slow_are_told_of_once_until_they_recover():
    fast, slow = [timed(1.0)] * 120, [timed(1.6)] * 200
    ((step, event),) = asked(ThroughputDrop(), [*fast, *slow])
    assert event.name == "throughput_drop"
    assert event.message == "steps take 1.6 times as long as they did (1600 ms, before 1000 ms)"
    assert 120 + 4 * 20 <= step <= 120 + 5 * 30
    assert len(asked(ThroughputDrop(), [*fast, *slow, *fast, *slow])) == 2


def test_slow_steps_that_wait_for_data_say_so():
    ((_, event),) = asked(ThroughputDrop(), [timed(1.0)] * 120 + [timed(3.0, 2.0)] * 200)
    assert "most of it waiting for data" in event.message
    assert "loader.num_workers" in event.advice


def test_a_minute_of_other_work_on_the_machine_is_not_worth_a_line():
    chance = random.Random(0)
    rows = [timed(chance.choice([1.0, 1.0, 1.1, 4.0])) for _ in range(3000)]
    rows[1000:1080] = [timed(5.0)] * 10  # and once all of it, for a minute
    assert asked(ThroughputDrop(), rows) == []


def test_a_cpu_that_others_use_is_slow_for_their_sake():
    crowded = Seen({}, [1.0], own={"step": [9.0], "data": [3.0], "load": [4.0]})
    for alert in (ThroughputDrop(), DataStarvation(0)):
        assert asked(alert, [*[timed(1.0)] * 120, *[crowded] * 200]) == []


def test_the_first_row_is_the_compilers():
    assert asked(ThroughputDrop(), [timed(1e-6), *[timed(1.0)] * 500]) == []


def using(gib, kind="host"):
    return Seen({}, [1.0], own={kind: gib if isinstance(gib, list) else [gib]})


@pytest.mark.parametrize("kind", ["host", "device"])
def test_memory_that_grows_is_told_of_once_with_its_rank(kind):
    rows = [using([2.0, 2.0 + 0.01 * step], kind) for step in range(400)]
    ((_, event),) = asked(MemoryGrowth(), rows)
    assert event.name == "memory_growth"
    assert event.message.startswith(
        f"the {'process' if kind == 'host' else 'device'}'s memory of rank 1 grows: "
    )
    assert event.fields["rank"] == 1


def test_a_slow_leak_is_found_in_a_longer_run():
    rows = [using(2.0 + 1e-4 * step + 0.05 * (step % 2)) for step in range(12_000)]
    assert len(asked(MemoryGrowth(), rows)) == 1


def test_a_leak_that_begins_late_is_found():
    rows = [using(2.0 + max(0, step - 3000) * 1e-3) for step in range(9_000)]
    assert len(asked(MemoryGrowth(), rows)) == 1


def settling(step):
    return 2.0 + 3.0 * (1 - math.exp(-step / 150))


NOT_A_LEAK = {
    "it settles": settling,
    "it comes and goes": lambda step: 2.0 + 1.5 * math.sin(step / 40),
    "steps": lambda step: 2.0 + 0.5 * (step > 100) + 0.5 * (step > 2000) + 0.5 * (step > 5000),
    "little": lambda step: 2.0 + 2e-5 * step,
    "of much": lambda step: 100.0 + 9e-4 * step,
    "noise": lambda step: 2.0 + random.Random(step).random(),
}


@pytest.mark.parametrize("name", NOT_A_LEAK)
def test_memory_that_does_not_grow_steadily_is_not_told_of(name):
    assert asked(MemoryGrowth(), [using(NOT_A_LEAK[name](step)) for step in range(10_000)]) == []


def evaluated(train, evaluations):
    rows = []
    for loss, held_out in zip(train, evaluations, strict=True):
        rows += [*of_losses([loss] * 10), Seen({"eval/loss": held_out})]
    return rows


def test_evaluation_that_leaves_training_is_told_of_until_a_new_best():
    train = [3.0, 2.5, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.7, 0.6, 0.5]
    held_out = [3.1, 2.7, 2.4, 2.5, 2.6, 2.7, 2.8, 2.3, 2.2, 2.3, 2.4, 2.5]
    told = asked(EvalDivergence(), [Seen({"eval/loss": 3.5}), *evaluated(train, held_out)])
    assert [step for step, _ in told] == [60, 120]
    assert told[0][1].name == "eval_divergence"
    assert told[0][1].message == (
        "eval/loss rose in 3 evaluations in a row, to 2.7 from 2.4 at step 30, while train/loss fell to 1.4"
    )
    assert "checkpoint.keep_best" in told[0][1].advice


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ([3, 2, 2.1, 2.2, 2.3, 2.4], [3, 2, 2.2, 2.4, 2.6, 2.8]),
        ([3, 2, 1.9, 1.8, 1.7, 1.6], [3, 2, 2.2, 2.1, 2.3, 2.2]),
        ([3, 2, 1.9, 1.8, 1.7, 1.6], [3, 2, 2.02, 2.04, 2.06, 2.08]),
        ([3, 0.1, 0.05, 0.03, 0.02, 0.01], [3, 0.1, 0.11, 0.12, 0.13, 0.14]),
        ([3, 2, 1, 0.5], [3, 2, 2.5, 3]),
    ],
    ids=["training rises too", "up and down", "hardly", "of almost nothing", "two evaluations"],
)
def test_what_is_no_divergence(train, held_out):
    assert asked(EvalDivergence(), evaluated(train, held_out)) == []


def broken(make, rows, at):
    """What is told of these rows by one alert, and by two of which the second goes on from the first."""
    first, second = make(), make()
    told = asked(first, rows[:at])
    restore([second], json.loads(json.dumps(state_of([first]))))
    return asked(make(), rows), told + asked(second, rows[at:], sum(each.steps for each in rows[:at]))


@pytest.mark.parametrize("at", [1, 9, 13, 16, 19])
def test_evaluations_are_remembered_where_a_run_goes_on(at):
    held_out = [3.1, 2.7, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 2.3, 2.4]
    rows = evaluated([3.0, 2.5, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.7], held_out)
    unbroken, resumed = broken(EvalDivergence, rows, at)
    assert resumed == unbroken
    assert len(unbroken) == 1


def test_a_spike_is_not_told_again_since_the_run_went_on_within_it():
    band = SpikeDetector(LOSS)
    rows = of_losses(*[[2.0]] * 40, [7.0], [7.0], [2.0])
    first = Spikes("loss_spike", band)
    assert len(asked(first, rows[:41])) == 1
    second = Spikes("loss_spike", band)
    restore([second], state_of([first]))
    assert asked(second, rows[41:]) == []


@pytest.mark.parametrize(("place", "times"), [("8 ranks", 1), ("4 ranks", 0)], ids=["same", "other"])
def test_steps_are_held_to_those_before_where_the_run_goes_on_in_the_same_place(place, times):
    first, second = ThroughputDrop("8 ranks"), ThroughputDrop(place)
    asked(first, [timed(1.0)] * 120)
    restore([second], json.loads(json.dumps(state_of([first]))))
    assert len(asked(second, [timed(1.6)] * 200)) == times


def noisy(level, steps, scatter=0.02, seed=0):
    chance = random.Random(seed)
    return [level * math.exp(scatter * chance.gauss(0, 1)) for _ in range(steps)]


def from_the_start(losses, evaluated=None, every=5):
    """Rows of a run that was evaluated before its first step."""
    rows = [Seen({"eval/loss": evaluated})] if evaluated is not None else []
    return rows + of_losses(losses[:1], *[losses[at : at + every] for at in range(1, len(losses), every)])


# What a rate 100 times too high does, from runs: it jumps and is no better than a guess, or it stays up.
JUMPED = [2.31, 169.8, 31.1, 11.8, 4.54, 2.7, 2.39, 2.31, *noisy(2.31, 120, 0.01)]
WORSE = [5.57, 6.63, 6.42, *noisy(7.3, 125)]


@pytest.mark.parametrize("every", [1, 5, 50])
@pytest.mark.parametrize("evaluated", [None, 2.3])
def test_a_loss_that_jumps_and_comes_back_is_told_of_once_with_what_it_began_with(every, evaluated):
    ((step, event),) = asked(LossRise(), from_the_start(JUMPED, evaluated, every))
    assert 64 <= step < 64 + every
    assert event.name == "loss_rise"
    assert re.fullmatch(
        r"the loss rose: it began with 2.31, and is 2.3\d* at step 64, after 3.508 for 8 steps", event.message
    )
    assert event.fields["at_step"] == 64
    assert "lower optimizer.learning_rate, raise schedule.warmup" in event.advice


def test_a_loss_that_is_worse_than_at_first_is_told_of_however_late():
    ((step, _),) = asked(LossRise(), from_the_start(WORSE))
    assert step == 66
    ((_, event),) = asked(LossRise(), from_the_start([*noisy(5.5, 300), *noisy(7.3, 100)]))
    assert event.fields["at_step"] == 384
    assert " after " not in event.message


def test_a_high_jump_is_told_of_whatever_comes_then():
    falls = [5.5 * 0.99**step for step in range(100)]
    ((_, event),) = asked(LossRise(), from_the_start([5.5, *[7.5] * 10, *falls], 5.5))
    assert event.message.endswith(", and is 3.811 at step 64, after 7.5 for 8 steps")
    assert asked(LossRise(), from_the_start([5.5, *[6.0] * 10, *falls], 5.5)) == []  # no high one
    assert asked(LossRise(), from_the_start([5.5, *[7.5] * 5, *falls], 5.5)) == []  # no long one


FALLING = {
    "as it should": [5.5 * 0.99**step for step in range(600)],
    "hardly": [1.5 * 0.9999**step for step in range(600)],
    "a bad batch": [5.5, 50.0, 5.5, *noisy(5.5, 600)],
    "of nothing": [0.0] * 600,
    "below 0": [-5.5] * 600,
    "not known at first": [math.nan, *[5.5] * 600],
}


@pytest.mark.parametrize("name", FALLING)
def test_a_loss_that_does_not_rise_is_not_told_of(name):
    assert asked(LossRise(), from_the_start(FALLING[name])) == []


@pytest.mark.parametrize("is_evaluated", [True, False])
@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.4])
def test_a_loss_that_scatters_and_does_not_fall_is_not_told_of(scatter, is_evaluated):
    """As in fine-tuning with few samples a step: many curves, in none of which the first batch is normal."""
    for seed in range(500):
        losses = noisy(1.5, 320, scatter, seed)
        assert asked(LossRise(), from_the_start(losses, 1.5 if is_evaluated else None)) == []


@pytest.mark.parametrize("at", [1, 3, 9, 13])
@pytest.mark.parametrize("losses", [JUMPED, WORSE], ids=["jumped", "worse"])
def test_what_the_loss_began_with_is_remembered_where_a_run_goes_on(losses, at):
    unbroken, resumed = broken(LossRise, from_the_start(losses, losses[0]), at)
    assert resumed == unbroken
    assert len(unbroken) == 1


def test_a_run_that_goes_on_without_what_it_began_with_is_told_nothing():
    assert asked(LossRise(), of_losses(*[[each] for each in WORSE]), step=1000) == []
