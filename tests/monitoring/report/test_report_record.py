"""A record as it is read: columns of rows, and what was told, each beside the others."""

from __future__ import annotations

import json
import math

import pytest
from monitoring.report.recorded import event, row

from pipeline.monitoring.report.runs import MAX_EVENTS, read_record
from pipeline.monitoring.trackers.jsonl import MetricsFileError


def test_rows_of_other_keys_keep_their_place(make_run):
    lines = [
        row(step) | ({"perf/checkpoint_stall_seconds": 2.0} if step % 7 == 0 else {})
        for step in range(1, 1000)
    ]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    assert record.curves["train/loss"].axes[0].tolist() == list(range(1, 1000))
    assert record.curves["perf/checkpoint_stall_seconds"].axes[0].tolist() == list(range(7, 1000, 7))


@pytest.mark.slow
def test_of_seconds_the_median_is_drawn(make_run):
    lines = [
        row(step) | {"perf/step_time_seconds": 30.0 if step % 9 == 0 else 0.52} for step in range(1, 9000)
    ]
    lines = [line | {"train/loss": line["perf/step_time_seconds"]} for line in lines]
    curves = read_record(make_run(lines=lines) / "metrics.jsonl").curves
    assert set(curves["perf/step_time_seconds"].lines[0]) == {0.52}
    assert curves["train/loss"].lines[0].mean() == pytest.approx(0.52 + 29.48 / 9, rel=0.01)


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
    assert record.curves["eval/loss"].axes.T.tolist() == [[0, 0, 0], [20, 20_000, 0.02]]
    assert record.curves["eval/loss"].lines[0].tolist() == [9.0, 4.0]
    assert record.phases == {"forward": 60.0, "startup, shutdown, dropped steps": 12.0}
    ended = read_record(
        make_run("ended", [*lines, event(20, "time", elapsed_seconds=80.5)]) / "metrics.jsonl"
    )
    assert (ended.seconds, ended.phases["startup, shutdown, dropped steps"]) == (80.5, 20.5)


def test_events_are_beside_the_curves(make_run):
    lines = [row(1), event(1), event(1, "sample", prompt="a", text="b"), row(2, loss="NaN")]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    assert [each["event"] for each in record.alerts] == ["loss_spike"]
    assert record.alerts[0]["position"] == (1, 1000, 0.0)
    assert record.samples[0]["prompt"] == "a"
    assert math.isnan(record.curves["train/loss"].lines[0, 1])


def test_information_is_no_alert(make_run):
    levels = {"time": "info", "loss_spike": "warning", "run_failed": "error", "profile": "info"}
    lines = [event(1, name, level=level) for name, level in levels.items()]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    assert [each["event"] for each in record.alerts] == ["loss_spike", "run_failed"]
    assert [each["event"] for each in record.events] == ["time", "profile"]


def test_of_many_events_the_first_and_the_last_stay(make_run):
    lines = [event(step) for step in range(500)] + [event(2, "plan", level="info")]
    record = read_record(make_run(lines=lines) / "metrics.jsonl")
    steps = [each["step"] for each in record.alerts]
    assert (record.num_left_out, len(steps)) == ({"alerts": 500 - MAX_EVENTS}, MAX_EVENTS)
    assert len(record.events) == 1, "alerts do not push it out"
    assert steps == [*range(MAX_EVENTS // 2), *range(500 - MAX_EVENTS // 2, 500)]


@pytest.mark.parametrize(
    "damaged", [b"{", b"[1]\n", b'{"step": "a"}\n', b'{"step": 1, "train/loss": {}}\n', b"\xff\n"]
)
def test_a_damaged_line_is_named_and_a_torn_last_one_left_out(make_run, damaged):
    path = make_run() / "metrics.jsonl"
    good = json.dumps(row(1)).encode() + b"\n"
    path.write_bytes(good + damaged)
    assert read_record(path).step == 1
    path.write_bytes(good + damaged.rstrip(b"\n") + b"\n" + good)
    with pytest.raises(MetricsFileError, match=r"jsonl:2: not a row of metrics: .*; delete this line"):
        read_record(path)


def test_a_number_that_no_float_can_be(make_run):
    with pytest.raises(
        MetricsFileError, match="jsonl:1: a number is larger than a float can be; delete this line"
    ):
        read_record(make_run(lines=[row(1) | {"own": 10**400}]) / "metrics.jsonl")
