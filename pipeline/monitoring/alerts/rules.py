"""Table of all alerts, in the order in which they are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from pipeline.config.deepspeed_json import lowest_loss_scale
from pipeline.config.loading import get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.engine.memory import freed_at_once
from pipeline.monitoring.alerts import Watcher, restore
from pipeline.monitoring.alerts.learning import (
    GRAD_NORM_SPIKE,
    LOSS_SPIKE,
    EvalDivergence,
    FrozenParameters,
    LossRise,
    NonFinite,
    NonFiniteEval,
    NonFiniteSteps,
    SpikeDetector,
    Spikes,
    no_targets,
)
from pipeline.monitoring.alerts.performance import DataStarvation, MemoryGrowth, SlowRank, ThroughputDrop
from pipeline.monitoring.events import NO_TARGETS


@dataclass(frozen=True)
class WatchedRun:
    """What alerts are built from."""

    config: RunConfig
    resolved: Resolved
    engine: Engine
    job: Job
    detectors: tuple[SpikeDetector, SpikeDetector]
    """Detectors of the losses and of the gradient norms."""

    @property
    def alerts(self) -> bool:
        """Whether the recipe asks for alerts."""
        return self.config.watch.alerts

    @property
    def tells_of_nonfinite(self) -> bool:
        """Whether steps that are not finite are reported."""
        return self.alerts or self.config.watch.on_nonfinite != "log"

    @property
    def tells_of_spikes(self) -> bool:
        """Whether spikes are reported. Where they are skipped, none ever counts as a step."""
        on_spike = self.config.watch.on_spike
        return on_spike != "skip" and (self.alerts or on_spike != "log")


@dataclass(frozen=True)
class Alert:
    """How a rule is built, and whether a run has it."""

    build: Callable[[WatchedRun], Watcher]
    is_asked: Callable[[WatchedRun], bool] = attrgetter("alerts")


ALERTS = {
    "non_finite": Alert(
        lambda run: NonFinite(lowest_loss_scale(run.resolved.deepspeed)), attrgetter("tells_of_nonfinite")
    ),
    LOSS_SPIKE: Alert(lambda run: Spikes(LOSS_SPIKE, run.detectors[0]), attrgetter("tells_of_spikes")),
    GRAD_NORM_SPIKE: Alert(
        lambda run: Spikes(GRAD_NORM_SPIKE, run.detectors[1]), attrgetter("tells_of_spikes")
    ),
    NO_TARGETS: Alert(lambda run: no_targets),
    "non_finite_eval": Alert(lambda run: NonFiniteEval()),
    "loss_rise": Alert(lambda run: LossRise()),
    "eval_divergence": Alert(lambda run: EvalDivergence()),
    "data_starvation": Alert(lambda run: DataStarvation(run.config.loader.num_workers)),
    "throughput_drop": Alert(lambda run: ThroughputDrop(_place(run.resolved, run.engine, run.job))),
    "slow_rank": Alert(
        lambda run: SlowRank(
            run.job.everyone, run.config.distributed.straggler_share, run.resolved.split.pipeline_stages
        )
    ),
    "memory_growth": Alert(lambda run: MemoryGrowth()),
    "frozen_parameter": Alert(
        lambda run: FrozenParameters(run.engine.shards, run.job.gather_object),
        # To read all of a disk takes minutes.
        lambda run: run.alerts and not _lies_on_a_disk(run.resolved),
    ),
}
"""Name of the event -> its rule, in the order in which rules are asked. A user's own rule is a callback
(`callbacks` of the recipe), whose answer can alert."""


@freed_at_once()  # checksums of all weights
def build_watchers(
    config: RunConfig,
    resolved: Resolved,
    *,
    job: Job,
    engine: Engine,
    start_step: int,
    max_steps: int,
    detectors: tuple[SpikeDetector, SpikeDetector],
    remembered: Mapping[str, Any],
) -> tuple[Watcher, ...]:
    """Return the alerts that a run asks for, and what ends it. Collective: reads the engine's parameters.

    Args:
        config: The recipe.
        resolved: Both files together.
        job: Process group of the run.
        engine: Engine of the run.
        start_step: Step that the run begins at.
        max_steps: Step that it ends at.
        detectors: Spike detectors of the losses and of the gradient norms.
        remembered: What the run's checkpoint keeps; empty at its start.
    """
    run = WatchedRun(config, resolved, engine, job, detectors)
    alerts = [alert.build(run) for alert in ALERTS.values() if alert.is_asked(run)]
    restore(alerts, remembered.get("watchers", {}))
    return (*alerts, NonFiniteSteps(engine.precision, start_step, max_steps))


def _place(resolved: Resolved, engine: Engine, job: Job) -> str:
    """See ThroughputDrop."""
    is_gpu = engine.device.type == "cuda"
    device = torch.cuda.get_device_name(engine.device) if is_gpu else f"{os.cpu_count()} cores"
    machines = len({each.host for each in job.everyone}) or 1
    return f"{resolved.split}; {job.ranks.world_size} ranks, {machines} machines, {device}"


def _lies_on_a_disk(resolved: Resolved) -> bool:
    keys = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
    return any(get_dotted(resolved.deepspeed or {}, key) == "nvme" for key in keys)
