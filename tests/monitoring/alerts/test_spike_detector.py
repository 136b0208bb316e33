"""The band of what is normal: quiet on what losses and norms are like, and not on what they are not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.monitoring.alerts.rules import (
    GRAD_NORM_THRESHOLD,
    LOSS_THRESHOLD,
    MIN_VALUES,
    NEW_LEVEL_SPIKES,
    SPIKE_WINDOW,
    SpikeDetector,
)

# Losses and gradient norms of real small runs without a fault, as 1000 times their logarithms: the shipped
# recipes, WSD, restarted and triangular rates, batches of 1 to 4 rows, noisy labels, preferences, a few
# targets a batch, several sources, rates near instability, and models that learn by heart.
CURVES = dict(np.load(Path(__file__).with_name("curves.npz")))
FAST_LEARNERS = [
    "recipe digits_cnn",
    "digits cnn lr0.001 b64 warm20",
    "digits cnn lr0.001 b256 warm1",
    "digits mlp wsd",
]
STEPS = np.arange(10_000)
FALLING = 2.0 + 8.0 * np.exp(-STEPS / 60) + 1.5 * np.exp(-STEPS / 1500)
RISING = 0.8 + 2.0 * (1 - np.exp(-STEPS / 150))


def per_sample(rng, tail, samples):
    """The mean of a batch of samples whose losses have a long tail."""
    return np.exp(rng.normal(-(tail**2) / 2, tail, (len(STEPS), samples))).mean(axis=1)


SERIES = {
    "narrow": lambda rng: FALLING * np.exp(rng.normal(0, 0.02, len(STEPS))),
    "small batches": lambda rng: FALLING * np.exp(rng.normal(0, 0.12, len(STEPS))),
    "long tails": lambda rng: FALLING * per_sample(rng, 0.8, 8),
    "single samples": lambda rng: FALLING * per_sample(rng, 0.6, 1),
    "student": lambda rng: FALLING * (1 + 0.03 * rng.standard_t(4, len(STEPS))),
    "a hard source": lambda rng: FALLING * np.where(rng.random(len(STEPS)) < 0.2, 2.5, 1.0),
    "learned by heart": lambda rng: (
        2.3 * np.exp(-STEPS / 300 + rng.normal(0, 2, len(STEPS)) * np.minimum(1, STEPS / 2000))
    ),
    "epochs": lambda rng: (2.5 - 0.3 * (STEPS // 700)).clip(0.3) * np.exp(rng.normal(0, 0.05, len(STEPS))),
    "constant": lambda rng: np.full(len(STEPS), 1.7),
    "nothing": lambda rng: np.zeros(len(STEPS)),
    "negative": lambda rng: rng.normal(-1, 0.3, len(STEPS)),
    "either sign": lambda rng: rng.normal(0.02, 0.3, len(STEPS)),
}
NORMS = {
    "growing": lambda rng: RISING * np.exp(rng.normal(0, 0.1, len(STEPS))),
    "gamma": lambda rng: RISING * rng.gamma(4, 0.25, len(STEPS)),
    "student": lambda rng: RISING * np.exp(0.1 * rng.standard_t(5, len(STEPS)).clip(-12, 12)),
    "clipped to nothing": lambda rng: np.exp(rng.normal(-9, 2.5, len(STEPS))),
}


def spikes(band, values):
    return [index for index, value in enumerate(values) if band.add(float(value))]


@pytest.mark.slow
@pytest.mark.daily("small batches", "long tails", "a hard source", "constant", "either sign")
@pytest.mark.parametrize("name", SERIES)
def test_no_loss_of_10_000_clean_steps_is_a_spike(name):
    assert spikes(SpikeDetector(LOSS_THRESHOLD), SERIES[name](np.random.default_rng(0))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
def test_no_step_of_a_real_run_is_a_spike(name):
    losses, norms = np.exp(CURVES[name] / 1000)
    assert spikes(SpikeDetector(LOSS_THRESHOLD), losses) == []
    assert spikes(SpikeDetector(GRAD_NORM_THRESHOLD), norms) == []


@pytest.mark.parametrize("name", FAST_LEARNERS)
def test_a_rise_to_the_first_loss_stands_out_in_a_real_run(name):
    losses = np.exp(CURVES[name][0, :300] / 1000)
    band = SpikeDetector(LOSS_THRESHOLD)
    told = []
    for step, loss in enumerate(losses.tolist(), 1):
        if step >= 20 and losses[step - 9 : step - 1].max() < 0.6 * losses[0]:
            told.append(losses[0] > band.limit)
        band.add(loss)
    assert len(told) > 200
    assert all(told)


@pytest.mark.slow
@pytest.mark.daily("growing", "gamma", "clipped to nothing")
@pytest.mark.parametrize("name", [*SERIES, *NORMS])
def test_no_norm_of_10_000_clean_steps_is_a_spike(name):
    assert spikes(SpikeDetector(GRAD_NORM_THRESHOLD), (SERIES | NORMS)[name](np.random.default_rng(0))) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reach", "name", "times"),
    [
        (LOSS_THRESHOLD, "narrow", 1.6),
        (LOSS_THRESHOLD, "small batches", 3.0),
        (LOSS_THRESHOLD, "epochs", 2.0),
        (GRAD_NORM_THRESHOLD, "growing", 20),
    ],
)
@pytest.mark.parametrize("at", [400, 2000])
def test_what_stands_out_is_a_spike(reach, name, times, at):
    values = (SERIES | NORMS)[name](np.random.default_rng(0))[: at + 50]
    values[at] *= times
    assert spikes(SpikeDetector(reach), values) == [at]


def test_a_new_level_becomes_normal():
    values = [1.0] * 40 + [5.0] * 100 + [25.0]
    band = SpikeDetector(LOSS_THRESHOLD)
    assert spikes(band, values) == [*range(40, 40 + NEW_LEVEL_SPIKES), 140]
    assert band.normal_level == 5.0


def test_a_good_value_between_spikes_keeps_the_band():
    band = SpikeDetector(LOSS_THRESHOLD)
    assert len(spikes(band, [1.0] * 40 + ([5.0] * (NEW_LEVEL_SPIKES - 1) + [1.0]) * 4)) == 4 * (
        NEW_LEVEL_SPIKES - 1
    )


def test_nothing_is_a_spike_at_first_nor_what_is_not_finite():
    band = SpikeDetector(LOSS_THRESHOLD)
    assert spikes(band, [1.0] * (MIN_VALUES - 1) + [100.0]) == []
    assert spikes(band, [math.nan, math.inf, -math.inf]) == []
    assert band.limit < 2.0  # and none of them was taken in


@pytest.mark.slow
@pytest.mark.daily("exponential-40-14", "power-127-10")
@pytest.mark.parametrize(("at", "deviations"), [(MIN_VALUES, 20), (24, 20), (40, 14), (80, 10), (127, 10)])
@pytest.mark.parametrize("fall", ["exponential", "power"])
def test_a_spike_stands_out_while_the_loss_falls(at, deviations, fall):
    """A rise to the first loss is a spike from step 20 on, and so is a jump of so many deviations."""
    steps = np.arange(200)
    curve = 0.002 + 10.7 * np.exp(-steps / 15) if fall == "exponential" else 10.7 / (1 + steps)
    for seed in range(10):
        values = curve * np.exp(np.random.default_rng(seed).normal(0, 0.06, len(steps)))
        level = np.median(values[at - 5 : at])
        floor = 0.26 * np.median(values[:MIN_VALUES])
        for height in (values[0], max(level * math.exp(deviations * 0.06), floor)):
            assert spikes(SpikeDetector(LOSS_THRESHOLD), [*values[:at], height, *values[at:]]) == [at], (
                seed,
                height,
            )


@pytest.mark.parametrize("name", ["small batches", "narrow"])
def test_ten_deviations_above_a_steady_loss_are_a_spike_at_any_step_from_20_on(name):
    band = SpikeDetector(LOSS_THRESHOLD)
    told = []
    deviation = {"small batches": 0.12, "narrow": 0.05}[name]
    values = 2.0 * np.exp(np.random.default_rng(3).normal(0, deviation, 1000))
    for step, value in enumerate(values.tolist(), 1):
        if step >= 20:
            told.append(2.0 * math.exp(10 * deviation) > band.limit)
        band.add(value)
    assert np.mean(told[30:]) > 0.97
    assert np.mean(told[:30]) > 0.8


def test_a_small_loss_may_rise_far_below_the_first_losses():
    band = SpikeDetector(LOSS_THRESHOLD)
    falling = (0.002 + 10.7 * np.exp(-np.arange(120) / 8)).tolist()
    assert spikes(band, [*falling, 0.02, 10.7]) == [121]


def test_a_loss_that_became_0_still_has_spikes_and_a_negative_one_has_none():
    assert spikes(SpikeDetector(LOSS_THRESHOLD), [2.0] * 40 + [0.0] * 40 + [3.0]) == [80]
    assert spikes(SpikeDetector(LOSS_THRESHOLD), [2.0] * 40 + [-1.0] * 40 + [3.0]) == []
    assert spikes(SpikeDetector(LOSS_THRESHOLD), [0.0] * 40 + [3.0]) == []


def test_it_goes_on_from_a_checkpoint():
    values = SERIES["small batches"](np.random.default_rng(1))[:300]
    values[[200, 230, 231, 260]] *= 6
    whole = SpikeDetector(LOSS_THRESHOLD)
    first = SpikeDetector(LOSS_THRESHOLD)
    expected = spikes(whole, values)
    assert expected == [200, 230, 231, 260]
    found = spikes(first, values[:231])
    second = SpikeDetector(LOSS_THRESHOLD)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [231 + index for index in spikes(second, values[231:])] == expected
    assert second.state_dict() == whole.state_dict()
    assert len(second.state_dict()["values"]) == SPIKE_WINDOW
