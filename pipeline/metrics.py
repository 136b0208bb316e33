"""Meters: what a run tells about itself. Arithmetic on what the loop hands in; the clock is injected.

The device is waited for where a row is read, and where a profiler was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor

from pipeline.device_meters import GpuMeter, MemoryMeter, NodeMeter
from pipeline.distributed.phases import ASIDE, NO_STEP, Phases, Spent
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Profile, StepResult
from pipeline.engine.normalize import further_means, mean_loss
from pipeline.events import Event
from pipeline.objectives import Objective
from pipeline.objectives.interface import TimedObjective
from pipeline.rows import LateRow
from pipeline.step_numbers import StepNumbers
from pipeline.wall_time import WallTime
from pipeline.watchers import Seen


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

    def seconds(self) -> float:
        """Of training. Waits for the device."""
        spent = self.spent.seconds()
        return max(1e-9, sum(seconds for phase, seconds in spent.items() if phase not in NO_STEP))


class Meters:
    """Watches the steps between two rows of the log."""

    def __init__(
        self,
        workload: Workload,
        job: Job,
        clock: Callable[[], float],
        profile: Profile | None = None,
        own_phases: Sequence[str] = (),
        wall: WallTime | None = None,
        gpu: GpuMeter | None = None,
        nodes: NodeMeter | None = None,
    ):
        """What is measured of which run.

        Args:
            profile: What DeepSpeed's profilers were asked for.
            own_phases: Besides the reading of data those in which no rank waits for another.
            wall: Where the time of the engine's steps goes.
            gpu: None: nobody is asked about the device.
            nodes: None: nor about the machines.
        """
        self._workload = workload
        self._job = job
        self._wall = wall or WallTime(Phases(clock, job.device), clock)
        self._gpu = gpu or GpuMeter(torch.device("cpu"))
        self._nodes = nodes
        self._memory = MemoryMeter(job.device)
        self._own_phases = ("data", *own_phases)
        self._profile = profile
        self._each = StepNumbers(job.device)
        self._last: StepResult | None = None
        self._consecutive_skips = torch.zeros((), device=job.device)
        self._before: Interval | None = None
        self._restart()

    def _restart(self) -> None:
        self._steps = 0
        self._saves: dict[str, float] = {}

    def restart(self) -> None:
        """Leaves out what was measured since the last row: the run goes on from elsewhere."""
        self._each.take()
        self._wall.phases.take()
        self._consecutive_skips = torch.zeros_like(self._consecutive_skips)
        self._before = None
        self._restart()

    def count_from(self, began: float) -> None:
        """When the process of the run did begin, by the clock."""
        self._wall.began = began

    def begin(self) -> None:
        """Before the first step, and the evaluation before it: what was until now is the run's start."""
        self._wall.begin()

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Measures the time that the step waits for its next batch.

        A GPU works on while the host reads data, and only what it waits itself is lost.
        """
        return self._wall.phases.measured("data")

    def timed(self, objective: Objective) -> Objective:
        """The objective, its forwards measured."""
        return TimedObjective(objective, self._wall.phases)

    def paused(self, phase: str = ASIDE) -> AbstractContextManager[None]:
        """Around what is no part of a step: `evaluation`, `checkpoint`, or what has no name."""
        return self._wall.phases.measured(phase)

    def remembered(self) -> dict[str, float]:
        """What a checkpoint keeps of the run's time."""
        return self._wall.remembered()

    def conclusion(self) -> Event:
        """Where the time of this process went. After its last row; waits for the device."""
        return self._wall.conclusion(self._gpu.energy_kwh)

    def observe(self, result: StepResult) -> None:
        """Notes a step, without waiting for it."""
        self._wall.stepped()
        self._last = result
        self._steps += 1
        self._each.add(result)
        skipped = result.skipped.to(self._consecutive_skips)
        self._consecutive_skips = (self._consecutive_skips + skipped) * skipped

    def observe_save(self, stall_seconds: float, write_seconds: float) -> None:
        """Notes a finished checkpoint: how long training stood still, and how long the writing took."""
        self._saves = {
            "perf/checkpoint_stall_seconds": stall_seconds,
            "perf/checkpoint_write_seconds": write_seconds,
        }

    def summary(self, further: Mapping[str, float | Tensor] | None = None) -> LateRow:
        """The last step's numbers and the rates since the last summary, to be read later. Collective.

        Args:
            further: Columns; a tensor is a whole number that the device knows.
        """
        result, further = self._last, further or {}
        assert result is not None, "summary before the first step"
        interval = Interval(result, self._steps, self._wall.phases.take())
        numbers = self._each.take()
        own = self._own_numbers(interval)
        shares = [numbers.pop("loss share"), *result.extras.values()]
        with self._wall.phases.measured("communication"):  # of the next row
            sums, everyones = self._from_all(shares, list(own.values()))
        numbers |= {"loss": sums[: self._steps]} | ({"own": everyones} if everyones is not None else {})
        numbers |= dict(zip((f"sum {key}" for key in result.extras), sums[self._steps :], strict=True))
        numbers |= {f"further {key}": each for key, each in further.items() if isinstance(each, Tensor)}
        numbers["skips in a row"] = self._consecutive_skips
        interval.measured.update(self._memory.take() | self._saves | self._wall.so_far())
        if self._profile is not None:
            forward = interval.spent.seconds().get("forward", 0.0)
            interval.measured.update(self._profile.row(self._steps, forward))
        self._restart()
        return LateRow(numbers, lambda host: self._seen(interval, host, own, further))

    def _own_numbers(self, interval: Interval) -> dict[str, float]:
        """What this rank measures of itself, to be told to all: see Seen.own, GpuMeter.take and
        NodeMeter.take.

        On a GPU seconds are those of the interval before: the device is still at work on this one.
        """
        before, self._before = self._before, interval
        measured = interval if self._job.device.type != "cuda" else before
        numbers = {}
        if measured is not None:
            spent = measured.spent.seconds()
            seconds = {phase: spent.get(phase, 0.0) for phase in self._own_phases}
            seconds["step"] = measured.seconds()
            numbers = {key: each / measured.steps for key, each in seconds.items()}
        if self._job.device.type == "cpu":
            numbers["load"] = os.getloadavg()[0] / (os.cpu_count() or 1)
        gpu = {f"gpu {number}": each for number, each in enumerate(self._gpu.take())}
        nodes = self._nodes.take() if self._nodes is not None else []
        return numbers | self._memory.in_use() | gpu | {f"node {key}": each for key, each in enumerate(nodes)}

    def _from_all(self, shares: Sequence[Tensor], own: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """The shares' sums over all ranks, (N,), and every rank's own numbers, (ranks, len(own)), by one
        collective; None: there is one rank."""
        ranks = self._job.ranks
        sums = torch.cat([share.to(torch.float64).reshape(-1) for share in shares])
        if ranks.world_size == 1:
            return sums, None
        everyones = sums.new_zeros(ranks.world_size, len(own))
        for place, value in zip(everyones[ranks.rank], own, strict=True):
            place.fill_(value)  # waits for nothing, as a copy from the host would
        both = self._job.all_reduce_sum(torch.cat([sums, everyones.reshape(-1)]))
        return both[: len(sums)], both[len(sums) :].reshape(everyones.shape)

    def _seen(
        self,
        interval: Interval,
        host: dict[str, Tensor],
        own: Mapping[str, float],
        further: Mapping[str, float | Tensor],
    ) -> Seen:
        result = interval.last
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
        row |= self._rates(interval, float(host["count"].sum())) | interval.measured
        row |= self._wall.by_phase(interval.spent)
        everyones = host["own"].T.tolist() if "own" in host else [[each] for each in own.values()]
        owns = dict(zip(own, everyones, strict=True))
        gpu = [owns.pop(key) for key in list(owns) if key.startswith("gpu ")]
        nodes = [owns.pop(key) for key in list(owns) if key.startswith("node ")]
        row |= slowest(owns) | (self._gpu.row(gpu) if gpu else {})
        if self._nodes is not None:
            row |= self._nodes.row(nodes, gpu[0] if gpu else ())
        for key, each in further.items():
            row[key] = int(host[f"further {key}"]) if isinstance(each, Tensor) else each
        return Seen(
            row=row,
            losses=losses.tolist(),
            norms=norms,
            skipped=[bool(each) for each in host["skipped"]],
            counts=host["count"].tolist(),
            own=owns,
        )

    def _rates(self, interval: Interval, counted: float) -> dict[str, float]:
        work, steps = self._workload, interval.steps
        data_seconds, seconds = interval.spent.seconds().get("data", 0.0), interval.seconds()
        rates = {
            "perf/step_time_seconds": seconds / steps,
            "perf/data_time_seconds": data_seconds / steps,
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
