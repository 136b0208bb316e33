"""The composition root: settings -> Parts, a line a part, each with what it needs."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.build_engine import build_engine
from pipeline.checkpoint.catalog import Retention
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.batch import BatchPlan
from pipeline.config.data_schema import ChatDataConfig
from pipeline.config.model_schema import CausalLMConfig, ModelConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.data.bundle import DataBundle
from pipeline.data.eval_loader import EvalLoader
from pipeline.data.loader import BatchSource, TrainLoader
from pipeline.data.mixture import MixtureOrder
from pipeline.distributed.process_group import Job, describe_device
from pipeline.engine.interface import Engine, Evaluates
from pipeline.engine.profile import profile_asked_for
from pipeline.errors import ConfigError
from pipeline.gpu_meter import GpuMeter
from pipeline.metrics import Meters, Workload
from pipeline.models.batch_norm import is_synchronised
from pipeline.models.flops import block_flops_per_token, flops_per_token, fp8_share
from pipeline.models.transformers_folder import write_description
from pipeline.models.vocabulary import num_words
from pipeline.objectives import Objective, build_objective
from pipeline.parts import Cadence, Parts, TrainState, rows_until
from pipeline.peak_flops import peak_flops
from pipeline.replica_check import ReplicaCheck
from pipeline.run_directory import ENVIRONMENT
from pipeline.safeguard import Safeguard
from pipeline.sampling import build_sampler
from pipeline.schedule import remark
from pipeline.sinks import build_sinks
from pipeline.sinks.jsonl import METRICS_FILE
from pipeline.wall_time import Earlier, WallTime
from pipeline.watchers.build import build_watchers

log = logging.getLogger(__name__)


def assemble(config: RunConfig, resolved: Resolved, job: Job, data: DataBundle, directory: Path) -> Parts:
    """Builds every part and, where there is a checkpoint, puts them where it left off. Collective."""
    objective = build_objective(config, resolved.compile)
    if config.wandb.x_axis == "tokens_seen" and objective.unit != "tokens":
        raise ConfigError(f"wandb.x_axis: tokens_seen: this run counts {objective.unit}; set global_step")
    checkpoints = build_store(config, resolved, job, directory)
    job.progress.at("resuming")
    checkpoint = checkpoints.choose()  # before anything is built: what is passed over is told first
    job.progress.at("starting")
    engine = build_engine(config, resolved, job, data, resumes=checkpoint is not None)
    loader = build_loader(config, resolved.plan, data, engine)
    samples = (config.max_epochs or 1.0) * loader.samples_per_epoch
    max_steps = config.max_steps or math.ceil(samples / resolved.plan.global_batch_size)
    tell_of_precision(resolved, job)
    tell_of_length(config, loader, max_steps)
    if job.ranks.is_main_process:
        write_description(engine.module, data.tokenizer, directory / "model")
    job.progress.at("resuming")
    start, remembered = go_on(checkpoints, checkpoint, engine, loader, max_steps)
    job.progress.at("starting")
    held_out = build_eval_loader(config, resolved.plan, data, engine)
    logs, evaluations = Cadence(config.log.every, max_steps), Cadence(config.eval.every, max_steps)
    is_due = start.global_step == 0 or evaluations.due(start.global_step)
    owes = is_due and remembered.get("eval_loss") is None
    meters = build_meters(config, resolved, engine, objective, job, directory, checkpoint)
    sinks = build_sinks(
        config,
        run_dir=directory,
        is_main_process=job.ranks.is_main_process,
        start_step=start.global_step,
        max_steps=max_steps,
        run_config=described(config, resolved, job, directory),
        due=rows_until(start.global_step, logs, evaluations if held_out else None, owes),
        redo_evaluation=owes,
    )
    safeguard = Safeguard(config.watch, config.log.every, sinks.tell)
    safeguard.load_state_dict(remembered.get("safeguard", {}))
    return Parts(
        job=job,
        engine=engine,
        objective=objective,
        loader=loader,
        eval_loader=held_out,
        checkpoints=checkpoints,
        sinks=sinks,
        meters=meters,
        watchers=build_watchers(config, resolved, engine, job, start.global_step, max_steps),
        safeguard=safeguard,
        replica_check=ReplicaCheck(job, engine.replicas, config.watch, start.global_step),
        rows_behind=int(engine.device.type == "cuda" and not safeguard.goes_back),
        start=start,
        owes_evaluation=owes,
        max_steps=max_steps,
        peak_learning_rate=config.optimizer.learning_rate,
        schedule=config.schedule,
        seed=config.seed,
        log=logs,
        eval=evaluations,
        save=Cadence(config.checkpoint.every, max_steps),
        save_minutes=config.checkpoint.every_minutes,
        grace_seconds=config.checkpoint.grace_seconds,
        tell_sample=build_sampler(
            engine,
            data.tokenizer,
            config.sample,
            config.seed,
            sinks.tell,
            asks=isinstance(config.data, ChatDataConfig),
        ),
    )


def described(config: RunConfig, resolved: Resolved, job: Job, directory: Path) -> dict[str, Any]:
    """A run's settings and its environment, for places that show them."""
    recipe, environment = config.model_dump(mode="json"), directory / ENVIRONMENT
    known = {"recipe": recipe, "deepspeed": resolved.deepspeed, "world_size": job.ranks.world_size}
    if job.ranks.is_main_process and environment.exists():
        known["environment"] = json.loads(environment.read_text())
    return known


def tell_of_precision(resolved: Resolved, job: Job) -> None:
    """What this device makes of the run's precision, where that is worth a line."""
    device = describe_device(job.device)
    if (slow := resolved.slow_precision(device)) is not None:
        log.warning("%s", slow)
    if (told := resolved.told_of_bf16(device)) is not None:
        log.info("%s", told)


def go_on(
    checkpoints: CheckpointStore,
    checkpoint: Manifest | None,
    engine: Engine,
    loader: BatchSource,
    max_steps: int,
) -> tuple[TrainState, dict[str, Any]]:
    """Engine and data as the checkpoint has them; where that is, and all that it remembers.

    Raises:
        ConfigError: that is further than the run is to go.
    """
    if checkpoint is None:
        return TrainState.start(engine.device), {}
    if checkpoint.global_step > max_steps:
        raise ConfigError(
            f"{checkpoints.folder.parent} is at step {checkpoint.global_step} already, and max_steps is "
            f"{max_steps}; give a higher max_steps (or max_epochs), or another run_dir"
        )
    state = checkpoints.restore(engine, checkpoint)
    loader.load_state_dict(state)
    return TrainState.of(state, engine.device), state


def build_loader(config: RunConfig, plan: BatchPlan, data: DataBundle, engine: Engine) -> TrainLoader:
    """This rank's share of the training data."""
    return TrainLoader(
        data.train,
        data.collate,
        MixtureOrder(data.sources, config.seed),
        engine.device,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        dp_rank=engine.dp_rank,
        dp_world_size=engine.dp_world_size,
        seed=config.seed,
        num_workers=config.loader.num_workers,
        num_words=num_words(engine.module) if isinstance(config.model, CausalLMConfig) else None,
        left_out=config.loader.leave_out,
    )


def tell_of_length(config: RunConfig, loader: TrainLoader, max_steps: int) -> None:
    """What is odd about so many steps, or so little data."""
    for line in filter(None, (remark(config.schedule, max_steps), little_data(loader))):
        log.warning("%s", line)


def little_data(loader: TrainLoader) -> str | None:
    """What to say of a data set that a single step goes through, and on."""
    samples, step = loader.samples_per_epoch, loader.global_batch_size
    if samples >= step:
        return None
    return (
        f"the training data has {samples} samples and a step takes {step}: it sees some of them more than "
        "once; add data, or lower batch.global_batch_size"
    )


def build_eval_loader(
    config: RunConfig, plan: BatchPlan, data: DataBundle, engine: Evaluates
) -> EvalLoader | None:
    """This rank's share of all held-out data, or None where there is none."""
    if not data.eval and not data.eval_sets:
        return None
    return EvalLoader(
        {**data.eval, **data.eval_sets},
        data.collate,
        total=data.eval,
        micro_batch_size=plan.micro_batch_size,
        dp_rank=engine.dp_rank,
        dp_world_size=engine.dp_world_size,
        max_samples=config.eval.max_samples,
        num_workers=config.loader.num_workers,
        pin_memory=engine.device.type == "cuda",
        num_words=num_words(engine.module) if isinstance(config.model, CausalLMConfig) else None,
    )


def build_store(config: RunConfig, resolved: Resolved, job: Job, directory: Path) -> CheckpointStore:
    """Where this run's checkpoints lie, and which of them stay. Collective."""
    keep = config.checkpoint
    retention = Retention(keep.keep_last, keep.keep_every, keep.keep_best)
    return CheckpointStore(directory / "checkpoints", retention, job, str(resolved.split))


def build_meters(
    config: RunConfig,
    resolved: Resolved,
    engine: Engine,
    objective: Objective,
    job: Job,
    directory: Path,
    checkpoint: Manifest | None = None,
) -> Meters:
    """What is measured of the run; before its record is opened, which may take rows back."""
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
    length: int | None = getattr(config.data, "sequence_length", None)
    cost = flops_per_token(engine.module, length)
    in_fp8 = fp8_share(engine.module, getattr(config.model, "fp8", "none"), cost)
    workload = Workload(
        samples_per_step=resolved.plan.global_batch_size,
        world_size=job.ranks.world_size,
        unit=objective.unit,
        means=objective.means,
        flops_per_sample=None if length is None or cost is None else length * cost,
        peak_flops=peak_flops(name, engine.precision, resolved.tf32, in_fp8),
        recomputed_flops=_recomputed(config.model, engine, length),
    )
    clock = time.perf_counter
    profile = profile_asked_for(resolved.deepspeed, engine, clock, directory, job.ranks.is_main_process)
    earlier = Earlier()
    if job.ranks.is_main_process:  # whose rows are kept, and whose word a checkpoint has
        earlier = Earlier.of(directory / METRICS_FILE, checkpoint.state if checkpoint is not None else {})
    replicas = max(1, torch.cuda.device_count()) if resolved.split.parallel == "dp" else 1
    wall = WallTime(
        engine.phases,
        clock,
        earlier=earlier,
        devices=job.ranks.world_size * replicas,
        price=config.log.price_per_device_hour,
        communicates=job.ranks.world_size > 1,
    )
    gpu = GpuMeter(engine.device, earlier.energy_kwh)
    compares = forward_waits_for_nobody(resolved, engine, job)
    return Meters(workload, job, clock, profile, compares, wall, gpu)


def forward_waits_for_nobody(resolved: Resolved, engine: Engine, job: Job) -> bool:
    """Whether ranks can be compared by what a forward takes: all do the same, and no collective is in it."""
    split = resolved.split
    is_whole = split.zero_stage < 3 and split.dp_world_size == job.ranks.world_size > 1
    return is_whole and not any(is_synchronised(layer) for layer in engine.module.modules())


def _recomputed(model: ModelConfig, engine: Engine, length: int | None) -> Callable[[], float]:
    """FLOPs of a row that its backward makes once more: of products, of which `selective` keeps all."""
    if length is None or getattr(model, "activation_checkpointing", "none") in ("none", "selective"):
        return float
    from pipeline.models.activation_checkpointing import share_recomputed

    of_blocks = length * block_flops_per_token(engine.module, length)
    return lambda: of_blocks * share_recomputed(engine.module)
