"""Meters: plain arithmetic, with a clock of our own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import StepResult
from pipeline.memory_meter import memory_row
from pipeline.metrics import Meters, Workload

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(loss_sum=30.0, count=10.0, skipped=0.0, norm=1.0):
    numbers = (torch.tensor(n, dtype=torch.float64) for n in (loss_sum, count))
    return StepResult(*numbers, torch.tensor(norm), torch.tensor(skipped), torch.tensor(0.0), None)


WORKLOAD = Workload(samples_per_step=4, world_size=2, unit="tokens", flops_per_sample=6e9, peak_flops=1e12)


def meters(clock, unit="tokens"):
    return Meters(
        replace(WORKLOAD, unit=unit, flops_per_sample=6e9 if unit == "tokens" else None),
        ALONE,
        clock,
    )


def test_rates_leave_out_what_is_not_training():
    clock = Clock()
    meter = meters(clock)
    for _ in range(3):
        with meter.waiting_for_data():
            clock.now += 0.25
        clock.now += 0.75
        meter.observe(step())
    with meter.paused():
        clock.now += 100.0
    row = meter.summary().read()
    assert row["train/loss"] == pytest.approx(3.0)
    assert row["perf/step_time_seconds"] == pytest.approx(1.0)
    assert row["perf/data_time_seconds"] == pytest.approx(0.25)
    assert row["perf/samples_per_second"] == pytest.approx(4.0)
    assert row["perf/tokens_per_second"] == pytest.approx(10.0)
    assert row["perf/tokens_per_second_per_device"] == pytest.approx(5.0)
    assert row["perf/mfu"] == pytest.approx(4.0 * 6e9 / 2 / 1e12)  # of whole rows, whatever of them counts


def test_images_have_no_tokens():
    clock = Clock()
    meter = meters(clock, unit="samples")
    clock.now = 1.0
    meter.observe(step())
    assert not [key for key in meter.summary().read() if "tokens" in key or "mfu" in key]


def test_skips_in_a_row_are_counted_until_a_good_step():
    meter = meters(Clock())
    for skipped in (1.0, 1.0, 0.0, 1.0, 1.0, 1.0):
        meter.observe(step(skipped=skipped))
    assert meter.summary().read()["train/skipped_in_a_row"] == 3
    meter.observe(step(skipped=1.0))
    assert meter.summary().read()["train/skipped_in_a_row"] == 4
    meter.observe(step())
    assert "train/skipped_in_a_row" not in meter.summary().read()


@pytest.mark.parametrize(
    ("precision", "scale", "expected"),
    [
        ("bf16", None, "2 of 3 steps skipped: the gradient was infinite or NaN"),
        ("fp16", 64.0, "the fp16 loss scale is now 64"),
        ("fp16", 1.0, "the fp16 loss scale cannot fall below 1; use bf16"),
    ],
)
def test_skipped_steps_are_told_once_a_logged_step(caplog, precision, scale, expected):
    meter = Meters(WORKLOAD, ALONE, Clock(), lowest_scale=1.0)
    for skipped in (1.0, 0.0, 1.0):
        meter.observe(replace(step(skipped=skipped), loss_scale=scale))
    meter.summary().read()
    assert expected in caplog.text
    caplog.clear()
    meter.observe(replace(step(), loss_scale=scale))
    meter.summary().read()
    assert not caplog.text


def run_steps(meter, clock, steps, data, compute):
    for _ in range(steps):
        with meter.waiting_for_data():
            clock.now += data
        clock.now += compute
        meter.observe(step())


def test_a_step_that_waits_for_data_is_told_of_once(caplog):
    clock = Clock()
    meter = meters(clock)
    run_steps(meter, clock, 1, 5.0, 0.01)  # workers start
    meter.summary().read()
    run_steps(meter, clock, 9, 0.03, 0.07)
    meter.summary().read()
    assert not caplog.text  # a few steps say little
    run_steps(meter, clock, 1, 0.03, 0.07)
    meter.summary().read()
    (record,) = caplog.records
    assert "is 30% of the step (30 of 100 ms)" in record.message
    assert record.message.endswith("loader.num_workers=2")
    run_steps(meter, clock, 50, 0.09, 0.01)
    assert meter.summary().read()["perf/data_time_seconds"] == pytest.approx(0.09)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("data", "compute"), [(0.009, 0.091), (0.0009, 0.0001)], ids=["a tenth", "short"])
def test_a_short_wait_for_data_is_not_worth_a_line(caplog, data, compute):
    clock = Clock()
    meter = meters(clock)
    for _ in range(3):
        run_steps(meter, clock, 20, data, compute)
        meter.summary().read()
    assert not caplog.text


def test_more_workers_are_asked_for_where_there_are_some(caplog):
    clock = Clock()
    meter = Meters(replace(WORKLOAD, num_workers=4), ALONE, clock)
    for _ in range(2):
        run_steps(meter, clock, 20, 0.5, 0.5)
        meter.summary().read()
    assert "loader.num_workers=8" in caplog.text


def test_peaks_and_retries_of_memory_are_those_since_the_last_row():
    """Two readings of torch.cuda.memory_stats: peaks are reset after each, and counts go on."""
    first = {
        "allocated_bytes.all.peak": 3 * 2**30,
        "reserved_bytes.all.peak": 2**32,
        "num_alloc_retries": 2,
    }
    assert memory_row(first, {}) == {
        "memory/peak_allocated_gib": 3.0,
        "memory/peak_reserved_gib": 4.0,
        "memory/alloc_retries": 2,
    }
    assert memory_row(first | {"num_alloc_retries": 5}, first)["memory/alloc_retries"] == 3
