"""Meters: what a run tells about itself. Arithmetic on what the loop hands in; the clock is injected.

The device is waited for in `summary` alone, on log steps.
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
from pipeline.distributed.span import Span
from pipeline.distributed.stragglers import Stragglers
from pipeline.engine.interface import Profile, StepResult
from pipeline.engine.normalize import further_means, mean_loss
from pipeline.memory_meter import MemoryMeter
from pipeline.objectives import Batch, LossSum, Objective

log = logging.getLogger(__name__)

# What the wait for data must be before a run is told of it: share of the step, seconds a step (a worker
# process would take as long to hand a batch over), and the steps it is measured over.
STARVATION_SHARE = 0.1
STARVATION_SECONDS = 1e-3
STARVATION_STEPS = 10


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
        self._restart()

    def _restart(self) -> None:
        self._start = self._clock()
        self._excluded = 0.0
        self._steps = 0
        self._count = torch.zeros((), dtype=torch.float64, device=self._job.device)
        self._skipped = torch.zeros((), device=self._job.device)
        self._saves: dict[str, float] = {}

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

    def summary(self) -> dict[str, float]:
        """The last step's numbers and the rates since the last summary. Collective; waits for the device."""
        result = self._last
        assert result is not None, "summary before the first step"
        data_seconds = self._data_wait.take()
        shares = {"loss": result.loss_sum, **result.extras}
        forward_seconds = self._forward.take()
        sums, own = self._from_all(shares, data_seconds + forward_seconds)
        row = {"train/loss": float(mean_loss(sums["loss"], result.global_count))}
        row |= {f"train/{name}": mean for name, mean in further_means(sums, self._workload.means).items()}
        if result.grad_norm is not None:
            row["train/grad_norm"] = float(result.grad_norm)
        if result.loss_scale is not None:
            row["train/loss_scale"] = result.loss_scale
        if skipped := int(self._skipped):
            log.warning("%s", self._what_was_skipped(skipped, result.loss_scale))
        if skips := int(self._consecutive_skips):
            row["train/skipped_in_a_row"] = skips
        rates = self._rates(data_seconds)
        row.update(rates | self._saves)
        if self._profile is not None:
            row.update(self._profile.row(self._steps, forward_seconds))
        if self._stragglers is not None:
            row.update(self._stragglers.row(own))
            line = self._stragglers.look(self._steps, own, rates["perf/step_time_seconds"])
            if line is not None:
                log.warning("%s", line)
        self._restart()
        return row

    def _from_all(
        self, shares: Mapping[str, Tensor], own_seconds: float
    ) -> tuple[dict[str, Tensor], list[float]]:
        """The step's sums over all ranks, and every rank's own seconds a step, by one collective."""
        ranks = self._job.ranks
        seconds = torch.zeros(0 if self._stragglers is None else ranks.world_size, dtype=torch.float64)
        if self._stragglers is not None:
            seconds[ranks.rank] = own_seconds / self._steps
        own = torch.stack([share.to(torch.float64) for share in shares.values()])
        sums = self._job.all_reduce_sum(torch.cat([own, seconds.to(own.device)]))
        return dict(zip(shares, sums, strict=False)), sums[len(shares) :].tolist()

    def _what_was_skipped(self, skipped: int, scale: float | None) -> str:
        line = f"{skipped} of {self._steps} steps skipped: the gradient was infinite or NaN"
        if scale is None:
            return line
        if self._lowest_scale is not None and scale <= self._lowest_scale:
            return (
                f"{line}, and the fp16 loss scale cannot fall below {scale:g}; use bf16, lower "
                "optimizer.learning_rate, or raise schedule.warmup_steps"
            )
        return f"{line}; the fp16 loss scale is now {scale:g}"

    def _rates(self, data_seconds: float) -> dict[str, float]:
        work, seconds = self._workload, max(1e-9, self._clock() - self._start - self._excluded)
        warning = self._starvation.look(self._steps, data_seconds, seconds)
        if warning is not None:
            log.warning("%s", warning)
        rates = {
            "perf/step_time_seconds": seconds / self._steps,
            "perf/data_time_seconds": data_seconds / self._steps,
            "perf/samples_per_second": work.samples_per_step * self._steps / seconds,
        }
        if work.unit == "tokens":
            tokens = float(self._count) / seconds
            rates["perf/tokens_per_second"] = tokens
            rates["perf/tokens_per_second_per_device"] = tokens / work.world_size
        if work.flops_per_sample and work.peak_flops:
            flops = rates["perf/samples_per_second"] * work.flops_per_sample
            rates["perf/mfu"] = flops / work.world_size / work.peak_flops
        return rates | self._memory.take()


class Starvation:
    """Says once in a run that the step waits for data, and what to change."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._is_started = False
        self._is_told = False
        self._steps = 0
        self._data = self._seconds = 0.0

    def look(self, steps: int, data_seconds: float, seconds: float) -> str | None:
        """The warning, after an interval of the log; intervals are put together to ten steps or more."""
        if not self._is_started:  # the first one is the start of the workers, and the compiler's
            self._is_started = True
            return None
        self._steps += steps
        self._data += data_seconds
        self._seconds += seconds
        if self._steps < STARVATION_STEPS or self._is_told:
            return None
        share, wait = self._data / self._seconds, self._data / self._steps
        step = self._seconds / self._steps
        self._steps, self._data, self._seconds = 0, 0.0, 0.0
        if share <= STARVATION_SHARE or wait < STARVATION_SECONDS:
            return None
        self._is_told = True
        return (
            f"waiting for data is {share:.0%} of the step ({1000 * wait:.0f} of {1000 * step:.0f} ms); have "
            f"more processes read it: loader.num_workers={max(2, 2 * self._num_workers)}"
        )


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
