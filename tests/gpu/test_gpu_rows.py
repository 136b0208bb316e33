"""Rows of the log on a GPU: nothing waits for the device until one is read, and then it is right."""

from __future__ import annotations

import time

import pytest
import torch

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import StepResult
from pipeline.monitoring.metrics import Meters, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_row_waits_for_nothing_until_it_is_read():
    device = torch.device("cuda", 0)
    meters = Meters(Workload(4, 1, "tokens", None, None), Job(Ranks(0, 0, 1, 1), device), time.perf_counter)
    numbers = [torch.full((), x, dtype=torch.float64, device=device) for x in (30.0, 10.0, 2.0, 0.0, 0.0)]
    late = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with meters.phases.measure("data"):
                torch.cuda._sleep(int(1e8))  # some 50 ms
            with meters.phases.measure("forward"):
                torch.cuda._sleep(int(2e8))
            with meters.exclude_from_step_time("evaluation"):
                torch.cuda._sleep(int(1e8))
            meters.observe(StepResult(*numbers, None))
            late.append(meters.collect_row({"train/tokens_seen": numbers[1]}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not late[-1].has_arrived()
    for number in numbers:
        number.zero_()  # a later step
    for row in (each.read().row for each in late):
        assert row["train/loss"] == 3.0
        assert row["train/grad_norm"] == 2.0
        assert row["train/tokens_seen"] == 10
        assert row["perf/step_time_seconds"] >= row["perf/data_time_seconds"] > 0.01
        data, forward, evaluation = (row[f"time/{x}_seconds"] for x in ("data", "forward", "evaluation"))
        assert forward == pytest.approx(2 * data, rel=0.2)
        assert evaluation == pytest.approx(data, rel=0.2)
        assert row["perf/step_time_seconds"] == pytest.approx(data + forward, rel=0.2)
        assert row["time/other_seconds"] < 0.05 * data
