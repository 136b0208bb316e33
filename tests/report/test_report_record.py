"""A record as it is read: whatever its length nothing that stands out is lost, and nothing is made up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.recorded import event, row

from pipeline.report.record import MOST_EVENTS, MOST_POINTS, read_record, thin
from pipeline.sinks.jsonl import MetricsFileError


def thinned(values):
    """{step: value} of what stays of a curve whose steps are 0, 1, ..."""
    steps = np.arange(len(values), dtype=float)
    kept = thin(np.array([steps, steps * 10, steps / 100, values]))
    assert kept.shape[1] <= MOST_POINTS
    assert (np.diff(kept[0]) > 0).all(), "in the order of the file"
    return dict(zip(kept[0].astype(int).tolist(), kept[3].tolist(), strict=True))


def test_a_short_curve_is_whole():
    values = np.random.default_rng(0).normal(size=MOST_POINTS)
    assert list(thinned(values).values()) == values.tolist()


@pytest.mark.parametrize("size", [MOST_POINTS + 1, 5000, 40_000, 40_123])
def test_a_long_curve_keeps_every_spike_its_ends_and_what_is_not_finite(size):
    values = np.random.default_rng(1).normal(size=size)
    spikes = {1234: 90.0, 1500: -70.0, 1999: math.nan, 1003: math.inf}
    for place, value in spikes.items():
        values[place] = value
    kept = thinned(values)
    assert {0, size - 1, *spikes} <= set(kept)
    assert all(values[step] == value or math.isnan(value) for step, value in kept.items())
    width = -(-size // (MOST_POINTS // 5))
    for start in range(0, size, width):
        finite = values[start : start + width][np.isfinite(values[start : start + width])]
        shown = [
            kept[step] for step in range(start, start + width) if math.isfinite(kept.get(step, math.nan))
        ]
        assert (min(shown), max(shown)) == (finite.min(), finite.max())


@pytest.mark.parametrize("value", [3.0, math.nan, -math.inf])
def test_a_curve_of_one_value(value):
    np.testing.assert_equal(set(map(str, thinned(np.full(30_000, value)).values())), {str(value)})


def test_rows_of_other_keys_keep_their_place(make_run):
    lines = [
        row(step) | ({"perf/checkpoint_stall_seconds": 2.0} if step % 7 == 0 else {})
        for step in range(1, 2000)
    ]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    assert record.curves["train/loss"][0].tolist() == list(range(1, 2000))
    assert record.curves["perf/checkpoint_stall_seconds"][0].tolist() == list(range(7, 2000, 7))


def test_axes_and_where_the_time_went(make_run):
    clocks = [
        {"perf/elapsed_seconds": 36.0 * n, "time/forward_seconds": 30.0, "time/generation_seconds": 0.0}
        for n in (1, 2)
    ]
    lines = [
        {"step": 0, "eval/loss": 9.0},
        row(10) | clocks[0],
        row(20) | clocks[1],
        {"step": 20, "eval/loss": 4.0},
    ]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    assert record.curves["eval/loss"].T.tolist() == [[0, 0, 0, 9.0], [20, 20_000, 0.02, 4.0]]
    assert record.phases == {"forward": 60.0, "start, end, steps undone": 12.0}
    ended = read_record(
        make_run("ended", [*lines, event(20, "time", elapsed_seconds=80.5)]) / "metrics.jsonl"
    )
    assert (ended.seconds, ended.phases["start, end, steps undone"]) == (80.5, 20.5)


def test_events_are_beside_the_curves(make_run):
    lines = [row(1), event(1), event(1, "sample", prompt="a", text="b"), row(2, loss="NaN")]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    assert [each["event"] for each in record.events] == ["loss_spike"]
    assert record.events[0]["place"] == (1, 1000, 0.0)
    assert record.samples[0]["prompt"] == "a"
    assert math.isnan(record.curves["train/loss"][3, 1])


def test_of_many_events_the_first_and_the_last_stay(make_run):
    record = read_record(make_run(lines=[event(step) for step in range(1000)]) / "metrics.jsonl")
    steps = [each["step"] for each in record.events]
    assert (record.num_left_out, len(steps)) == (1000 - MOST_EVENTS, MOST_EVENTS)
    assert steps == [*range(MOST_EVENTS // 2), *range(1000 - MOST_EVENTS // 2, 1000)]


@pytest.mark.parametrize(
    "damaged", [b"{", b"[1]\n", b'{"step": "a"}\n', b'{"step": 1, "train/loss": {}}\n', b"\xff\n"]
)
def test_a_damaged_line_is_named_and_a_torn_last_one_left_out(make_run, damaged):
    path = make_run() / "metrics.jsonl"
    good = json.dumps(row(1)).encode() + b"\n"
    path.write_bytes(good + damaged)
    assert read_record(path).step == 1
    path.write_bytes(good + damaged.rstrip(b"\n") + b"\n" + good)
    with pytest.raises(MetricsFileError, match="jsonl:2: not a row of metrics"):
        read_record(path)


def test_a_number_that_no_float_can_be(make_run):
    with pytest.raises(MetricsFileError, match="larger than a float"):
        read_record(make_run(lines=[row(1) | {"own": 10**400}]) / "metrics.jsonl")
