"""Prints the banner before a run's first step: model, split, batch, steps, memory and paths.

Only rank 0 prints it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from pipeline.config.model_schema import AdapterConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.data.loader import TrainLoader
from pipeline.distributed.machine import available_memory, read_memory_usage
from pipeline.distributed.process_group import Job, describe_device
from pipeline.engine.interface import Engine
from pipeline.engine.schedule import describe_missed_peak
from pipeline.files import format_bytes
from pipeline.models.adapters import measure_reduced_base
from pipeline.models.sharding import count_elements
from pipeline.training.loop import RunComponents

log = logging.getLogger(__name__)


def print_run_banner(
    settings: Settings, resolved: ResolvedSettings, parts: RunComponents, directory: Path
) -> None:
    """Log the banner, one line for each entry, with the texts aligned."""
    for name, text in banner_lines(settings, resolved, parts, directory):
        log.info("%s", f"{name:<10}  {text}")


def banner_lines(
    settings: Settings, resolved: ResolvedSettings, parts: RunComponents, directory: Path
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line of the banner."""
    job = parts.job
    engine = parts.engine
    data = settings.config.data
    own = [(count_elements(p), p.requires_grad) for p in engine.module.parameters()]
    share = sum(n for n, trains in own if trains) / max(1, sum(n for n, _ in own))  # of this rank's part
    frozen = f", {share:.1%} of them trained" if share < 1 else ""
    model = settings.config.model
    language = model.language_model
    name = model.kind if language is None else language.architecture or language.pretrained or model.kind
    yield "model", f"{name}, {engine.num_parameters:,} parameters{frozen}"
    if (adapter := settings.config.adapter) is not None:
        whence = "" if settings.config.optimizer.learning_rate else " (by the model's width)"
        rate = f"learning rate {parts.learning_rate.peak:.2e}{whence}"
        yield "adapter", f"{adapter.kind}{_describe_base(adapter, engine)}; {rate}"
    file = f" ({settings.deepspeed_path})" if settings.deepspeed_path is not None else ""
    ranks = f"{job.ranks.world_size} rank{'s' * (job.ranks.world_size > 1)} on {job.device.type}"
    yield "split", f"{resolved.split}{file}; {ranks}"
    yield "batch", str(resolved.batch_plan)
    samples = resolved.batch_plan.global_batch_size
    length = data.tokens_per_row
    max_steps = parts.schedule.max_steps
    tokens = f", {max_steps * samples * length:,} tokens" if length else ""
    done = f"; {parts.start.global_step} done" if parts.start.global_step else ""
    speed = "" if parts.expectation.speed is None else f"; {parts.expectation.speed}"
    yield "steps", f"{max_steps:,}, {max_steps * samples:,} samples{tokens}{done}{speed}"
    yield "memory", "; ".join(filter(None, (parts.expectation.memory, format_device_memory(job.device))))
    yield "run", f"{directory}: metrics.jsonl, checkpoints/, logs/"


def _describe_base(adapter: AdapterConfig, engine: Engine) -> str:
    """Return dtype and size of an adapter's base; empty if the base has the precision of the run."""
    values, num_bytes = measure_reduced_base(engine.module)
    if not values:
        return ""
    dtype = adapter.quantize or engine.precision
    each = num_bytes / values
    return f" over a base in {dtype} ({values:,} weights in {format_bytes(num_bytes)}, {each:.3f} bytes each)"


def format_device_memory(device: torch.device) -> str:
    """Return free and total memory of the GPU, or of the machine if the run computes on a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)  # by the model, which is already built
        return f"{format_bytes(free + own)} free of the GPU's {format_bytes(total)}"
    now = read_memory_usage()
    owner = "cgroup" if now.by_cgroup else "machine"
    return f"{format_bytes(available_memory())} free of the {owner}'s {format_bytes(now.limit)}"


def warn_about_choices(
    config: RunConfig, resolved: ResolvedSettings, job: Job, loader: TrainLoader, max_steps: int
) -> None:
    """Log warnings about a slow precision, a schedule that hardly fits the run, and too little data."""
    device = describe_device(job.device)
    if (slow := resolved.warn_of_slow_precision(device)) is not None:
        log.warning("%s", slow)
    for line in filter(
        None, (describe_missed_peak(config.schedule, max_steps), describe_data_shortage(loader))
    ):
        log.warning("%s", line)


def describe_data_shortage(loader: TrainLoader) -> str | None:
    """Return a warning if a single step reads more samples than the training data has, else `None`."""
    samples = loader.samples_per_epoch
    step = loader.global_batch_size
    if samples >= step:
        return None
    return (
        f"the training data has {samples} samples and a step takes {step}: each step sees some of them more "
        "than once; add data, or lower batch.global_batch_size"
    )
