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
    for name, text in generate_banner_lines(settings, resolved, parts, directory):
        log.info("%s", f"{name:<10}  {text}")


def generate_banner_lines(
    settings: Settings, resolved: ResolvedSettings, parts: RunComponents, directory: Path
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line of the banner."""
    job = parts.job
    engine = parts.engine
    data = settings.config.data
    # Counted on this rank's shard: its share of trained parameters is about that of the whole model.
    parameters = list(engine.module.parameters())
    num_elements = sum(count_elements(parameter) for parameter in parameters)
    num_trained = sum(count_elements(parameter) for parameter in parameters if parameter.requires_grad)
    trained_share = num_trained / max(1, num_elements)
    trained = f", {trained_share:.1%} of them trained" if trained_share < 1 else ""
    model = settings.config.model
    language = model.language_model
    name = model.kind if language is None else language.architecture or language.pretrained or model.kind
    adapter = settings.config.adapter
    base = "" if adapter is None else _describe_base(adapter, engine)
    yield "model", f"{name}, {engine.num_parameters:,} parameters{trained}{base}"
    file = f" ({settings.deepspeed_path})" if settings.deepspeed_path is not None else ""
    ranks = f"{job.ranks.world_size} rank{'s' * (job.ranks.world_size > 1)} on {job.device.type}"
    yield "split", f"{resolved.split}{file}; {ranks}"
    yield "batch", str(resolved.batch_plan)
    samples = resolved.batch_plan.global_batch_size
    length = data.tokens_per_row
    max_steps = parts.schedule.max_steps
    tokens = f", {max_steps * samples * length:,} tokens" if length else ""
    done = f"; {parts.start.global_step} done" if parts.start.global_step else ""
    rate = ""
    if settings.config.optimizer.learning_rate is None:
        rate = f"; learning rate {parts.learning_rate.peak:.2e} by the model's width"
    speed = "" if parts.expectation.speed is None else f"; {parts.expectation.speed}"
    yield "steps", f"{max_steps:,}, {max_steps * samples:,} samples{tokens}{done}{rate}{speed}"
    yield "memory", "; ".join(filter(None, (parts.expectation.memory, format_device_memory(job.device))))
    yield "run", f"{directory}: metrics.jsonl, checkpoints/, logs/"


def _describe_base(adapter: AdapterConfig, engine: Engine) -> str:
    """Return dtype and size of an adapter's base; empty if the base has the precision of the run."""
    num_weights, num_bytes = measure_reduced_base(engine.module)
    if not num_weights:
        return ""
    dtype = adapter.quantize or engine.precision
    size = f"{num_weights:,} weights in {format_bytes(num_bytes)}, {num_bytes / num_weights:.3f} bytes each"
    return f" over a base in {dtype} ({size})"


def format_device_memory(device: torch.device) -> str:
    """Return free and total memory of the GPU, or of the machine if the run computes on a CPU.

    Memory that this process has reserved on the GPU counts as free.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)  # by the model, which is already built
        return f"{format_bytes(free + reserved)} free of the GPU's {format_bytes(total)}"
    usage = read_memory_usage()
    owner = "cgroup" if usage.by_cgroup else "machine"
    return f"{format_bytes(available_memory())} free of the {owner}'s {format_bytes(usage.limit)}"


def warn_about_choices(
    config: RunConfig, resolved: ResolvedSettings, job: Job, loader: TrainLoader, max_steps: int
) -> None:
    """Log warnings about a slow precision, a schedule that hardly fits the run, and too little data."""
    device = describe_device(job.device)
    warnings = (
        resolved.warn_of_slow_precision(device),
        describe_missed_peak(config.schedule, max_steps),
        describe_data_shortage(loader),
    )
    for warning in warnings:
        if warning is not None:
            log.warning("%s", warning)


def describe_data_shortage(loader: TrainLoader) -> str | None:
    """Return a warning if a single step reads more samples than the training data has, else `None`."""
    samples = loader.samples_per_epoch
    batch = loader.global_batch_size
    if samples >= batch:
        return None
    return (
        f"the training data has {samples} samples and a step takes {batch}: each step reads some of them "
        "more than once; add data, or lower batch.global_batch_size"
    )
