"""Columns about GPUs, from a driver's answers that the test gives."""

from __future__ import annotations

import math

import pytest
import torch
from support.fake_clock import FakeClock

from pipeline.monitoring.metrics import GpuMeter

CUDA = torch.device("cuda", 0)


class Driver:
    """Answers of one card; None: it does not say."""

    def __init__(self, *answers: float | None):
        self.answers = list(answers)

    def questions(self):
        def asks(number):
            def answer(device):
                assert device == CUDA
                if self.answers[number] is None:
                    raise RuntimeError("not supported")
                return self.answers[number]

            return answer

        return [asks(number) for number in range(3)]


def of(*ranks):
    return torch.tensor(ranks, dtype=torch.float64).T


@pytest.mark.parametrize(
    ("answers", "other", "row"),
    [
        (
            (80, 650_000, 61),
            [0.6, 600.0, 70.0],
            {"gpu/utilization": 0.7, "gpu/power_watts": 1250.0, "gpu/temperature_celsius": 70.0},
        ),
        ((80, None, 61), [math.nan] * 3, {"gpu/utilization": 0.8, "gpu/temperature_celsius": 61.0}),
        # A rank that knows nothing hands in as many numbers: they ride on one collective.
        ((None, None, None), [math.nan] * 3, {}),
    ],
    ids=["all", "no power", "nothing"],
)
def test_power_is_of_all_ranks_and_the_hottest_is_told(answers, other, row):
    own = GpuMeter(CUDA, Driver(*answers).questions()).read()
    assert len(own) == 3
    assert GpuMeter.combine_ranks(of(own, other)) == pytest.approx(row)


def test_the_driver_is_asked_once_a_second():
    driver = Driver(80, 650_000, 61)
    clock = FakeClock()
    meter = GpuMeter(CUDA, driver.questions(), clock)
    assert meter.read() == [0.8, 650.0, 61.0]
    driver.answers[0] = 90
    assert meter.read()[0] == 0.8
    clock.now += 1.0
    assert meter.read()[0] == 0.9


def test_torch_is_asked_and_may_know_nothing():
    assert len(GpuMeter(CUDA).read()) == 3
