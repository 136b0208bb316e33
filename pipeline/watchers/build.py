"""What a run is watched by, in the order in which they are asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.band import Band
from pipeline.config.deepspeed_json import lowest_loss_scale
from pipeline.config.loading import get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.distributed.process_group import Job
from pipeline.engine.host_memory import freed_at_once
from pipeline.engine.interface import Engine
from pipeline.watchers import Watcher, restore
from pipeline.watchers.evaluations import EvalDivergence, NonFiniteEval
from pipeline.watchers.frozen import FrozenParameters
from pipeline.watchers.memory import MemoryGrowth
from pipeline.watchers.no_targets import NoTargets
from pipeline.watchers.non_finite import NonFinite, NonFiniteSteps
from pipeline.watchers.rise import LossRise
from pipeline.watchers.slow_rank import SlowRank
from pipeline.watchers.speed import DataStarvation, ThroughputDrop
from pipeline.watchers.spikes import Spikes


@freed_at_once()  # checksums of all weights
def build_watchers(
    config: RunConfig,
    resolved: Resolved,
    engine: Engine,
    job: Job,
    steps: tuple[int, int],
    bands: tuple[Band, Band],
    remembered: Mapping[str, Any],
) -> tuple[Watcher, ...]:
    """What a run asks for. Collective: the engine's parameters are looked at.

    Args:
        steps: Where it begins, and where it ends.
        bands: What is normal of its losses and its gradient norms.
        remembered: What its checkpoint keeps; empty at its start.
    """
    watch = config.watch
    alerts: list[Watcher] = []
    if watch.alerts or watch.on_nonfinite != "log":
        alerts = [NonFinite(lowest_loss_scale(resolved.deepspeed))]
    # Where spikes are skipped, none ever counts as a step.
    if watch.on_spike != "skip" and (watch.alerts or watch.on_spike != "log"):
        alerts += [Spikes.of_losses(bands[0]), Spikes.of_norms(bands[1])]
    if watch.alerts:
        alerts += [
            NoTargets(),
            NonFiniteEval(),
            LossRise(),
            EvalDivergence(),
            DataStarvation(config.loader.num_workers),
            ThroughputDrop(_place(resolved, engine, job)),
            SlowRank(job.everyone, config.distributed.straggler_share, resolved.split.pipeline_stages),
            MemoryGrowth(),
        ]
        if not _lies_on_a_disk(resolved):  # to read all of it takes minutes
            alerts.append(FrozenParameters(engine.shards, job.gather_object))
    restore(alerts, remembered.get("watchers", {}))
    return (*alerts, NonFiniteSteps(engine.precision, *steps))


def _place(resolved: Resolved, engine: Engine, job: Job) -> str:
    """See ThroughputDrop."""
    is_gpu = engine.device.type == "cuda"
    device = torch.cuda.get_device_name(engine.device) if is_gpu else f"{os.cpu_count()} cores"
    machines = len({each.host for each in job.everyone}) or 1
    return f"{resolved.split}; {job.ranks.world_size} ranks, {machines} machines, {device}"


def _lies_on_a_disk(resolved: Resolved) -> bool:
    keys = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
    return any(get_dotted(resolved.deepspeed or {}, key) == "nvme" for key in keys)
