"""Meters: what a run tells about itself. Arithmetic on what the loop hands in; the clock is injected.

The device is waited for where a row is read, and where a profiler was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.distributed.process_group import Job
from pipeline.distributed.span import Moment, Span
from pipeline.distributed.stragglers import Stragglers
from pipeline.engine.interface import Profile, StepResult
from pipeline.engine.normalize import further_means, mean_loss
from pipeline.memory_meter import MemoryMeter
from pipeline.objectives import Batch, LossSum, Objective
from pipeline.rows import LateRow
from pipeline.starvation import Starvation

log = logging.getLogger(__name__)


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
    num_workers: int = 0
    """Processes that read data for one rank."""
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What the objective reports besides its loss; see Objective.means."""


@dataclass(frozen=True)
class Interval:
    """The steps between two rows of the log: what the host knows of them when the last one is launched."""

    last: StepResult
    steps: int
    began: Moment
    ended: Moment
    excluded: float
    """Seconds of it that were no training."""
    data: Callable[[], float]
    """Seconds that it waited for data. Waits for the device."""
    measured: dict[str, float]
    """Columns of the row: saves, memory."""


class Meters:
    """Watches the steps between two rows of the log."""

    def __init__(
        self,
        workload: Workload,
        job: Job,
        clock: Callable[[], float],
        lowest_scale: float | None = None,
        stragglers: Stragglers | None = None,
        profile: Profile | None = None,
    ):
        """What is measured of which run.

        Args:
            lowest_scale: The fp16 loss scale below which DeepSpeed does not go, or the fixed one.
            stragglers: Compares the ranks; None: they do not all do the same work, or there is one.
            profile: What DeepSpeed's profilers were asked for.
        """
        self._workload = workload
        self._job = job
        self._lowest_scale = lowest_scale
        self._clock = clock
        self._memory = MemoryMeter(job.device)
        self._data_wait = Span(clock, job.device)
        self._forward = Span(clock, job.device)
        self._stragglers = stragglers
        self._profile = profile
        self._starvation = Starvation(workload.num_workers)
        self._last: StepResult | None = None
        self._consecutive_skips = torch.zeros((), device=job.device)
        self._own_before: Callable[[], float] | None = None
        self._restart(Moment(clock, job.device))

    def _restart(self, now: Moment) -> None:
        self._began = now
        self._excluded = 0.0
        self._steps = 0
        self._count = torch.zeros((), dtype=torch.float64, device=self._job.device)
        self._skipped = torch.zeros((), device=self._job.device)
        self._saves: dict[str, float] = {}

    def restart(self) -> None:
        """Leaves out what was measured since the last row: the run goes on from elsewhere."""
        self._data_wait.take()
        self._forward.take()
        self._restart(Moment(self._clock, self._job.device))

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Measures the time that the step waits for its next batch. See Span."""
        return self._data_wait.measured()

    def timed(self, objective: Objective) -> Objective:
        """The objective, its forwards measured: with the wait for data the part of a step that a rank spends
        alone, where its forward enters no collective."""
        is_timed = self._stragglers is not None or self._profile is not None
        return TimedObjective(objective, self._forward) if is_timed else objective

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves evaluation and saving out of the step time. Waits for the device, as they would."""
        if self._job.device.type == "cuda":
            torch.cuda.synchronize()
        before = self._clock()
        yield
        self._excluded += self._clock() - before

    def observe(self, result: StepResult) -> None:
        """Notes a step, without waiting for it."""
        self._last = result
        self._steps += 1
        self._count += result.global_count
        skipped = result.skipped.to(self._consecutive_skips)
        self._skipped = self._skipped + skipped
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
        data, forward = self._data_wait.take(), self._forward.take()
        numbers = self._from_all({"loss": result.loss_sum, **result.extras}, self._own_seconds(data, forward))
        numbers |= {f"further {key}": each for key, each in further.items() if isinstance(each, Tensor)}
        numbers |= {"global count": result.global_count, "counted": self._count}
        numbers |= {"skipped": self._skipped, "skips in a row": self._consecutive_skips}
        if isinstance(result.grad_norm, Tensor):
            numbers["norm"] = result.grad_norm
        measured = self._memory.take() | self._saves
        if self._profile is not None:
            measured |= self._profile.row(self._steps, forward())
        now = Moment(self._clock, self._job.device)
        interval = Interval(result, self._steps, self._began, now, self._excluded, data, measured)
        self._restart(now)
        return LateRow(numbers, lambda host: self._row(interval, host, further))

    def _own_seconds(self, data: Callable[[], float], forward: Callable[[], float]) -> float | None:
        """This rank's a step, for the comparison of ranks; None: there is none.

        On a GPU they are those of the interval before: the device is still at work on this one.
        """
        if self._stragglers is None:
            return None
        steps = self._steps

        def own() -> float:
            return (data() + forward()) / steps

        before, self._own_before = self._own_before, own
        if self._job.device.type != "cuda":
            return own()
        return before() if before is not None else None

    def _from_all(self, shares: Mapping[str, Tensor], own_seconds: float | None) -> dict[str, Tensor]:
        """The step's sums over all ranks, and every rank's own seconds a step, by one collective."""
        ranks = self._job.ranks
        sums = torch.stack([share.to(torch.float64) for share in shares.values()])
        if own_seconds is None:
            return dict(zip((f"sum {key}" for key in shares), self._job.all_reduce_sum(sums), strict=True))
        seconds = sums.new_zeros(ranks.world_size)
        seconds[ranks.rank].fill_(own_seconds)  # a fill waits for nothing, as a copy from the host would
        sums = self._job.all_reduce_sum(torch.cat([sums, seconds]))
        named = dict(zip((f"sum {key}" for key in shares), sums, strict=False))
        return named | {"own seconds": sums[len(shares) :]}

    def _row(
        self, interval: Interval, host: dict[str, Tensor], further: Mapping[str, float | Tensor]
    ) -> dict[str, float]:
        result, steps = interval.last, interval.steps
        sums = {key[4:]: value for key, value in host.items() if key.startswith("sum ")}
        row = {"train/loss": float(mean_loss(sums["loss"], host["global count"]))}
        row |= {f"train/{name}": mean for name, mean in further_means(sums, self._workload.means).items()}
        if result.grad_norm is not None:
            row["train/grad_norm"] = float(host.get("norm", result.grad_norm))
        if result.loss_scale is not None:
            row["train/loss_scale"] = result.loss_scale
        if skipped := int(host["skipped"]):
            log.warning("%s", self._what_was_skipped(skipped, steps, result.loss_scale))
        if skips := int(host["skips in a row"]):
            row["train/skipped_in_a_row"] = skips
        rates = self._rates(interval, float(host["counted"]))
        row |= rates | interval.measured
        if self._stragglers is not None and "own seconds" in host:
            own = host["own seconds"].tolist()
            row |= self._stragglers.row(own)
            line = self._stragglers.look(steps, own, rates["perf/step_time_seconds"])
            if line is not None:
                log.warning("%s", line)
        for key, each in further.items():
            row[key] = int(host[f"further {key}"]) if isinstance(each, Tensor) else each
        return row

    def _what_was_skipped(self, skipped: int, steps: int, scale: float | None) -> str:
        line = f"{skipped} of {steps} steps skipped: the gradient was infinite or NaN"
        if scale is None:
            return line
        if self._lowest_scale is not None and scale <= self._lowest_scale:
            return (
                f"{line}, and the fp16 loss scale cannot fall below {scale:g}; use bf16, lower "
                "optimizer.learning_rate, or raise schedule.warmup_steps"
            )
        return f"{line}; the fp16 loss scale is now {scale:g}"

    def _rates(self, interval: Interval, counted: float) -> dict[str, float]:
        work, steps, data_seconds = self._workload, interval.steps, interval.data()
        seconds = max(1e-9, interval.ended.seconds_since(interval.began) - interval.excluded)
        warning = self._starvation.look(steps, data_seconds, seconds)
        if warning is not None:
            log.warning("%s", warning)
        rates = {
            "perf/step_time_seconds": seconds / steps,
            "perf/data_time_seconds": data_seconds / steps,
            "perf/samples_per_second": work.samples_per_step * steps / seconds,
        }
        if work.unit == "tokens":
            rates["perf/tokens_per_second"] = counted / seconds
            rates["perf/tokens_per_second_per_device"] = counted / seconds / work.world_size
        if work.flops_per_sample and work.peak_flops:
            flops = rates["perf/samples_per_second"] * work.flops_per_sample
            rates["perf/mfu"] = flops / work.world_size / work.peak_flops
        return rates


class TimedObjective:
    """An objective whose forwards are measured."""

    def __init__(self, objective: Objective, span: Span):
        self._objective = objective
        self._span = span

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        with self._span.measured():
            return self._objective(model, batch)
