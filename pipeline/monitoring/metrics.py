"""Meters of losses, rates, memory, devices and wall time. Callers pass the clock.

The host waits for the device only when it reads a row, and for the event at the end of a run. Each row makes
one all-reduce, which sums the losses and gathers the numbers that every rank measures itself, such as its
seconds and memory.
"""

from __future__ import annotations

import math
import os
import resource
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

from pipeline.distributed.phases import (
    OTHER_OUTSIDE_STEPS,
    PHASES_OUTSIDE_STEPS,
    Moment,
    Phases,
    TimelineSegment,
    format_columns,
    seconds_between,
)
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import StepResult, compute_extra_means, mean_loss
from pipeline.files import GIB, format_duration
from pipeline.monitoring.alerts import RowDetails
from pipeline.monitoring.events import TIME, Event
from pipeline.monitoring.row_queue import DeferredRow
from pipeline.monitoring.trackers.jsonl import read_newest

MIN_QUERY_SECONDS = 1.0  # seconds between two queries of the driver: each takes the host up to 1 ms


class GpuMeter:
    """Queries the driver about this rank's GPU, and combines the readings of all ranks for a row."""

    def __init__(
        self,
        device: torch.device,
        queries: Sequence[Callable[[torch.device], float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Store the queries; the first `read` makes them.

        Args:
            device: GPU of this rank.
            queries: Functions that return the utilisation in percent, the power in milliwatts and the
                temperature in degrees Celsius. `None` uses those of torch, which need nvidia-ml-py.
            clock: Monotonic clock in seconds.
        """
        self._device = device
        self._queries = queries or (torch.cuda.utilization, torch.cuda.power_draw, torch.cuda.temperature)
        self._clock = clock
        self._queried_at = -math.inf
        self._readings = [math.nan] * len(self._queries)

    def read(self) -> list[float]:
        """Return the utilisation (0 to 1), the power in watts and the temperature in degrees Celsius.

        A reading that the driver does not support is NaN. Readings are reused for MIN_QUERY_SECONDS.
        """
        if self._clock() - self._queried_at >= MIN_QUERY_SECONDS:
            self._queried_at = self._clock()
            percent, milliwatts, celsius = (self._query(query) for query in self._queries)
            self._readings = [percent / 100, milliwatts / 1000, celsius]
        return self._readings

    def _query(self, query: Callable[[torch.device], float]) -> float:
        try:
            return float(query(self._device))
        except Exception:  # nvidia-ml-py is missing, or the card lacks the sensor; the error types differ
            return math.nan

    @staticmethod
    def combine_ranks(numbers: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the columns of a row: mean utilisation, total power and maximum temperature.

        A column is missing if no rank has a reading.

        Args:
            numbers: For each reading of `read`, the values of all ranks; NaN if a rank has none.
        """
        utilization, power, temperature = (
            [value for value in all_ranks if not math.isnan(value)] for all_ranks in numbers
        )
        row: dict[str, float] = {}
        if utilization:
            row["gpu/utilization"] = sum(utilization) / len(utilization)
        if power:
            row["gpu/power_watts"] = sum(power)
        if temperature:
            row["gpu/temperature_celsius"] = max(temperature)
        return row


ELAPSED_COLUMN = "perf/elapsed_seconds"
COST_COLUMN = "perf/cost"
MIN_SHOWN_SHARE = 0.005  # phases with a smaller share of the process's wall time are not in the closing line


@dataclass(frozen=True)
class PriorUsage:
    """Wall time and cost of the run's processes before this one."""

    elapsed_seconds: float = 0.0
    """Wall time of all earlier processes."""
    training_seconds: float = 0.0
    """Seconds spent on the steps that the run's checkpoint includes."""
    cost: float = 0.0
    """Cost of all devices, in the currency of the price."""

    @staticmethod
    def read(record: Path, state: Mapping[str, Any]) -> PriorUsage:
        """Read the time and cost from metrics.jsonl and from the checkpoint that the run resumes from.

        Must be called before the rows after the checkpoint are removed from metrics.jsonl: they say how long
        the earlier processes ran. The checkpoint says how much of that time its steps took.

        Args:
            record: Path of metrics.jsonl.
            state: `WallTime.state_dict` of the checkpoint; empty without one.
        """
        row = read_newest(record, ELAPSED_COLUMN) or {}
        time_event = read_newest(record, _get_field_name(ELAPSED_COLUMN)) or {}

        def find_largest(column: str) -> float:
            field_name = _get_field_name(column)
            return max(row.get(column, 0.0), time_event.get(field_name, 0.0), state.get(field_name, 0.0))

        return PriorUsage(
            elapsed_seconds=find_largest(ELAPSED_COLUMN),
            training_seconds=state.get("training_seconds", 0.0),
            cost=find_largest(COST_COLUMN),
        )


def _get_field_name(column: str) -> str:
    """Return the field of a TIME event that corresponds to a column: the column without its group."""
    return column.partition("/")[2]


class WallTime:
    """Measures the wall time of this process and, together with its earlier processes, of the run.

    Phases never overlap, and time outside of any phase is a column too, so the columns add up to the wall
    time. Communication that DDP and ZeRO overlap with the backward counts as backward: separating it would
    need events on the streams of the collectives.
    """

    def __init__(
        self,
        phases: Phases,
        clock: Callable[[], float],
        *,
        earlier: PriorUsage | None = None,
        devices: int = 1,
        price: float | None = None,
        communicates: bool = False,
    ):
        """Start measuring; until `begin` is called, time counts as startup.

        Args:
            phases: Phases of the engine's steps.
            clock: Clock of the phases.
            earlier: Time and cost of the run's earlier processes; `None` for none.
            devices: Number of devices of all ranks together.
            price: Price of one device per hour, in any currency; `None` if unknown, and then rows have no
                cost.
            communicates: Whether there are other ranks to wait for.
        """
        self.phases = phases
        self._clock = clock
        self.start_time = clock()
        """Time at which the process started, by the clock."""
        self._earlier = earlier or PriorUsage()
        self._price_per_second = None if price is None else price * devices / 3600
        self._communicates = communicates
        self._startup_seconds = 0.0
        self._first_step_end: Moment = None  # `None` before the first step has ended
        self._is_first_step_reported = False
        self.begin()

    def begin(self) -> None:
        """End the startup and start the training loop."""
        self._startup_seconds = self._clock() - self.start_time
        self.phases.restart()
        self._loop_began = self.phases.began

    def end_first_step(self) -> None:
        """Record that the first step has ended; further calls do nothing."""
        if self._first_step_end is None:
            self._first_step_end = self.phases.now()

    def phase_columns(self, spent: Mapping[str, float]) -> dict[str, float]:
        """Return the `time/` columns of a row, and once per process the duration of the first step.

        Args:
            spent: Seconds by phase of the row's steps.
        """
        by_phase = format_columns(spent, communicates=self._communicates)
        row = {f"time/{phase}_seconds": seconds for phase, seconds in by_phase.items()}
        if not self._is_first_step_reported:
            first_step_seconds = self._read_first_step_seconds()
            if first_step_seconds is not None:
                self._is_first_step_reported = True
                row["perf/first_step_seconds"] = first_step_seconds
        return row

    def _read_first_step_seconds(self) -> float | None:
        """Return the seconds from the start of the process to the end of its first step.

        Waits for the device.

        Returns:
            The seconds; `None` before the first step has ended.
        """
        if self._first_step_end is None:
            return None
        return self._startup_seconds + seconds_between(self._loop_began, self._first_step_end)

    def elapsed_columns(self) -> dict[str, float]:
        """Return elapsed time, goodput and cost of the run up to now. Does not wait for the device."""
        state = self.state_dict()
        elapsed = state["elapsed_seconds"]
        row = {ELAPSED_COLUMN: elapsed, "perf/goodput": state["training_seconds"] / max(elapsed, 1e-9)}
        if self._price_per_second is not None:
            row[COST_COLUMN] = self._earlier.cost + self._price_per_second * (self._clock() - self.start_time)
        return row

    def state_dict(self) -> dict[str, float]:
        """Return the seconds of the run and of its steps, for a checkpoint."""
        process = self._clock() - self.start_time
        totals = self.phases.totals()
        training = (
            process - self._startup_seconds - sum(totals.get(phase, 0.0) for phase in PHASES_OUTSIDE_STEPS)
        )
        return {
            "elapsed_seconds": self._earlier.elapsed_seconds + process,
            "training_seconds": self._earlier.training_seconds + max(0.0, training),
        }

    def build_time_event(self) -> Event:
        """Return the event with the wall time of this process by phase, and the run's goodput and cost.

        Waits for the device.
        """
        phases = format_columns(self.phases.totals(synchronize=True), communicates=self._communicates)
        process = max(1e-9, self._clock() - self.start_time)
        row = self.elapsed_columns()
        fields = {"startup_seconds": self._startup_seconds}
        first_step_seconds = self._read_first_step_seconds()
        if first_step_seconds is not None:
            fields["first_step_seconds"] = first_step_seconds
        fields |= {f"{phase}_seconds": seconds for phase, seconds in phases.items()}
        fields |= {_get_field_name(key): value for key, value in row.items()}
        by_size = sorted({"startup": self._startup_seconds, **phases}.items(), key=lambda item: -item[1])
        shares = [
            f"{name} {seconds / process:.0%}"
            for name, seconds in by_size
            if seconds > MIN_SHOWN_SHARE * process
        ]
        message = f"Wall time {format_duration(process)}: {', '.join(shares)}. Goodput "
        message += f"{row['perf/goodput']:.1%} of the run's {format_duration(row[ELAPSED_COLUMN])}"
        if COST_COLUMN in row:
            message += f", cost {row[COST_COLUMN]:.2f}"
        return Event(TIME, message, level="info", fields=fields)


@dataclass(frozen=True)
class Workload:
    """Constants of the run that convert seconds to rates."""

    samples_per_step: int
    """Samples of a global batch."""
    world_size: int
    """Number of ranks; each has one device."""
    unit: str
    """Unit that the loss counts: `tokens` or `samples`."""
    flops_per_sample: float | None
    """Model FLOPs of forward and backward of one sample; `None` if unknown.

    A packed sample's attention counts over its full length, as in published MFU (PaLM, appendix B)."""
    peak_flops: float | None
    """Dense peak of one device in the run's precision, in FLOP/s; `None` if unknown."""
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Additional means that the objective reports; see Objective.means."""
    recomputed_flops: Callable[[], float] = float
    """Function that returns the FLOPs of one sample that the backward recomputes; 0 by default. Each row of
    metrics calls it, since the first step may choose how many blocks are recomputed."""


@dataclass(frozen=True)
class RowInterval:
    """The steps between two rows: what the host knows of them once it has launched the last one."""

    last: StepResult
    """Result of the last step."""
    steps: int
    """Number of steps."""
    spent: TimelineSegment
    """Seconds by phase since the previous row; reading them waits for the device."""
    host_columns: dict[str, float] = field(default_factory=dict)
    """Columns that need nothing from the device: saves, memory, and the run's time so far. `collect_row`
    adds them."""


def sum_step_seconds(spent: Mapping[str, float]) -> float:
    """Return the seconds of training steps, given the seconds by phase; at least 1 ns, to divide by."""
    return max(1e-9, sum(seconds for phase, seconds in spent.items() if phase not in PHASES_OUTSIDE_STEPS))


PROC_STATUS = Path("/proc/self/status")
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5), clear_refs: resets the peak resident size and nothing else


def read_resident_bytes() -> int:
    """Return the current resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def read_peak_resident_bytes() -> int:
    """Return the peak resident bytes since the process started or `reset_resident_peak` was called.

    Raises:
        OSError: The system is not Linux.
    """
    for line in PROC_STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{PROC_STATUS} has no VmHWM")


def read_process_peak_bytes() -> int:
    """Return the peak resident bytes, on any system.

    On Linux they are those of `read_peak_resident_bytes`. Elsewhere they may include the memory of the
    process that started this one, and `reset_resident_peak` cannot reset them.
    """
    try:
        return read_peak_resident_bytes()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_resident_peak() -> None:
    """Reset the peak to the current resident bytes.

    Raises:
        OSError: The system is not Linux, or /proc cannot be written.
    """
    PROC_CLEAR_REFS.write_text(RESET_PEAK)


class MemoryMeter:
    """Measures the memory of one rank on its device and its host. Does not wait for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        # Read now, so that the first row does not count the retries of the search for a micro-batch size.
        self._last_stats: Mapping[str, Any] = {}
        if device.type == "cuda":
            self._last_stats = torch.cuda.memory_stats(device)

    def read_and_reset(self) -> dict[str, float]:
        """Return the memory columns of a row, and reset the peaks of the device.

        The host's peak is never reset here. It is the peak since the process started or, if the run searched
        for a micro-batch size on a CPU, since the end of that search.
        """
        host = {"memory/peak_resident_gib": read_process_peak_bytes() / GIB}
        if self._device.type != "cuda":
            return host
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        columns = memory_columns(stats, self._last_stats)
        self._last_stats = stats
        return columns | host

    def read_in_use(self) -> dict[str, float]:
        """Return the GiB that this process uses, as in RowDetails.per_rank.

        `host` is its private memory now, without mapped files. `device` is the peak that it allocated on the
        GPU since the last row.
        """
        memory = psutil.Process().memory_info()
        used = {"host": (memory.rss - getattr(memory, "shared", 0)) / GIB}  # `shared` is missing on macOS
        if self._device.type == "cuda":
            used["device"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return used


def memory_columns(stats: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Return the memory columns between two readings of torch.cuda.memory_stats.

    `memory/alloc_retries` counts how often the allocator ran out of memory since the earlier reading. Each
    time it waited for the device and freed its cached blocks. A step with a retry is slow, and a slightly
    larger one would fail.

    Args:
        stats: Current reading.
        before: Earlier reading; if it is empty, retries count from the start of the process.
    """
    return {
        "memory/peak_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
        "memory/peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "memory/alloc_retries": stats["num_alloc_retries"] - before.get("num_alloc_retries", 0),
    }


class Meters:
    """Measures the steps between two rows.

    The loss share (this rank's part of the loss sum), count, norm and skipped flag of each step stay on the
    device until the next row. Then one all-reduce sums the loss shares of all these steps. So every rank's
    alerts know every step's exact loss, and measuring a step neither waits for the device nor communicates.
    """

    def __init__(
        self,
        workload: Workload,
        job: Job,
        clock: Callable[[], float],
        *,
        local_phases: Sequence[str] = (),
        wall: WallTime | None = None,
        gpu: GpuMeter | None = None,
    ):
        """Start measuring.

        Args:
            workload: Constants that convert seconds to rates.
            job: Process group of the run.
            clock: Monotonic clock in seconds.
            local_phases: Phases, besides reading data, in which no rank waits for another.
            wall: Meter of the wall time; `None` creates one, which starts now.
            gpu: Meter of the GPU; `None` leaves its columns out.
        """
        self._workload = workload
        self._job = job
        self._on_gpu = job.device.type == "cuda"
        self._wall = wall or WallTime(Phases(clock, job.device), clock)
        self.phases = self._wall.phases
        """Phases of the engine's steps."""
        self._gpu = gpu
        self._memory = MemoryMeter(job.device)
        self._local_phases = ("data", *local_phases)
        self._step_numbers: dict[str, list[Tensor]] = {}
        """Name -> 0-dim tensor of each step since the last row."""
        self._last_result: StepResult | None = None
        self._consecutive_skips = torch.zeros((), device=job.device)
        self._last_interval: RowInterval | None = None
        self._steps = 0
        """Number of steps since the last row."""
        self._save_columns: dict[str, float] = {}
        """Columns of the last checkpoint that finished since the last row."""
        self.peak_gib = 0.0
        """Peak memory of this rank over all rows, in GiB: reserved on a GPU, else resident."""
        self.samples_per_second: list[float] = []
        """Samples per second of all ranks together, of each row that was read so far."""

    def restart(self) -> None:
        """Drop the measurements since the last row, after the run rolled back to an earlier step."""
        self._step_numbers = {}
        self.phases.pop_segment()
        self._consecutive_skips = torch.zeros_like(self._consecutive_skips)
        self._last_interval = None
        self._steps = 0
        self._save_columns = {}

    def set_start_time(self, start_time: float) -> None:
        """Set the time at which the run's process started, in seconds of the clock."""
        self._wall.start_time = start_time

    def begin(self) -> None:
        """Start the run, before its first step or evaluation. The time until now counts as startup."""
        self._wall.begin()

    def exclude_from_step_time(self, phase: str = OTHER_OUTSIDE_STEPS) -> AbstractContextManager[None]:
        """Return a context manager whose time is not part of a step.

        Args:
            phase: `evaluation`, `checkpoint`, or the default for anything else.
        """
        return self.phases.measure(phase)

    def state_dict(self) -> dict[str, float]:
        """Return the seconds of the run and of its steps, for a checkpoint."""
        return self._wall.state_dict()

    def build_time_event(self) -> Event:
        """Return the event with the wall time of this process by phase. Waits for the device."""
        return self._wall.build_time_event()

    def observe(self, result: StepResult) -> None:
        """Add a step to the next row. Does not wait for the device."""
        if self._last_result is None:
            self._wall.end_first_step()
        self._last_result = result
        self._steps += 1
        numbers = {"loss share": result.loss_sum, "count": result.global_count, "skipped": result.skipped}
        norm = result.grad_norm
        if norm is not None:
            if not isinstance(norm, Tensor):
                norm = torch.full((), norm, device=self._job.device)
            numbers["norm"] = norm
        for name, number in numbers.items():
            self._step_numbers.setdefault(name, []).append(number)
        skipped = result.skipped.to(self._consecutive_skips)
        self._consecutive_skips = (self._consecutive_skips + skipped) * skipped  # 0 after a step that counts

    def observe_save(self, stall_seconds: float, write_seconds: float) -> None:
        """Add the times of a finished checkpoint to the next row, which shows only the last checkpoint.

        Args:
            stall_seconds: Seconds for which training waited.
            write_seconds: Seconds that writing took on its thread.
        """
        self._save_columns = {
            "perf/checkpoint_stall_seconds": stall_seconds,
            "perf/checkpoint_write_seconds": write_seconds,
        }

    def collect_row(self, extra_columns: Mapping[str, float | Tensor] | None = None) -> DeferredRow:
        """Return the row of the steps since the last call, to be read later. Collective.

        Args:
            extra_columns: Additional columns; a tensor has one integer on the device.
        """
        result = self._last_result
        extra_columns = extra_columns or {}
        assert result is not None, "collect_row before the first step"
        interval = RowInterval(result, self._steps, self.phases.pop_segment())
        numbers = {name: torch.stack(each) for name, each in self._step_numbers.items()}
        self._step_numbers = {}
        rank_numbers = self._measure_rank(interval)
        shares = (numbers.pop("loss share"), *result.extras.values())
        sums = torch.cat([share.to(torch.float64).reshape(-1) for share in shares])
        if self._job.ranks.world_size > 1:
            with self.phases.measure("communication"):  # counts in the next row
                sums, numbers["per rank"] = self._reduce(sums, list(rank_numbers.values()))
        numbers["loss"] = sums[: self._steps]
        numbers |= zip((f"sum {key}" for key in result.extras), sums[self._steps :], strict=True)
        numbers |= {f"extra {key}": each for key, each in extra_columns.items() if isinstance(each, Tensor)}
        numbers["skips in a row"] = self._consecutive_skips
        interval.host_columns.update(
            self._memory.read_and_reset() | self._save_columns | self._wall.elapsed_columns()
        )
        self._steps = 0
        self._save_columns = {}
        return DeferredRow(numbers, partial(self._build_details, interval, rank_numbers, extra_columns))

    def _measure_rank(self, interval: RowInterval) -> dict[str, float]:
        """Return this rank's numbers, which all ranks receive: RowDetails.per_rank and GpuMeter.read.

        On a GPU the seconds are those of the previous interval, since the device still computes this one.
        They are missing in the first row, and in the first one after a rollback.
        """
        timed = self._last_interval if self._on_gpu else interval
        self._last_interval = interval
        numbers = {}
        if timed is not None:
            spent = timed.spent.seconds()
            seconds = {phase: spent.get(phase, 0.0) for phase in self._local_phases}
            seconds["step"] = sum_step_seconds(spent)
            numbers = {key: each / timed.steps for key, each in seconds.items()}
        if self._job.device.type == "cpu":
            numbers["load"] = os.getloadavg()[0] / (os.cpu_count() or 1)
        numbers |= self._memory.read_in_use()
        if self._gpu is not None:
            numbers |= {f"gpu {number}": each for number, each in enumerate(self._gpu.read())}
        return numbers

    def _reduce(self, shares: Tensor, rank_numbers: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Sum the shares over all ranks and gather every rank's numbers, in one all-reduce.

        Args:
            shares: This rank's shares, (N,).
            rank_numbers: Numbers of this rank.

        Returns:
            The sums, (N,), and the numbers of all ranks, (ranks, len(rank_numbers)).
        """
        ranks = self._job.ranks
        all_ranks = shares.new_zeros(ranks.world_size, len(rank_numbers))
        for entry, value in zip(all_ranks[ranks.rank], rank_numbers, strict=True):
            entry.fill_(value)  # a copy from the host would wait for the device
        both = self._job.all_reduce_sum(torch.cat([shares, all_ranks.reshape(-1)]))
        return both[: len(shares)], both[len(shares) :].reshape(all_ranks.shape)

    def _build_details(
        self,
        interval: RowInterval,
        rank_numbers: Mapping[str, float],
        extra_columns: Mapping[str, float | Tensor],
        host: dict[str, Tensor],
    ) -> RowDetails:
        """Return the row and its details. Updates `peak_gib` and `samples_per_second`.

        Args:
            interval: Steps of the row.
            rank_numbers: This rank's numbers; see `_measure_rank`.
            extra_columns: See `collect_row`.
            host: Numbers of the device, copied to the host.
        """
        result = interval.last
        spent = interval.spent.seconds()
        losses = mean_loss(host["loss"], host["count"])
        row = {"train/loss": float(losses[-1])}
        sums = {key.removeprefix("sum "): value for key, value in host.items() if key.startswith("sum ")}
        means = compute_extra_means(sums, self._workload.means)
        row |= {f"train/{name}": mean for name, mean in means.items()}
        norms = host["norm"].tolist() if "norm" in host else []
        if norms:
            row["train/grad_norm"] = norms[-1]
        if result.loss_scale is not None:
            row["train/loss_scale"] = result.loss_scale
        skips = int(host["skips in a row"])
        if skips:
            row["train/skipped_in_a_row"] = skips
        row |= self._compute_rates(spent, interval.steps, targets=float(host["count"].sum()))
        row |= interval.host_columns
        row |= self._wall.phase_columns(spent)
        if "per rank" in host:
            all_ranks = host["per rank"].T.tolist()
        else:  # a single rank
            all_ranks = [[number] for number in rank_numbers.values()]
        per_rank = dict(zip(rank_numbers, all_ranks, strict=True))
        gpu = [per_rank.pop(key) for key in list(per_rank) if key.startswith("gpu ")]
        if self._job.ranks.world_size > 1:
            row |= slowest_rank_columns(per_rank)
        if gpu:
            row |= GpuMeter.combine_ranks(gpu)
        for key, each in extra_columns.items():
            row[key] = int(host[f"extra {key}"]) if isinstance(each, Tensor) else each
        resident = row["memory/peak_resident_gib"]
        self.peak_gib = max(self.peak_gib, row.get("memory/peak_reserved_gib", resident))
        self.samples_per_second.append(row["perf/samples_per_second"])
        return RowDetails(
            row=row,
            losses=losses.tolist(),
            grad_norms=norms,
            skipped=[bool(each) for each in host["skipped"]],
            target_counts=host["count"].tolist(),
            per_rank=per_rank,
        )

    def _compute_rates(self, spent: Mapping[str, float], steps: int, targets: float) -> dict[str, float]:
        """Return the `perf/` columns of throughput and FLOPs.

        Args:
            spent: Seconds by phase of the steps.
            steps: Number of steps.
            targets: Targets of all steps and ranks, in the unit of the loss.
        """
        work = self._workload
        seconds = sum_step_seconds(spent)
        rates = {
            "perf/step_time_seconds": seconds / steps,
            "perf/data_time_seconds": spent.get("data", 0.0) / steps,
            "perf/samples_per_second": work.samples_per_step * steps / seconds,
        }
        if work.unit == "tokens":
            rates["perf/tokens_per_second"] = targets / seconds
            rates["perf/tokens_per_second_per_device"] = targets / seconds / work.world_size
        if work.flops_per_sample and work.peak_flops:
            samples_per_peak_flop = rates["perf/samples_per_second"] / work.world_size / work.peak_flops
            rates["perf/mfu"] = work.flops_per_sample * samples_per_peak_flop
            recomputed = work.recomputed_flops()
            if recomputed:
                rates["perf/hfu"] = (work.flops_per_sample + recomputed) * samples_per_peak_flop
        return rates


def slowest_rank_columns(per_rank: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the columns about the slowest rank.

    The columns are empty with fewer than two ranks, or in a row without seconds.

    Args:
        per_rank: Seconds per step by phase of all ranks; see RowDetails.per_rank.
    """
    phases = [per_rank[phase] for phase in ("data", "forward", "backward") if phase in per_rank]
    own_seconds = [sum(each) for each in zip(*phases, strict=True)]
    if len(own_seconds) < 2:
        return {}
    slowest = max(range(len(own_seconds)), key=lambda rank: own_seconds[rank])
    return {
        "perf/own_time_seconds": median_low(own_seconds),
        "perf/slowest_rank": slowest,
        "perf/slowest_rank_own_time_seconds": own_seconds[slowest],
    }
