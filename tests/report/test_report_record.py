"""A record as it is read: whatever its length nothing that stands out is lost, and nothing is made up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.recorded import event, row

from pipeline.report.record import CHUNK, MOST_EVENTS, MOST_POINTS, STEP, Curve, Record
from pipeline.sinks.jsonl import MetricsFileError


def curve_of(values, piece=1000):
    curve, steps = Curve(), np.arange(len(values), dtype=float)
    for start in range(0, len(values), piece):
        part = steps[start : start + piece]
        curve.extend(np.column_stack([part, part * 10, part / 100]), values[start : start + piece])
    return curve


def test_a_short_curve_is_whole():
    values = np.random.default_rng(0).normal(size=MOST_POINTS)
    curve = curve_of(values)
    assert curve.width == 1
    assert curve.values.tolist() == values.tolist()


@pytest.mark.parametrize("piece", [1, 777, 50_000])
def test_a_long_curve_keeps_every_spike_its_ends_and_what_is_not_finite(piece):
    values = np.random.default_rng(1).normal(size=40_000 if piece > 1 else 5000)
    spikes = {1234: 90.0, 4321: -70.0, 4999: math.nan, 3003: math.inf}
    for place, value in spikes.items():
        values[place] = value
    curve = curve_of(values, piece)
    assert len(curve.points) <= MOST_POINTS
    kept = dict(zip(curve.points[:, STEP].astype(int).tolist(), curve.values.tolist(), strict=True))
    assert {0, len(values) - 1, *spikes} <= set(kept)
    assert all(values[step] == value or math.isnan(value) for step, value in kept.items())
    buckets = np.arange(len(values)) // curve.width
    for bucket in range(buckets[-1] + 1):
        finite = values[(buckets == bucket) & np.isfinite(values)]
        shown = [value for step, value in kept.items() if buckets[step] == bucket and math.isfinite(value)]
        assert (min(shown), max(shown)) == (finite.min(), finite.max())
    assert sorted(kept) == list(kept), "in the order of the file"


def test_it_does_not_matter_in_which_pieces_a_curve_came():
    values = np.random.default_rng(2).normal(size=20_000)
    one, other = curve_of(values, 20_000), curve_of(values, 313)
    assert one.points.tolist() == other.points.tolist()
    np.testing.assert_allclose(one.bucket_means(), other.bucket_means())


def test_means_are_of_all_points():
    values = np.arange(8000.0)
    curve = curve_of(values)
    assert curve.mean() == pytest.approx(values.mean())
    means = curve.bucket_means()
    means = means[np.isfinite(means)]
    assert means[0] == pytest.approx(values[: curve.width].mean())
    assert means[-1] == pytest.approx(values[(len(values) - 1) // curve.width * curve.width :].mean())


def test_a_constant_curve_and_one_without_a_finite_point_end():
    assert len(curve_of(np.full(30_000, 3.0)).points) <= MOST_POINTS
    curve = curve_of(np.full(30_000, math.nan))
    assert len(curve.points) <= MOST_POINTS
    assert math.isnan(curve.mean())


def test_rows_of_other_keys_keep_their_place(make_run):
    lines = [
        row(step) | ({"perf/checkpoint_stall_seconds": 2.0} if step % 7 == 0 else {})
        for step in range(1, CHUNK)
    ]
    record = Record(make_run(lines=lines) / "metrics.jsonl")
    assert (np.diff(record.curves["train/loss"].points[:, STEP]) > 0).all()


def test_axes(make_run):
    lines = [{"step": 0, "eval/loss": 9.0}, row(10), row(20), {"step": 20, "eval/loss": 4.0}]
    record = Record(make_run(lines=lines) / "metrics.jsonl")
    assert record.curves["eval/loss"].points[:, 1:].tolist() == [[0, 0, 0, 9.0], [20, 20_000, 10 / 3600, 4.0]]
    assert record.phases == {"data": pytest.approx(2.0), "steps": pytest.approx(8.0)}
    measured = [line | {"perf/elapsed_seconds": 72.0, "time/forward_seconds": 3.0} for line in lines[1:3]]
    record = Record(make_run("other", lines=measured) / "metrics.jsonl")
    assert record.curves["train/loss"].points[:, 3].tolist() == [0.02, 0.02]
    assert record.phases == {"forward": 6.0}


def test_events_are_beside_the_curves(make_run):
    lines = [row(1), event(1), event(1, "sample", prompt="a", text="b" * 9000), row(2, loss="NaN")]
    record = Record(make_run(lines=lines) / "metrics.jsonl")
    assert record.num_rows == 2
    assert [each["event"] for each in record.events] == ["loss_spike"]
    assert record.events[0]["tokens"] == 1000
    assert record.samples[0]["prompt"] == "a"
    assert len(record.samples[0]["text"]) < 9000
    assert math.isnan(record.curves["train/loss"].values[1])


def test_of_many_events_the_first_and_the_last_stay(make_run):
    record = Record(make_run(lines=[event(step) for step in range(1000)]) / "metrics.jsonl")
    steps = [each["step"] for each in record.events]
    assert (record.num_events, len(steps), steps[0], steps[-1]) == (1000, MOST_EVENTS, 0, 999)


@pytest.mark.parametrize(
    "damaged", [b"{", b"[1]\n", b'{"step": "a"}\n', b'{"step": 1, "train/loss": {}}\n', b"\xff\n"]
)
def test_a_damaged_line_is_named_and_a_torn_last_one_left_out(make_run, damaged):
    path = make_run() / "metrics.jsonl"
    good = json.dumps(row(1)).encode() + b"\n"
    path.write_bytes(good + damaged)
    assert Record(path).num_rows == 1
    path.write_bytes(good + damaged.rstrip(b"\n") + b"\n" + good)
    with pytest.raises(MetricsFileError, match="jsonl:2: not a row of metrics"):
        Record(path)


def test_a_number_that_no_float_can_be(make_run):
    with pytest.raises(MetricsFileError, match="larger than a float"):
        Record(make_run(lines=[row(1) | {"own": 10**400}]) / "metrics.jsonl")
