"""Meters: plain arithmetic, with a clock of our own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.fake_clock import FakeClock

from pipeline.distributed.phases import Phases
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import StepResult
from pipeline.monitoring.metrics import (
    GpuMeter,
    MemoryMeter,
    Meters,
    WallTime,
    Workload,
    memory_columns,
    slowest_rank_columns,
)

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


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
    clock = FakeClock()
    meter = meters(clock)
    for _ in range(3):
        with meter.phases.measure("data"):
            clock.now += 0.25
        clock.now += 0.75
        meter.observe(step())
    with meter.exclude_from_step_time():
        clock.now += 100.0
    row = meter.collect_row().read().row
    assert row["train/loss"] == pytest.approx(3.0)
    assert row["perf/step_time_seconds"] == pytest.approx(1.0)
    assert row["perf/data_time_seconds"] == pytest.approx(0.25)
    assert row["perf/samples_per_second"] == pytest.approx(4.0)
    assert row["perf/tokens_per_second"] == pytest.approx(10.0)
    assert row["perf/tokens_per_second_per_device"] == pytest.approx(5.0)
    assert row["perf/mfu"] == pytest.approx(4.0 * 6e9 / 2 / 1e12)  # of whole rows, whatever of them counts
    assert meter.samples_per_second == [row["perf/samples_per_second"]]
    assert meter.peak_gib == row["memory/peak_resident_gib"]


def test_what_is_recomputed_is_work_of_the_hardware_alone():
    clock = FakeClock()
    again = [0.0]
    work = replace(WORKLOAD, recomputed_flops=lambda: again[0])
    meter = Meters(work, ALONE, clock)
    for recomputed in (0.0, 2e9):
        again[0] = recomputed
        clock.now += 1.0
        meter.observe(step())
        row = meter.collect_row().read().row
        assert row["perf/mfu"] == pytest.approx(4 * 6e9 / 2 / 1e12)
        assert row.get("perf/hfu") == (pytest.approx(row["perf/mfu"] * 4 / 3) if recomputed else None)


def test_what_a_rank_knows_of_its_gpu_rides_on_the_loss_s_collective():
    class Meter(GpuMeter):
        def read(self):
            return [0.5, 300.0, 60.0]

    sums = []

    class Second(Job):
        def all_reduce_sum(self, tensor):
            sums.append(tensor.clone())
            return tensor

    job = Second(Ranks(1, 1, 2, 2), torch.device("cpu"))
    wall = WallTime(Phases(FakeClock(), job.device), FakeClock(), communicates=True)
    meter = Meters(WORKLOAD, job, FakeClock(), wall=wall, gpu=Meter(job.device))
    meter.observe(step())
    row = meter.collect_row().read().row
    (vector,) = sums
    assert vector.tolist()[-3:] == [0.5, 300.0, 60.0]
    assert row["gpu/power_watts"] == 300.0
    assert row["gpu/temperature_celsius"] == 60.0
    assert row["time/communication_seconds"] == 0.0


def test_images_have_no_tokens():
    clock = FakeClock()
    meter = meters(clock, unit="samples")
    clock.now = 1.0
    meter.observe(step())
    assert not [key for key in meter.collect_row().read().row if "tokens" in key or "mfu" in key]


def test_skips_in_a_row_are_counted_until_a_good_step():
    meter = meters(FakeClock())
    for skipped in (1.0, 1.0, 0.0, 1.0, 1.0, 1.0):
        meter.observe(step(skipped=skipped))
    assert meter.collect_row().read().row["train/skipped_in_a_row"] == 3
    meter.observe(step(skipped=1.0))
    assert meter.collect_row().read().row["train/skipped_in_a_row"] == 4
    meter.observe(step())
    assert "train/skipped_in_a_row" not in meter.collect_row().read().row


def test_a_row_comes_with_each_step_before_it():
    clock = FakeClock()
    meter = meters(clock)
    for number in range(200):
        with meter.phases.measure("data"):
            clock.now += 0.25
        meter.observe(step(loss_sum=10.0 * number, count=5.0, skipped=number % 2, norm=number))
    seen = meter.collect_row().read()
    numbers = range(200)
    assert seen.losses == [2.0 * number for number in numbers]
    assert seen.grad_norms == list(numbers)
    assert seen.skipped == [number % 2 == 1 for number in numbers]
    assert seen.row["train/loss"] == seen.losses[-1]
    assert seen.per_rank["data"] == [pytest.approx(0.25)]
    assert 0.0 < seen.per_rank["host"][0] < 1000.0
    meter.observe(step())
    assert meter.collect_row().read().losses == [3.0]


def test_ranks_are_compared_by_what_each_needs_without_waiting():
    own = {"data": [0.1, 0.1, 0.0, 0.1], "forward": [0.3, 0.2, 0.9, 0.4], "host": [1.0] * 4}
    assert slowest_rank_columns(own) == {
        "perf/own_time_seconds": pytest.approx(0.4),
        "perf/slowest_rank": 2,
        "perf/slowest_rank_own_time_seconds": pytest.approx(0.9),
    }
    assert slowest_rank_columns({"data": [0.1], "host": [1.0]}) == {}
    assert slowest_rank_columns({"host": [1.0, 1.0]}) == {}


def test_peaks_and_retries_of_memory_are_those_since_the_last_row(monkeypatch):
    """Two readings of torch.cuda.memory_stats: peaks are reset after each, and counts go on."""
    first = {
        "allocated_bytes.all.peak": 3 * 2**30,
        "reserved_bytes.all.peak": 2**32,
        "num_alloc_retries": 2,
    }
    assert memory_columns(first, {}) == {
        "memory/peak_allocated_gib": 3.0,
        "memory/peak_reserved_gib": 4.0,
        "memory/alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: first)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    on_gpu = MemoryMeter(torch.device("cuda", 0)).read_and_reset()
    assert on_gpu["memory/peak_reserved_gib"] == 4.0
    assert 0.05 < on_gpu["memory/peak_resident_gib"] < 500
    assert set(MemoryMeter(torch.device("cpu")).read_and_reset()) == {"memory/peak_resident_gib"}
    assert memory_columns(first | {"num_alloc_retries": 5}, first)["memory/alloc_retries"] == 3
