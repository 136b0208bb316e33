"""Meters of devices and machines: peaks of memory, GPUs by their driver (nvidia-ml-py), and what nodes do."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from pipeline.distributed.accelerator import device_id
from pipeline.distributed.diagnosis import RankProcess

KWH = 3.6e6  # joules
LEAST_SECONDS = 1.0  # between two questions: each takes the host up to a millisecond
COLUMNS = ("cpu_utilization", "memory_utilization", "network_mib_per_second")


class GpuMeter:
    """Of this rank's own device; the row puts together what the ranks have handed each other.

    Args:
        energy_kwh: What the run took before this process.
        nvml: The package; None: the one that is installed, if one is.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        device: torch.device,
        energy_kwh: float = 0.0,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._asked_at = -math.inf
        self._said: list[float] = []
        self._is_there = device.type == "cuda"
        self._joules = 0.0
        self._kwh = energy_kwh
        self._nvml: Any = None
        self._handle: Any = None
        if self._is_there:
            self._nvml, self._handle = _opened(device, nvml)
        self.take()  # energy counts from here

    @property
    def energy_kwh(self) -> float | None:
        """Of the run's devices up to the last row; None: no rank knows any."""
        return self._kwh or None

    def take(self) -> list[float]:
        """Share of the last moment in which a kernel ran, watts, degrees Celsius, joules since the last call;
        NaN: the driver does not say. Empty without a GPU, the same on all ranks."""
        if not self._is_there:
            return []
        if self._clock() - self._asked_at < LEAST_SECONDS:
            return [*self._said[:3], 0.0]  # what it takes meanwhile counts next time
        self._asked_at = self._clock()
        before = self._joules
        self._joules = self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1e3
        self._said = [
            self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu) / 100,
            self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu)) / 1e3,
            self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            self._joules - before,
        ]
        return self._said

    def _ask(self, question: Callable[[Any, Any], float]) -> float:
        if self._handle is None:
            return math.nan
        try:
            return float(question(self._nvml, self._handle))
        except self._nvml.NVMLError:  # a slice of a card, or a card that does not count
            return math.nan

    def row(self, numbers: Sequence[Sequence[float]]) -> dict[str, float]:
        """Columns of a row, of those that a rank knows.

        Args:
            numbers: For each of the four that `take` gives what every rank's said.
        """
        known = [[x for x in of_ranks if not math.isnan(x)] for of_ranks in numbers]
        utilization, power, temperature, energy = known
        row: dict[str, float] = {}
        if utilization:
            row["gpu/utilization"] = sum(utilization) / len(utilization)
        if power:
            row["gpu/power_watts"] = sum(power)
        if temperature:
            row["gpu/temperature_celsius"] = max(temperature)
        if energy:
            self._kwh += sum(energy) / KWH
            row["gpu/energy_kwh"] = self._kwh
        return row


def _opened(device: torch.device, nvml: Any) -> tuple[Any, Any]:
    """The package, and its word for the device: by its UUID, since its numbers are not torch's."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None, None
        nvml = pynvml
    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{device_id(device)}")
    except nvml.NVMLError:  # another maker's card
        return None, None


class NodeMeter:
    """Of this rank's machine; the row has each machine once, from the first of its ranks.

    Args:
        everyone: All ranks, in order; empty: this one is alone.
        clock: Monotonic seconds.
    """

    def __init__(self, everyone: Sequence[RankProcess], clock: Callable[[], float] = time.monotonic):
        ranks: dict[str, list[int]] = {}
        for each in everyone:
            ranks.setdefault(each.machine or each.host, []).append(each.rank)
        names = [everyone[on[0]].host for on in ranks.values()] or [platform.node()]
        if len(set(names)) < len(names):
            names = [f"{name}-{number}" for number, name in enumerate(names)]
        self._ranks = dict(zip(names, ranks.values() or [[0]], strict=True))
        self._clock = clock
        self._before = (-math.inf, 0.0)
        self.take()  # shares and rates count from here

    def take(self) -> list[float]:
        """Of COLUMNS, since the last call: shares of all cores and of the memory, MiB a second both ways,
        without what stays on the machine."""
        cards = [each for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        now = (self._clock(), sum(each.bytes_sent + each.bytes_recv for each in cards) / 2**20)
        seconds, moved = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        memory = psutil.virtual_memory().percent / 100
        return [psutil.cpu_percent() / 100, memory, moved / max(seconds, 1e-9)]

    def row(self, numbers: Sequence[Sequence[float]], gpus: Sequence[float] = ()) -> dict[str, float]:
        """Columns of a row.

        Args:
            numbers: For each of COLUMNS what every rank's `take` gave.
            gpus: Every rank's GPU's utilisation; NaN: not known.
        """
        row: dict[str, float] = {}
        for name, ranks in self._ranks.items():
            own = {key: of_ranks[ranks[0]] for key, of_ranks in zip(COLUMNS, numbers, strict=True)}
            if gpus:
                own["gpu_utilization"] = sum(gpus[rank] for rank in ranks) / len(ranks)
            row |= {f"node/{name}/{key}": each for key, each in own.items() if not math.isnan(each)}
        return row
