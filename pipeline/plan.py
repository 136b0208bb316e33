"""What a run says before its first step: what is trained, how the work is split, how far it goes, what memory
that takes and where everything will lie. For rank 0; numbers of the whole job stand as such."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.config.half_masters import has_half_masters, has_half_states
from pipeline.config.loading import get_dotted
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.settings import Resolved, Settings
from pipeline.distributed.machine import available_memory, memory_now
from pipeline.engine.interface import Engine
from pipeline.models.adapters import held_apart, more_than_it_holds
from pipeline.models.sharding import number_of
from pipeline.parts import Parts

log = logging.getLogger(__name__)

MIB, GIB = 2**20, 2**30
HELD = "weights, gradients and optimizer states, activations come on top"


def announce(settings: Settings, resolved: Resolved, parts: Parts, directory: Path) -> None:
    """A line of the log each; their first words stand under each other."""
    for name, text in plan(settings, resolved, parts, directory):
        log.info("%s", f"{name:<10}  {text}")
    length, split = getattr(settings.config.data, "sequence_length", None), resolved.split
    if settings.config.adapter is not None and length is not None:
        samples = parts.max_steps * resolved.plan.global_batch_size
        tokens = min(samples, getattr(parts.loader, "samples_per_epoch", 0)) * length
        cut = split.pipeline_stages * split.tensor_parallel
        if (told := more_than_it_holds(parts.engine.module, cut, tokens)) is not None:
            log.warning("%s", told)


def plan(settings: Settings, resolved: Resolved, parts: Parts, directory: Path) -> Iterator[tuple[str, str]]:
    """What there is to say, by its name."""
    job, engine, data = parts.job, parts.engine, settings.config.data
    own = [(number_of(p), p.requires_grad) for p in engine.module.parameters()]
    share = sum(n for n, trains in own if trains) / max(1, sum(n for n, _ in own))  # of this rank's part
    frozen = f", {share:.1%} of them trained" if share < 1 else ""
    model = settings.config.model
    name = getattr(model, "architecture", None) or getattr(model, "pretrained", None) or model.kind
    yield "model", f"{name}, {engine.num_parameters:,} parameters{frozen}"
    if (adapter := settings.config.adapter) is not None:
        whence = "" if settings.config.optimizer.learning_rate else " (by the model's width)"
        rate = f"learning rate {parts.peak_learning_rate:.2e}{whence}"
        yield "adapter", f"{adapter.kind}{_how_the_base_is_held(adapter, engine)}; {rate}"
    file = f" ({settings.split_path})" if settings.split_path is not None else ""
    ranks = f"{job.ranks.world_size} rank{'s' * (job.ranks.world_size > 1)} on {job.device.type}"
    yield "split", f"{resolved.split}{file}; {ranks}"
    yield "batch", str(resolved.plan)
    samples = resolved.plan.global_batch_size
    length: int | None = getattr(data, "sequence_length", None)
    tokens = f", {parts.max_steps * samples * length:,} tokens" if length else ""
    done = f"; {parts.start.global_step} done" if parts.start.global_step else ""
    yield "steps", f"{parts.max_steps:,}, {parts.max_steps * samples:,} samples{tokens}{done}"
    apart, num_bytes = held_apart(engine.module)
    others = engine.num_parameters - apart
    states = num_bytes + others * bytes_per_parameter(
        resolved, settings.config.optimizer, share * engine.num_parameters / others
    )
    yield "memory", f"{size(states)} a rank for {HELD}; {memory_there(job.device)}"
    yield "run", f"{directory}: metrics.jsonl, checkpoints/, logs/"


def _how_the_base_is_held(adapter: AdapterConfig, engine: Engine) -> str:
    values, num_bytes = held_apart(engine.module)
    if not values:
        return ""
    dtype, each = adapter.quantize or engine.precision, num_bytes / values
    return f" over a base in {dtype} ({values:,} weights in {size(num_bytes)}, {each:.3f} bytes each)"


def size(num_bytes: float) -> str:
    """In MiB or GiB, with three digits or more."""
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.1f} GiB"


def bytes_per_parameter(resolved: Resolved, optimizer: OptimizerConfig, trained: float = 1.0) -> float:
    """Bytes of a rank's device by parameter of the whole model: the table "What fits on one card" of
    docs/performance.md. What is offloaded is not on the device.

    Args:
        trained: Share of the parameters that are trained.
    """
    split, json = resolved.split, resolved.deepspeed or {}
    masters = {"adamw": 12, "sgd": 8 if optimizer.momentum else 4, "adafactor": 4}[optimizer.kind]
    weights, gradients, kept = 4.0, 4.0 * trained, (masters - 4.0) * trained
    if resolved.deepspeed is not None and (split.precision != "fp32" or split.zero_stage):
        half = 2.0 if split.precision != "fp32" else 4.0
        weights, gradients, kept = half, half * trained, masters * trained
        if has_half_masters(json):
            kept = (masters - 4.0) * trained
        if has_half_states(json):
            kept = kept / 2 + (2.0 * trained if split.zero_stage < 3 else 0.0)
    stage, ranks = split.zero_stage, split.dp_world_size * split.sequence_parallel
    if _is_elsewhere(json, "offload_param"):
        weights = 0.0
    if _is_elsewhere(json, "offload_optimizer"):
        kept = 0.0
    held = (
        weights / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + kept / (ranks if stage >= 1 else 1)
    )
    return held / (split.tensor_parallel * split.pipeline_stages)


def _is_elsewhere(json: dict[str, Any], what: str) -> bool:
    return get_dotted(json, f"zero_optimization.{what}.device") not in (None, "none")


def memory_there(device: torch.device) -> str:
    """Of the GPU, or on a CPU of the machine, which all ranks on it share."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)  # the model is there already
        return f"the GPU has {size(total)}, of which {size(free + own)} are free for it"
    now = memory_now()
    whose = "its cgroup allows" if now.by_cgroup else "the machine has"
    return f"{whose} {size(now.limit)}, of which {size(available_memory())} are free"
