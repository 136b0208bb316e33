"""What the driver says of GPUs, by a driver that says what the test does."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.clock import Clock

from pipeline.monitoring.metrics import GpuMeter

CUDA = torch.device("cuda", 0)


class Nvml:
    """nvidia-ml-py's names, of one card."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.millijoules = 5_000_000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, _):
        return self.millijoules

    def nvmlDeviceGetUtilizationRates(self, _):
        return SimpleNamespace(gpu=80, memory=50)

    def nvmlDeviceGetPowerUsage(self, _):
        return 650_000

    def nvmlDeviceGetTemperature(self, _, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


@pytest.fixture(autouse=True)
def _card(monkeypatch):
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def of(*ranks):
    return torch.tensor(ranks, dtype=torch.float64).T


def test_power_and_energy_are_of_all_ranks_and_the_hottest_is_told():
    nvml = Nvml()
    clock = Clock()
    meter = GpuMeter(CUDA, energy_kwh=2.0, nvml=nvml, clock=clock)
    nvml.millijoules += 3_600_000  # 3,600 J
    assert meter.take() == [0.8, 650.0, 61.0, 0.0]  # asked a moment ago
    clock.now += 1.0
    own = meter.take()
    assert own == [0.8, 650.0, 61.0, 3600.0]
    row = meter.row(of(own, [0.6, 600.0, 70.0, 3600.0]))
    assert row == {
        "gpu/utilization": pytest.approx(0.7),
        "gpu/power_watts": 1250.0,
        "gpu/temperature_celsius": 70.0,
        "gpu/energy_kwh": pytest.approx(2.002),
    }
    assert meter.energy_kwh == pytest.approx(2.002)
    clock.now += 1.0
    assert meter.take()[3] == 0.0  # since the last row


def test_what_a_card_does_not_say_is_left_out():
    class Old(Nvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, _):
            raise self.NVMLError

    clock = Clock()
    meter = GpuMeter(CUDA, nvml=Old(), clock=clock)
    clock.now += 1.0
    own = meter.take()
    assert math.isnan(own[3])
    assert set(meter.row(of(own))) == {"gpu/utilization", "gpu/power_watts", "gpu/temperature_celsius"}
    assert meter.energy_kwh is None


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_rank_that_knows_nothing_still_hands_in_as_many_numbers(refused):
    """They ride on one collective, for which all ranks need as many."""

    class Absent(Nvml):
        pass

    def refuse(self, *_):
        raise self.NVMLError

    setattr(Absent, refused, refuse)
    clock = Clock()
    meter = GpuMeter(CUDA, nvml=Absent(), clock=clock)
    clock.now += 1.0
    own = meter.take()
    assert len(own) == 4
    assert all(map(math.isnan, own))
    assert meter.row(of(own)) == {}


def test_without_the_package_it_is_the_same(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert len(GpuMeter(CUDA).take()) == 4


def test_without_a_gpu_there_is_nothing():
    assert GpuMeter(torch.device("cpu"), nvml=Nvml()).take() == []
