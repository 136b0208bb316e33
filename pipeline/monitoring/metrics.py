"""Meters: losses, rates, memory, devices and wall time of a run. The clock is injected.

The device is waited for where a row is read, and where a profiler was asked for.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import psutil
import torch
from torch import Tensor

from pipeline.distributed.accelerator import device_id
from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.phases import ASIDE, NO_STEP, Moment, Phases, Spent, columns, seconds_between
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Profile, StepResult, further_means, mean_loss
from pipeline.files import GIB, format_duration
from pipeline.monitoring.alerts import Seen
from pipeline.monitoring.events import TIME, Event
from pipeline.monitoring.row_queue import DeferredRow
from pipeline.monitoring.trackers.jsonl import newest

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


ELAPSED, COST, ENERGY = "perf/elapsed_seconds", "perf/cost", "gpu/energy_kwh"
SMALLEST_SHARE = 0.005  # of the process's time, that is told in words


@dataclass(frozen=True)
class Earlier:
    """What the run's processes before this one took."""

    elapsed_seconds: float = 0.0
    training_seconds: float = 0.0
    """Of the steps that its checkpoint has."""
    cost: float = 0.0
    energy_kwh: float = 0.0

    @staticmethod
    def of(record: Path, state: Mapping[str, Any]) -> Earlier:
        """By its metrics.jsonl, before rows are taken back, and by the checkpoint that it goes on from."""
        row, end = newest(record, ELAPSED) or {}, newest(record, _name(ELAPSED)) or {}

        def most(key: str) -> float:
            return max(row.get(key, 0.0), end.get(_name(key), 0.0), state.get(_name(key), 0.0))

        return Earlier(most(ELAPSED), state.get("training_seconds", 0.0), most(COST), most(ENERGY))


def _name(key: str) -> str:
    """Of a column among the fields of an event."""
    return key.partition("/")[2]


class WallTime:
    """Of one process, and with it of the run.

    Args:
        phases: Where the engine's steps go.
        clock: Theirs.
        devices: Of all ranks.
        price: Of a device for an hour, in any currency; None: not known.
        communicates: There are other ranks to wait for.
    """

    def __init__(
        self,
        phases: Phases,
        clock: Callable[[], float],
        *,
        earlier: Earlier | None = None,
        devices: int = 1,
        price: float | None = None,
        communicates: bool = False,
    ):
        self.phases = phases
        self._clock = clock
        self.began = clock()
        """When the process did."""
        self._earlier = earlier or Earlier()
        self._price_per_second = None if price is None else price * devices / 3600
        self._communicates = communicates
        self._startup = 0.0
        self._first_step: Moment = None
        self._told_of_first = False
        self.begin()

    def begin(self) -> None:
        """The run is built: what comes next is its first step, or the evaluation before it."""
        self._startup = self._clock() - self.began
        self.phases.restart()
        self._loop_began = self.phases.began

    def end_first_step(self) -> None:
        """Note that the first step has ended; further calls do nothing."""
        if self._first_step is None:
            self._first_step = self.phases.now()

    def by_phase(self, spent: Mapping[str, float]) -> dict[str, float]:
        """Return the columns of a row.

        Args:
            spent: Seconds by phase of the row's steps.
        """
        told = columns(spent, communicates=self._communicates)
        row = {f"time/{phase}_seconds": seconds for phase, seconds in told.items()}
        if not self._told_of_first and (first := self._first_step_seconds()) is not None:
            self._told_of_first = True
            row["perf/first_step_seconds"] = first
        return row

    def _first_step_seconds(self) -> float | None:
        """From the start of the process to the end of its first step. Waits for the device."""
        if self._first_step is None:
            return None
        return self._startup + seconds_between(self._loop_began, self._first_step)

    def so_far(self) -> dict[str, float]:
        """The run's columns, up to now. Waits for nothing."""
        state = self.remembered()
        elapsed = state["elapsed_seconds"]
        row = {ELAPSED: elapsed, "perf/goodput": state["training_seconds"] / max(elapsed, 1e-9)}
        if self._price_per_second is not None:
            row[COST] = self._earlier.cost + self._price_per_second * (self._clock() - self.began)
        return row

    def remembered(self) -> dict[str, float]:
        """What a checkpoint keeps: seconds of the run, and those of them that went into its steps."""
        process = self._clock() - self.began
        totals = self.phases.totals()
        training = process - self._startup - sum(totals.get(phase, 0.0) for phase in NO_STEP)
        return {
            "elapsed_seconds": self._earlier.elapsed_seconds + process,
            "training_seconds": self._earlier.training_seconds + max(0.0, training),
        }

    def conclusion(self, energy_kwh: float | None = None) -> Event:
        """Where the time of this process went, to its last moment. Waits for the device."""
        phases = columns(self.phases.totals(waits=True), communicates=self._communicates)
        process = max(1e-9, self._clock() - self.began)
        row = self.so_far()
        fields = {"startup_seconds": self._startup}
        if (first := self._first_step_seconds()) is not None:
            fields["first_step_seconds"] = first
        fields |= {f"{phase}_seconds": seconds for phase, seconds in phases.items()}
        fields |= {_name(key): value for key, value in row.items()}
        fields |= {} if energy_kwh is None else {_name(ENERGY): energy_kwh}
        shares = sorted({"start": self._startup, **phases}.items(), key=lambda each: -each[1])
        told = [f"{name} {x / process:.0%}" for name, x in shares if x > SMALLEST_SHARE * process]
        whole = format_duration(row[ELAPSED])
        message = f"{format_duration(process)} went into {', '.join(told)}; of the run's {whole} "
        message += f"{row['perf/goodput']:.1%} are steps that count"
        if COST in row:
            message += f", and cost {row[COST]:.2f}"
        return Event(TIME, message, level="info", fields=fields)


CHUNK = 64  # steps whose numbers lie one by one; a tensor of one number takes a hundred times its memory


@dataclass(frozen=True)
class Workload:
    """Facts about the run that turn seconds into rates."""

    samples_per_step: int
    world_size: int
    unit: str
    """What the loss counts: `tokens` or `samples`."""
    flops_per_sample: float | None
    """Model FLOPs of forward and backward of one row, whatever of it counts in the loss; None: not known."""
    peak_flops: float | None
    """Dense peak of one device in the run's precision, FLOP/s."""
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What the objective reports besides its loss; see Objective.means."""
    recomputed_flops: Callable[[], float] = float
    """Of one row, made a second time in the backward; a first step may choose how many blocks do so."""


@dataclass(frozen=True)
class Interval:
    """The steps between two rows of the log: what the host knows of them when the last one is launched."""

    last: StepResult
    steps: int
    spent: Spent
    measured: dict[str, float] = field(default_factory=dict)
    """Columns of the row: saves, memory, the run's time so far."""


def training_seconds(spent: Mapping[str, float]) -> float:
    """Return the seconds of steps among the seconds by phase."""
    return max(1e-9, sum(seconds for phase, seconds in spent.items() if phase not in NO_STEP))


class StepNumbers:
    """Each step's numbers between two rows of the log, a few or thousands. Nothing waits for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._single: dict[str, list[Tensor]] = {}
        self._stacked: dict[str, list[Tensor]] = {}

    def add(self, result: StepResult) -> None:
        """Add the numbers of the next step."""
        numbers = {"loss share": result.loss_sum, "count": result.global_count, "skipped": result.skipped}
        norm = result.grad_norm
        if norm is not None:
            given = norm if isinstance(norm, Tensor) else torch.full((), norm, device=self._device)
            numbers["norm"] = given
        for name, number in numbers.items():
            self._single.setdefault(name, []).append(number)
        if len(self._single["skipped"]) == CHUNK:
            self._stack()

    def _stack(self) -> None:
        for name, numbers in self._single.items():
            self._stacked.setdefault(name, []).append(torch.stack(numbers))
        self._single = {}

    def take(self) -> dict[str, Tensor]:
        """Return the numbers since the last call, (steps,) each, and forget them.

        They are `loss share` (see StepResult.loss_sum), `count`, `skipped` and, where there is one, `norm`.
        """
        if self._single:
            self._stack()
        stacked, self._stacked = self._stacked, {}
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in stacked.items()}


STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
FORGET_PEAK = "5"  # proc(5), clear_refs: resets the mark of the peak, and touches nothing else


def resident_now() -> int:
    """Bytes."""
    return int(psutil.Process().memory_info().rss)


def resident_peak() -> int:
    """Bytes, the most since `forget_peak`.

    Raises:
        OSError: not Linux.
    """
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no VmHWM")


def process_peak() -> int:
    """Bytes, the most since the process began or `forget_peak`, as far as the system knows.

    `ru_maxrss` has also what the process held that started this one: asked where there is nothing better.
    """
    try:
        return resident_peak()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """The mark of the peak starts again at what there is now.

    Raises:
        OSError: not Linux, or /proc cannot be written.
    """
    CLEAR.write_text(FORGET_PEAK)


class MemoryMeter:
    """Measures the memory of one rank: of its device and of its host. Waits for nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        # What trials of a micro-batch did is no step's.
        self._before: Mapping[str, Any] = torch.cuda.memory_stats(device) if device.type == "cuda" else {}

    def take(self) -> dict[str, float]:
        """Return the peaks since the last call.

        The host's is since the process began or, on a CPU, had tried micro-batches.
        """
        host = {"memory/peak_resident_gib": process_peak() / GIB}
        if self._device.type != "cuda":
            return host
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before, self._before = self._before, stats
        return memory_row(stats, before) | host

    def in_use(self) -> dict[str, float]:
        """Return the GiB in use now.

        `host` is what the process holds alone, without the pages of files that it maps. `device` is the
        peak of a GPU since the last row.
        """
        memory = psutil.Process().memory_info()
        used = {"host": (memory.rss - getattr(memory, "shared", 0)) / GIB}
        if self._device.type == "cuda":
            used["device"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return used


def memory_row(stats: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics between two readings of torch.cuda.memory_stats.

    `memory/alloc_retries`: how often, since the reading before, the allocator was out of memory, waited for
    the device and gave back what it kept. Such a step is slow, and the next size up fails.
    """
    return {
        "memory/peak_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
        "memory/peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "memory/alloc_retries": stats["num_alloc_retries"] - before.get("num_alloc_retries", 0),
    }


class Meters:
    """Measures the steps between two rows of the log."""

    def __init__(
        self,
        workload: Workload,
        job: Job,
        clock: Callable[[], float],
        profile: Profile | None = None,
        *,
        own_phases: Sequence[str] = (),
        wall: WallTime | None = None,
        gpu: GpuMeter | None = None,
        nodes: NodeMeter | None = None,
    ):
        """Begin to measure.

        Args:
            profile: Measures what DeepSpeed's profilers were asked for.
            own_phases: Phases, besides the reading of data, in which no rank waits for another.
            wall: Measures the wall time of the engine's steps.
            gpu: Asks the driver about the device; `None` asks nothing.
            nodes: Measures the machines; `None` measures nothing.
        """
        self._workload = workload
        self._job = job
        self._on_gpu = job.device.type == "cuda"
        self._wall = wall or WallTime(Phases(clock, job.device), clock)
        self.phases = self._wall.phases
        """The phases of the engine's steps."""
        self._gpu = gpu
        self._nodes = nodes
        self._memory = MemoryMeter(job.device)
        self._own_phases = ("data", *own_phases)
        self._profile = profile
        self._each = StepNumbers(job.device)
        self._last: StepResult | None = None
        self._consecutive_skips = torch.zeros((), device=job.device)
        self._before: Interval | None = None
        self._steps = 0
        self._saves: dict[str, float] = {}
        self.peak_gib = 0.0
        """Most memory that a row has shown: of a GPU what was reserved, else of this process."""
        self.samples_per_second: list[float] = []
        """Rate of each row so far."""

    def restart(self) -> None:
        """Drop what was measured since the last row: the run goes on from an earlier step."""
        self._each.take()
        self.phases.take()
        self._consecutive_skips = torch.zeros_like(self._consecutive_skips)
        self._before = None
        self._steps = 0
        self._saves = {}

    def set_start_time(self, began: float) -> None:
        """Set when the process of the run began, by the clock."""
        self._wall.began = began

    def begin(self) -> None:
        """Begin the run, before its first step or evaluation. The time until now is startup."""
        self._wall.begin()

    def exclude_from_step_time(self, phase: str = ASIDE) -> AbstractContextManager[None]:
        """Measure what is no part of a step: `evaluation`, `checkpoint`, or what has no name."""
        return self.phases.measured(phase)

    def remembered(self) -> dict[str, float]:
        """Return what a checkpoint keeps of the run's time."""
        return self._wall.remembered()

    def conclusion(self) -> Event:
        """Return where the time of this process went, after its last row. Waits for the device."""
        return self._wall.conclusion(None if self._gpu is None else self._gpu.energy_kwh)

    def observe(self, result: StepResult) -> None:
        """Note a step, without waiting for it."""
        if self._last is None:
            self._wall.end_first_step()
        self._last = result
        self._steps += 1
        self._each.add(result)
        skipped = result.skipped.to(self._consecutive_skips)
        self._consecutive_skips = (self._consecutive_skips + skipped) * skipped

    def observe_save(self, stall_seconds: float, write_seconds: float) -> None:
        """Note a finished checkpoint: how long training stood still, and how long the writing took."""
        self._saves = {
            "perf/checkpoint_stall_seconds": stall_seconds,
            "perf/checkpoint_write_seconds": write_seconds,
        }

    def summary(self, further: Mapping[str, float | Tensor] | None = None) -> DeferredRow:
        """Return the row of the steps since the last call, to be read later. Collective.

        Args:
            further: Columns; a tensor is a whole number that the device knows.
        """
        result, further = self._last, further or {}
        assert result is not None, "summary before the first step"
        interval = Interval(result, self._steps, self.phases.take())
        numbers = self._each.take()
        own = self._own_numbers(interval)
        sums = torch.cat(
            [
                share.to(torch.float64).reshape(-1)
                for share in (numbers.pop("loss share"), *result.extras.values())
            ]
        )
        if self._job.ranks.world_size > 1:
            with self.phases.measured("communication"):  # of the next row
                sums, numbers["own"] = self._from_all(sums, list(own.values()))
        numbers["loss"] = sums[: self._steps]
        numbers |= zip((f"sum {key}" for key in result.extras), sums[self._steps :], strict=True)
        numbers |= {f"further {key}": each for key, each in further.items() if isinstance(each, Tensor)}
        numbers["skips in a row"] = self._consecutive_skips
        interval.measured.update(self._memory.take() | self._saves | self._wall.so_far())
        if self._profile is not None:
            forward = interval.spent.seconds().get("forward", 0.0)
            interval.measured.update(self._profile.row(self._steps, forward))
        self._steps = 0
        self._saves = {}
        return DeferredRow(numbers, partial(self._seen, interval, own, further))

    def _own_numbers(self, interval: Interval) -> dict[str, float]:
        """Return what this rank measures of itself for all ranks.

        See Seen.own, GpuMeter.take and NodeMeter.take. On a GPU seconds are those of the interval before: the
        device is still at work on this one.
        """
        before, self._before = self._before, interval
        measured = before if self._on_gpu else interval
        numbers = {}
        if measured is not None:
            spent = measured.spent.seconds()
            seconds = {phase: spent.get(phase, 0.0) for phase in self._own_phases}
            seconds["step"] = training_seconds(spent)
            numbers = {key: each / measured.steps for key, each in seconds.items()}
        if self._job.device.type == "cpu":
            numbers["load"] = os.getloadavg()[0] / (os.cpu_count() or 1)
        numbers |= self._memory.in_use()
        if self._gpu is not None:
            numbers |= {f"gpu {number}": each for number, each in enumerate(self._gpu.take())}
        if self._nodes is not None:
            numbers |= {f"node {key}": each for key, each in enumerate(self._nodes.take())}
        return numbers

    def _from_all(self, shares: Tensor, own: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the sums of the shares (N,) over all ranks, and every rank's own numbers (ranks, len(own)).

        One collective.
        """
        ranks = self._job.ranks
        everyones = shares.new_zeros(ranks.world_size, len(own))
        for place, value in zip(everyones[ranks.rank], own, strict=True):
            place.fill_(value)  # waits for nothing, as a copy from the host would
        both = self._job.all_reduce_sum(torch.cat([shares, everyones.reshape(-1)]))
        return both[: len(shares)], both[len(shares) :].reshape(everyones.shape)

    def _seen(
        self,
        interval: Interval,
        own: Mapping[str, float],
        further: Mapping[str, float | Tensor],
        host: dict[str, Tensor],
    ) -> Seen:
        """Return the row and what is behind it. Waits for the device.

        Args:
            own: What this rank measured of itself.
            further: See `summary`.
            host: The numbers of the device.
        """
        result = interval.last
        spent = interval.spent.seconds()
        losses = mean_loss(host["loss"], host["count"])
        row = {"train/loss": float(losses[-1])}
        sums = {key[4:]: value for key, value in host.items() if key.startswith("sum ")}
        row |= {f"train/{name}": mean for name, mean in further_means(sums, self._workload.means).items()}
        norms = host["norm"].tolist() if "norm" in host else []
        if norms:
            row["train/grad_norm"] = norms[-1]
        if result.loss_scale is not None:
            row["train/loss_scale"] = result.loss_scale
        if skips := int(host["skips in a row"]):
            row["train/skipped_in_a_row"] = skips
        row |= self._rates(spent, interval.steps, counted=float(host["count"].sum())) | interval.measured
        row |= self._wall.by_phase(spent)
        everyones = host["own"].T.tolist() if "own" in host else [[each] for each in own.values()]
        owns = dict(zip(own, everyones, strict=True))
        gpu = [owns.pop(key) for key in list(owns) if key.startswith("gpu ")]
        nodes = [owns.pop(key) for key in list(owns) if key.startswith("node ")]
        if self._job.ranks.world_size > 1:
            row |= slowest(owns)
        if gpu and self._gpu is not None:
            row |= self._gpu.row(gpu)
        if self._nodes is not None:
            row |= self._nodes.row(nodes, gpu[0] if gpu else ())
        for key, each in further.items():
            row[key] = int(host[f"further {key}"]) if isinstance(each, Tensor) else each
        resident = row["memory/peak_resident_gib"]
        self.peak_gib = max(self.peak_gib, row.get("memory/peak_reserved_gib", resident))
        self.samples_per_second.append(row["perf/samples_per_second"])
        return Seen(
            row=row,
            losses=losses.tolist(),
            norms=norms,
            skipped=[bool(each) for each in host["skipped"]],
            counts=host["count"].tolist(),
            own=owns,
        )

    def _rates(self, spent: Mapping[str, float], steps: int, counted: float) -> dict[str, float]:
        work = self._workload
        seconds = training_seconds(spent)
        rates = {
            "perf/step_time_seconds": seconds / steps,
            "perf/data_time_seconds": spent.get("data", 0.0) / steps,
            "perf/samples_per_second": work.samples_per_step * steps / seconds,
        }
        if work.unit == "tokens":
            rates["perf/tokens_per_second"] = counted / seconds
            rates["perf/tokens_per_second_per_device"] = counted / seconds / work.world_size
        if work.flops_per_sample and work.peak_flops:
            peak_samples = rates["perf/samples_per_second"] / work.world_size / work.peak_flops
            rates["perf/mfu"] = work.flops_per_sample * peak_samples
            if again := work.recomputed_flops():
                rates["perf/hfu"] = (work.flops_per_sample + again) * peak_samples
        return rates


def slowest(own: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Columns, from the seconds a step that ranks need without waiting for each other; see Seen.own."""
    phases = [own[phase] for phase in ("data", "forward", "backward") if phase in own]
    together = [sum(each) for each in zip(*phases, strict=True)]
    if len(together) < 2:
        return {}
    slowest = max(range(len(together)), key=lambda rank: together[rank])
    return {
        "perf/own_time_seconds": median_low(together),
        "perf/slowest_rank": slowest,
        "perf/slowest_rank_own_time_seconds": together[slowest],
    }
