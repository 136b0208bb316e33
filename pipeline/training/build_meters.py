"""What is measured of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.checkpoint.manifest import Manifest
from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.engine.profile import profile_asked_for
from pipeline.models.batch_norm import is_synchronised
from pipeline.models.sizes import block_flops_per_token, flops_per_token, fp8_share
from pipeline.monitoring.device_meters import GpuMeter, NodeMeter
from pipeline.monitoring.metrics import Meters, Workload
from pipeline.monitoring.trackers.jsonl import METRICS_FILE
from pipeline.monitoring.wall_time import Earlier, WallTime
from pipeline.objectives import Objective
from pipeline.planner.peak_flops import peak_flops


def build_meters(
    config: RunConfig,
    resolved: Resolved,
    *,
    job: Job,
    engine: Engine,
    objective: Objective,
    directory: Path,
    resumed: Manifest | None = None,
) -> Meters:
    """Build the meters of a run, before its record is opened, which may take rows back.

    Args:
        resumed: The checkpoint that the run resumes from.
    """
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
    length = config.data.tokens_per_row
    language = config.model.language_model
    cost = flops_per_token(engine.module, length, frozen=config.adapter is not None)
    in_fp8 = fp8_share(engine.module, language.fp8 if language is not None else "none", cost)
    workload = Workload(
        samples_per_step=resolved.plan.global_batch_size,
        world_size=job.ranks.world_size,
        unit=objective.unit,
        means=objective.means,
        flops_per_sample=None if length is None or cost is None else length * cost,
        peak_flops=peak_flops(name, engine.precision, resolved.tf32, in_fp8),
        recomputed_flops=_recomputed(language, engine, length),
    )
    clock = time.perf_counter
    profile = profile_asked_for(resolved.deepspeed, engine, clock, directory, job.ranks.is_main_process)
    earlier = Earlier()
    if job.ranks.is_main_process:  # whose rows are kept, and whose word a checkpoint has
        earlier = Earlier.of(directory / METRICS_FILE, resumed.state if resumed is not None else {})
    replicas = max(1, torch.cuda.device_count()) if resolved.split.parallel == "dp" else 1
    wall = WallTime(
        engine.phases,
        clock,
        earlier=earlier,
        devices=job.ranks.world_size * replicas,
        price=config.log.price_per_device_hour,
        communicates=job.ranks.world_size > 1,
    )
    is_asked = engine.device.type == "cuda" or earlier.energy_kwh > 0
    gpu = GpuMeter(engine.device, earlier.energy_kwh) if is_asked else None
    nodes = NodeMeter(job.everyone) if config.log.nodes else None
    return Meters(
        workload,
        job,
        clock,
        profile,
        own_phases=own_phases(resolved, engine),
        wall=wall,
        gpu=gpu,
        nodes=nodes,
    )


def own_phases(resolved: Resolved, engine: Engine) -> tuple[str, ...]:
    """What a rank computes without waiting for others inside.

    Not a backward that sends gradients beside it, nor where layers of several ranks work on one sample.
    """
    split = resolved.split
    if split.world_size == 1 or split.tensor_parallel > 1 or split.sequence_parallel > 1:
        return ()
    if any(is_synchronised(layer) for layer in engine.module.modules()):
        return ()
    return ("forward", "backward") if split.pipeline_stages > 1 else ("forward",)


def _recomputed(model: CausalLMConfig | None, engine: Engine, length: int | None) -> Callable[[], float]:
    """FLOPs of a row that its backward makes once more: of products, of which `selective` keeps all."""
    if length is None or model is None or model.activation_checkpointing in ("none", "selective"):
        return float
    from pipeline.models.activation_checkpointing import share_recomputed

    of_blocks = length * block_flops_per_token(engine.module, length)
    return lambda: of_blocks * share_recomputed(engine.module)
