"""A curve tells the truth at any size: smoothed over all rows first, thinned then."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.monitoring.report.runs import FLAT_SPREAD, MAX_POINTS, SMOOTHING_WEIGHTS, build_curve

SIZES = [1, 5, MAX_POINTS, MAX_POINTS + 1, 5000, 40_123]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def curve(values, **how):
    """A column at steps 0, 1, ..."""
    steps = np.arange(len(values), dtype=float)
    made = build_curve(np.array([steps, steps * 10, steps / 100, values]), **how)
    assert made.axes.shape[1] == made.lines.shape[1] <= MAX_POINTS
    assert (np.diff(made.axes[0]) > 0).all(), "in the order of the file"
    assert made.axes[0, [0, -1]].tolist() == [0, len(values) - 1], "as long as the record"
    return made


def averages(values, weight):
    """The moving average at each value, as its definition says, step by step."""
    found = []
    total = 0.0
    norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        found.append(total / norm)
    return np.array(found)


@pytest.mark.parametrize("size", SIZES)
def test_smoothing_is_that_of_the_whole_record(rng, size):
    values = 3 * np.exp(-np.arange(size) / 1000) + rng.normal(size=size)
    made = curve(values)
    rows = made.axes[0].astype(int)
    for weight, line in zip(SMOOTHING_WEIGHTS, made.lines[1:], strict=True):
        np.testing.assert_allclose(line, averages(values, weight)[rows], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", SIZES[:3])
def test_a_short_curve_is_whole(rng, size):
    values = rng.normal(size=size)
    made = curve(values)
    assert made.lines[0].tolist() == values.tolist()
    assert made.lowest.size == made.highest.size == 0, "each row is a point"


def test_a_step_time_with_rare_stalls_is_the_usual_one_and_stalls_are_seen(rng):
    values = rng.normal(0.52, 0.01, 200_000)
    stalled = rng.random(200_000) < 0.002
    values[stalled] = 2.8
    values[123_456] = 31.0
    made = curve(values, has_stalls=True)
    assert np.abs(made.lines[0] - 0.52).max() < 0.01
    assert made.highest.max() == 31.0
    bins = np.flatnonzero(stalled) // 200
    assert (made.highest[bins] >= 2.8).all()
    assert made.usual[1] < 3, "31 s is beyond it"


@pytest.mark.parametrize("size", SIZES[3:])
def test_extremes_and_what_is_not_finite_are_kept(rng, size):
    values = rng.normal(size=size)
    spikes = {100: 90.0, 501: -70.0}
    lost = {30: math.nan, 31: math.inf, 700: -math.inf}
    for row, value in (spikes | lost).items():
        values[row] = value
    made = curve(values)
    assert (np.nanmin(made.lowest), np.nanmax(made.highest)) == (-70.0, 90.0)
    assert made.extremes == [(-70.0, 501.0), (90.0, 100.0)]
    assert sum(made.not_finite.values()) == len(lost)
    width = -(-size // MAX_POINTS)
    assert set(made.not_finite) == {row // width for row in lost}
    whole = [at for at, number in made.not_finite.items() if number == width]
    assert np.isnan(made.lines[:, whole]).all()
    assert np.isfinite(np.delete(made.lines, whole, axis=1)).all(), "one lost row takes no others with it"


def test_what_is_not_finite_is_a_gap_and_counts_in_no_average():
    made = curve(np.array([1.0, math.nan, 3.0, math.inf]))
    np.testing.assert_equal(made.lines[0], [1.0, math.nan, 3.0, math.nan])
    expected = averages([1.0, 3.0], SMOOTHING_WEIGHTS[1])
    np.testing.assert_allclose(made.lines[2], [expected[0], math.nan, expected[1], math.nan], rtol=1e-6)
    assert made.not_finite == {1: 1, 3: 1}
    assert math.isinf(made.last)


@pytest.mark.parametrize("size", [1, 3000])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_curve_without_a_finite_value(size, value):
    made = curve(np.full(size, value))
    assert np.isnan(made.lines).all()
    assert (made.usual, made.extremes, sum(made.not_finite.values())) == ([], [], size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0.1, 0.0, -1e-3, 3e9])
def test_a_constant_is_one(rng, size, value):
    made = curve(value * (1 + rng.choice([0, 2e-16, -2e-16], size)))
    lines = made.lines if size > MAX_POINTS else made.lines[1:]
    assert len(np.unique(lines)) == 1
    assert made.usual[1] - made.usual[0] <= FLAT_SPREAD * abs(value)


@pytest.mark.parametrize("size", [20, 600, 200_000])
def test_a_spike_does_not_stretch_the_range_and_a_steep_start_is_in_it(rng, size):
    values = 2 + 9 * np.exp(-np.arange(size) / (size / 50 + 2)) + rng.normal(0, 0.02, size)
    expected = curve(values).usual
    assert expected[0] < 2.05
    assert expected[1] > 10
    values[size // 2] = 1e4
    made = curve(values)
    assert made.usual == pytest.approx(expected, abs=0.3)
    assert made.extremes[1] == (1e4, size // 2)
