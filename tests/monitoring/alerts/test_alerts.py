"""Answers of each alert to made-up rows: when it fires, how often, and when it does not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.monitoring.alerts import RowDetails, collect_alert_state, restore_alerts
from pipeline.monitoring.alerts.rules import (
    CALM_STEPS,
    GRAD_NORM_THRESHOLD,
    LOSS_THRESHOLD,
    DataStarvation,
    EvalDivergence,
    LossRise,
    MemoryGrowth,
    NonFiniteAlert,
    NonFiniteEval,
    SpikeAlert,
    SpikeDetector,
    ThroughputDrop,
    report_no_targets,
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
    return [RowDetails({"train/loss": row[-1]}, row, [1.0] * len(row), [False] * len(row)) for row in rows]


def timed(seconds, data=0.0, steps=1, **own):
    return RowDetails({}, [1.0] * steps, per_rank={"step": [seconds], "data": [data]} | own)


def skipping(skipped, scale=None, loss=1.0):
    row = {"train/loss": loss} | ({} if scale is None else {"train/loss_scale": scale})
    return RowDetails(row, [loss] * len(skipped), [1.0] * len(skipped), skipped)


def held_out(**values):
    return RowDetails({f"eval/{name.replace('_', '/')}": value for name, value in values.items()})


def evaluated(train, evaluations):
    rows = []
    for loss, evaluation in zip(train, evaluations, strict=True):
        rows += [*of_losses([loss] * 10), RowDetails({"eval/loss": evaluation})]
    return rows


def using(gib, kind="host"):
    return RowDetails({}, [1.0], per_rank={kind: gib if isinstance(gib, list) else [gib]})


def noisy(level, steps, scatter=0.02, seed=0):
    chance = random.Random(seed)
    return [level * math.exp(scatter * chance.gauss(0, 1)) for _ in range(steps)]


def from_the_start(losses, evaluated=None, every=5):
    """Rows of a run that was evaluated before its first step."""
    rows = [RowDetails({"eval/loss": evaluated})] if evaluated is not None else []
    return rows + of_losses(losses[:1], *[losses[at : at + every] for at in range(1, len(losses), every)])


def losses():
    return SpikeAlert("loss_spike", SpikeDetector(LOSS_THRESHOLD))


def norms():
    return SpikeAlert("grad_norm_spike", SpikeDetector(GRAD_NORM_THRESHOLD))


def busy_now_and_then():
    chance = random.Random(0)
    rows = [timed(chance.choice([1.0, 1.0, 1.1, 4.0])) for _ in range(3000)]
    rows[1000:1080] = [timed(5.0)] * 10  # and once all of it, for a minute
    return rows


NAN = math.nan
INF = math.inf
CALM_ROWS = of_losses(*[[2.0]] * 40)
FAST = [timed(1.0)] * 120
SLOW = [timed(1.6)] * 200
CROWDED = [timed(9.0, 3.0, load=[4.0])] * 200
TRAIN = [3.0, 2.5, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.7, 0.6, 0.5]
HELD_OUT = [3.1, 2.7, 2.4, 2.5, 2.6, 2.7, 2.8, 2.3, 2.2, 2.3, 2.4, 2.5]
# What a rate 100 times too high does, from runs: it jumps and is no better than a guess, or it stays up.
JUMPED = [2.31, 169.8, 31.1, 11.8, 4.54, 2.7, 2.39, 2.31, *noisy(2.31, 120, 0.01)]
WORSE = [5.57, 6.63, 6.42, *noisy(7.3, 125)]
FALLS = [5.5 * 0.99**step for step in range(100)]

TOLD: dict[str, tuple[Callable[[], Any], list[RowDetails], list[tuple[int, str]]]] = {
    "a spike between two rows": (
        losses,
        of_losses(*[[2.0] * 10] * 5, [2.0, 2.0, 7.0, 6.0, *[2.0] * 6], [2.0] * 10),
        [(60, "loss_spike: the loss of step 53 is 7, 3.5 times its normal level")],
    ),
    "a spike soon after another": (
        losses,
        CALM_ROWS + of_losses([7.0], *[[2.0]] * (CALM_STEPS - 1), [7.0]),
        [(41, "loss_spike: the loss of step 41 is 7")],
    ),
    "a spike long after another": (
        losses,
        CALM_ROWS + of_losses([7.0], *[[2.0]] * CALM_STEPS, [7.0]),
        [(41, "loss_spike: "), (42 + CALM_STEPS, "loss_spike: ")],
    ),
    "a new level": (losses, CALM_ROWS + of_losses(*[[7.0]] * 300), [(41, "loss_spike: ")]),
    "a spike of the norm": (
        norms,
        [RowDetails({}, [2.0], [0.5 if step < 50 else 9.0]) for step in range(51)],
        [(51, "grad_norm_spike: the gradient norm of step 51 is 9, 18.0 times")],
    ),
    "no norms": (norms, [RowDetails({}, [2.0])] * 50, []),
    "steps without a target": (
        lambda: report_no_targets,
        [
            RowDetails({}, [1.0] * 3, target_counts=[4.0, 0.5, 1.0]),
            RowDetails({}, [1.0, 0.0, 0.0], target_counts=[2.0, 0.0, 0.0]),
            RowDetails({"eval/loss": 0.0}),
        ],
        [(6, "no_targets: no target counts in the global batch of 2 of 3 steps, ")],
    ),
    "skipped steps": (
        lambda: NonFiniteAlert(None),
        [skipping([True, False, True]), skipping([False] * 3)],
        [(3, "non_finite: steps 1, 3 skipped: the gradient was")],
    ),
    "the lowest loss scale": (
        lambda: NonFiniteAlert(1.0),
        [skipping([True, False, True], 1.0)],
        [(3, "loss_scale_floor: steps 1, 3 skipped: the gradient was")],
    ),
    "a loss that is none beside a gradient": (
        lambda: NonFiniteAlert(None),
        [skipping([False, False], loss=NAN)],
        [(2, "non_finite: the loss of steps 1 to 2 is infinite or NaN")],
    ),
    "a loss that is none is no search for a scale": (
        lambda: NonFiniteAlert(1.0),
        [skipping([False, True, True], 64.0, loss=NAN)],
        [(3, "non_finite: steps 2 to 3 skipped: ")],
    ),
    "an evaluation that is not finite, until it is again": (
        NonFiniteEval,
        [
            held_out(loss=1.0, a_loss=2.0),
            *[held_out(loss=NAN, a_loss=2.0), RowDetails({"train/loss": NAN}, [NAN])] * 2,
            *[held_out(loss=NAN, a_loss=INF)] * 2,
            held_out(loss=1.0, a_loss=2.0),
            held_out(loss=NAN, a_loss=2.0),
        ],
        [
            (0, "non_finite_eval: the evaluation after step 0 gave eval/loss: "),
            (2, "non_finite_eval: the evaluation after step 2 gave eval/a/loss, "),
            (2, "non_finite_eval: the evaluation after step 2 gave eval/loss: "),
        ],
    ),
    "an evaluation without a target": (
        NonFiniteEval,
        [held_out(loss=NAN, targets=0.0, perplexity=NAN), held_out(loss=NAN, a_loss=NAN, a_targets=0.0)],
        [(0, "non_finite_eval: the evaluation after step 0 gave eval/loss: ")],
    ),
    "waiting for data": (
        lambda: DataStarvation(0),
        [timed(5.0, 4.0), *[timed(0.1, 0.03)] * 80],  # workers start
        [(31, "data_starvation: waiting for data is 30% of the step (30 of")],
    ),
    "waiting for data that passes": (
        lambda: DataStarvation(0),
        [timed(1.0), *([timed(1.0, 0.5)] * 20 + [timed(1.0)] * 10) * 30],
        [],
    ),
    "a tenth of waiting": (lambda: DataStarvation(0), [timed(0.1, 0.009, 20)] * 5, []),
    "a short wait": (lambda: DataStarvation(0), [timed(0.001, 0.0009, 20)] * 5, []),
    "waiting on a CPU that others use": (lambda: DataStarvation(0), [*FAST, *CROWDED], []),
    "steps that stay slow": (
        ThroughputDrop,
        [*FAST, *SLOW],
        [(201, "throughput_drop: steps take 1.6 times as long as they did (1600 ms, ")],
    ),
    "steps that recover between": (
        ThroughputDrop,
        [*FAST, *SLOW, *FAST, *SLOW],
        [(201, "throughput_drop: "), (521, "throughput_drop: ")],
    ),
    "slow steps that wait for data": (
        ThroughputDrop,
        [timed(1.0)] * 120 + [timed(3.0, 2.0)] * 200,
        [(201, "throughput_drop: steps take 3.0 times as long as they did (3000 ms, ")],
    ),
    "a minute of other work on the machine": (ThroughputDrop, busy_now_and_then(), []),
    "slow on a CPU that others use": (ThroughputDrop, [*FAST, *CROWDED], []),
    "the first row is the compiler's": (ThroughputDrop, [timed(1e-6), *[timed(1.0)] * 500], []),
    "evaluation leaves training, until a new best": (
        EvalDivergence,
        [RowDetails({"eval/loss": 3.5}), *evaluated(TRAIN, HELD_OUT)],
        [
            (60, "eval_divergence: eval/loss rose in 3 evaluations in a row, to 2.7 from 2.4"),
            (120, "eval_divergence: "),
        ],
    ),
    "evaluations that are not finite between": (
        EvalDivergence,
        [
            row
            for at, loss in enumerate([NAN, 2.0, 1.0, 1.5, INF, 2.0, 3.0])
            for row in (RowDetails({}, [9.0 - at, NAN]), held_out(loss=loss))
        ],
        [(14, "eval_divergence: ")],
    ),
    "a loss that is worse than at first": (
        LossRise,
        from_the_start(WORSE),
        [(66, "loss_rise: the loss rose")],
    ),
    "a loss that rises late": (
        LossRise,
        from_the_start([*noisy(5.5, 300), *noisy(7.3, 100)]),
        [
            (
                386,
                "loss_rise: the loss rose: it began with 5.605, and the median of the last 32 losses "
                "is 7.248 at step 384; ",
            )
        ],
    ),
    "a high jump, whatever comes then": (
        LossRise,
        from_the_start([5.5, *[7.5] * 10, *FALLS], 5.5),
        [
            (
                66,
                "loss_rise: the loss rose: it began with 5.5, and the median of the last 32 losses "
                "is 3.811 at",
            )
        ],
    ),
    "no high jump": (LossRise, from_the_start([5.5, *[6.0] * 10, *FALLS], 5.5), []),
    "no long jump": (LossRise, from_the_start([5.5, *[7.5] * 5, *FALLS], 5.5), []),
    "a loss without its beginning": (
        LossRise,
        [RowDetails({}, [], per_rank={}), *of_losses([NAN], *[[7.3]] * 200)],
        [],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_an_alert_tells_of_rows(name):
    make, rows, expected = TOLD[name]
    told = asked(make(), rows)
    assert [step for step, _ in told] == [step for step, _ in expected]
    for (_, event), (_, said) in zip(told, expected, strict=True):
        assert f"{event.name}: {event.line}".startswith(said)
        assert event.level == "warning"
        assert event.advice


def test_the_fields_of_alerts():
    ((_, spike),) = asked(losses(), TOLD["a spike between two rows"][1])
    assert spike.fields == {"at_step": 53, "value": 7.0, "normal": 2.0, "limit": pytest.approx(3.0)}
    ((_, untargeted),) = asked(report_no_targets, TOLD["steps without a target"][1])
    assert untargeted.fields == {"at_step": 5, "steps": 3}
    assert NonFiniteAlert(None)(3, skipping([True, False, True])).fields["skipped"] == 2
    ((_, starved),) = asked(DataStarvation(4), [timed(1.0, 0.5, 20)] * 4)
    assert starved.line.endswith("loader.num_workers=8")


def test_in_fp16_skipped_steps_of_a_finite_loss_are_news():
    event = NonFiniteAlert(1.0)(3, skipping([True, False, True], 64.0))
    assert (event.name, event.level) == ("non_finite", "info")
    assert event.message.endswith("NaN; the fp16 loss scale is now 64")


@pytest.mark.parametrize("kind", ["host", "device"])
def test_memory_that_grows_is_told_of_once_with_its_rank(kind):
    rows = [using([2.0, 2.0 + 0.01 * step], kind) for step in range(400)]
    ((_, event),) = asked(MemoryGrowth(), rows)
    what = {"host": "process", "device": "device"}[kind]
    assert (event.name, event.fields["rank"]) == ("memory_growth", 1)
    assert event.message.startswith(f"the {what}'s memory of rank 1 grows: ")


MEMORY = {
    "a slow leak": (1, lambda step: 2.0 + 1e-4 * step + 0.05 * (step % 2)),
    "a leak that begins late": (1, lambda step: 2.0 + max(0, step - 3000) * 1e-3),
    "it settles": (0, lambda step: 2.0 + 3.0 * (1 - math.exp(-step / 150))),
    "it comes and goes": (0, lambda step: 2.0 + 1.5 * math.sin(step / 40)),
    "steps": (0, lambda step: 2.0 + 0.5 * (step > 100) + 0.5 * (step > 2000) + 0.5 * (step > 5000)),
    "little": (0, lambda step: 2.0 + 2e-5 * step),
    "of much": (0, lambda step: 100.0 + 9e-4 * step),
    "noise": (0, lambda step: 2.0 + random.Random(step).random()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_only_memory_that_grows_steadily_is_told_of(name):
    times, gib = MEMORY[name]
    assert len(asked(MemoryGrowth(), [using(gib(step)) for step in range(10_000)])) == times


@pytest.mark.parametrize(
    ("train", "evaluations"),
    [
        ([3, 2, 2.1, 2.2, 2.3, 2.4], [3, 2, 2.2, 2.4, 2.6, 2.8]),
        ([3, 2, 1.9, 1.8, 1.7, 1.6], [3, 2, 2.2, 2.1, 2.3, 2.2]),
        ([3, 2, 1.9, 1.8, 1.7, 1.6], [3, 2, 2.02, 2.04, 2.06, 2.08]),
        ([3, 0.1, 0.05, 0.03, 0.02, 0.01], [3, 0.1, 0.11, 0.12, 0.13, 0.14]),
        ([3, 2, 1, 0.5], [3, 2, 2.5, 3]),
    ],
    ids=["training rises too", "up and down", "hardly", "of almost nothing", "two evaluations"],
)
def test_what_is_no_divergence(train, evaluations):
    assert asked(EvalDivergence(), evaluated(train, evaluations)) == []


@pytest.mark.parametrize("every", [1, 5, 50])
@pytest.mark.parametrize("evaluation", [None, 2.3])
def test_a_loss_that_jumps_and_comes_back_is_told_of_once_with_what_it_began_with(every, evaluation):
    ((step, event),) = asked(LossRise(), from_the_start(JUMPED, evaluation, every))
    assert 64 <= step < 64 + every
    began = "the loss rose: it began with 2.31, and the median of the last 32 losses is 2.3"
    assert event.message.startswith(began)
    assert event.message.endswith(" at step 64, after 3.508 for 8 steps")
    assert event.fields["at_step"] == 64


FALLING = {
    "as it should": [5.5 * 0.99**step for step in range(600)],
    "hardly": [1.5 * 0.9999**step for step in range(600)],
    "a bad batch": [5.5, 50.0, 5.5, *noisy(5.5, 600)],
    "of nothing": [0.0] * 600,
    "below 0": [-5.5] * 600,
    "not known at first": [NAN, *[5.5] * 600],
}


@pytest.mark.parametrize("name", FALLING)
def test_a_loss_that_does_not_rise_is_not_told_of(name):
    assert asked(LossRise(), from_the_start(FALLING[name])) == []


@pytest.mark.slow
@pytest.mark.daily("0.02-True", "0.4-False")
@pytest.mark.parametrize("is_evaluated", [True, False])
@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.4])
def test_a_loss_that_scatters_and_does_not_fall_is_not_told_of(scatter, is_evaluated):
    """Many curves as in fine-tuning with few samples a step, none of which begins with a normal batch."""
    for seed in range(500):
        curve = noisy(1.5, 320, scatter, seed)
        assert asked(LossRise(), from_the_start(curve, 1.5 if is_evaluated else None)) == []


@pytest.mark.parametrize("at", [1, 3, 9, 13, 16])
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (EvalDivergence, evaluated(TRAIN[:10], [3.1, 2.7, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 2.3, 2.4])),
        (LossRise, from_the_start(JUMPED, JUMPED[0])),
        (LossRise, from_the_start(WORSE, WORSE[0])),
    ],
    ids=["evaluations", "a jump", "a rise"],
)
def test_a_run_that_goes_on_is_told_what_the_unbroken_one_is(make, rows, at):
    unbroken = make()
    first = make()
    second = make()
    told = asked(first, rows[:at])
    restore_alerts([second], json.loads(json.dumps(collect_alert_state([first]))))
    told += asked(second, rows[at:], sum(each.steps for each in rows[:at]))
    assert told == asked(unbroken, rows)
    assert len(told) == 1


def test_a_spike_is_not_told_again_since_the_run_went_on_within_it():
    detector = SpikeDetector(LOSS_THRESHOLD)
    rows = of_losses(*[[2.0]] * 40, [7.0], [7.0], [2.0])
    first = SpikeAlert("loss_spike", detector)
    second = SpikeAlert("loss_spike", detector)
    assert len(asked(first, rows[:41])) == 1
    restore_alerts([second], collect_alert_state([first]))
    assert asked(second, rows[41:]) == []


def test_a_run_that_goes_on_without_what_it_began_with_is_told_nothing():
    assert asked(LossRise(), of_losses(*[[each] for each in WORSE]), step=1000) == []
