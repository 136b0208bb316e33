"""Builds all components of a run from its settings: the engine, the data loader, the meters and the rest."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.checkpoint import adapters
from pipeline.checkpoint.catalog import Retention
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.checkpoint.manifest import Manifest, has_evaluation
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.batch_plan import BatchPlan
from pipeline.config.interval import resolve_intervals
from pipeline.config.model_schema import AdapterConfig, CausalLMConfig, ModelSection
from pipeline.config.schema import RunConfig, get_cache_folder
from pipeline.config.settings import ResolvedSettings
from pipeline.data.bundle import DataBundle
from pipeline.data.curriculum import build_order, check_same_curriculum
from pipeline.data.loader import BatchSource, TrainLoader
from pipeline.data.reference import restore_reference_logps
from pipeline.distributed.process_group import Job, allow_tf32
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.interface import DTYPES, Engine, count_parameters
from pipeline.engine.memory import unmap_freed_tensors
from pipeline.engine.schedule import LearningRate, check_user_schedule
from pipeline.engine.torch_engine import TorchEngine
from pipeline.errors import ConfigError
from pipeline.evaluation.held_out import build_eval_loader
from pipeline.evaluation.samples import build_text_sampler
from pipeline.models import build_model
from pipeline.models.adapters import suggest_learning_rate
from pipeline.models.batch_norm import is_sync_batch_norm
from pipeline.models.blocks import compile_blocks
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.models.frozen_base import HalfBasePlacement
from pipeline.models.sharding import DevicePlacement, Sharding, build_model_request
from pipeline.models.sizes import block_flops_per_token, compute_fp8_share, flops_per_token
from pipeline.models.transformers_facts import write_model_description
from pipeline.models.transforms import AdapterRequest, TransformContext, apply_transforms
from pipeline.models.weights import load_weights
from pipeline.monitoring.alerts.rules import build_alerts
from pipeline.monitoring.histograms import HistogramMeter
from pipeline.monitoring.metrics import GpuMeter, Meters, PriorUsage, WallTime, Workload
from pipeline.monitoring.trackers import build_trackers
from pipeline.monitoring.trackers.interface import Trackers
from pipeline.monitoring.trackers.jsonl import METRICS_FILE
from pipeline.objectives import Objective, SegmentObjective, build_objective
from pipeline.planner.hardware import peak_flops
from pipeline.training.banner import warn_about_choices
from pipeline.training.callbacks import build_callbacks
from pipeline.training.expectation import build_expectation, guess_micro_batch
from pipeline.training.loop import Cadence, RunComponents, RunSchedule, TrainState
from pipeline.training.micro_batch import MicroBatchSearch
from pipeline.training.reference_logps import ReferenceRows, add_zero_reference, compute_reference
from pipeline.training.replica_check import ReplicaCheck
from pipeline.training.run_directory import ENVIRONMENT, record_changes
from pipeline.training.safeguard import Safeguard

if TYPE_CHECKING:  # lm-eval is imported only for runs with tasks
    from pipeline.evaluation.harness import LoadedTasks
    from pipeline.evaluation.training_tasks import TrainingTasks


def build_meters(
    config: RunConfig,
    resolved: ResolvedSettings,
    *,
    job: Job,
    engine: Engine,
    objective: Objective,
    directory: Path,
    resumed: Manifest | None = None,
) -> Meters:
    """Build the meters of a run.

    They read from metrics.jsonl how long earlier processes of the run took. Call this before the trackers are
    built, which remove the rows after the checkpoint.

    Args:
        config: Recipe of the run.
        resolved: Resolved settings.
        job: Ranks of the job.
        engine: Engine of the run.
        objective: Objective of the run.
        directory: Run directory.
        resumed: Checkpoint that the run resumes from; `None` for a new run.
    """
    device_name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
    length = config.data.tokens_per_row
    language = config.model.language_model
    token_flops = flops_per_token(engine.module, length, frozen=config.adapter is not None)
    fp8 = language.fp8 if language is not None else "none"
    fp8_share = compute_fp8_share(engine.module, fp8, token_flops)
    workload = Workload(
        samples_per_step=resolved.batch_plan.global_batch_size,
        world_size=job.ranks.world_size,
        unit=objective.unit,
        means=objective.means,
        flops_per_sample=None if length is None or token_flops is None else length * token_flops,
        peak_flops=peak_flops(device_name, engine.precision, resolved.tf32, fp8_share),
        recomputed_flops=_build_recomputed_flops(language, engine, length),
    )
    clock = time.perf_counter
    earlier = PriorUsage()
    if job.ranks.is_main_process:  # only rank 0's times are in metrics.jsonl and in checkpoints
        earlier = PriorUsage.read(directory / METRICS_FILE, resumed.state if resumed is not None else {})
    # DataParallel (`dp`) uses all GPUs in one process.
    devices_per_rank = max(1, torch.cuda.device_count()) if resolved.split.parallel == "dp" else 1
    wall = WallTime(
        engine.phases,
        clock,
        earlier=earlier,
        devices=job.ranks.world_size * devices_per_rank,
        price=config.log.price_per_device_hour,
        communicates=job.ranks.world_size > 1,
    )
    gpu = GpuMeter(engine.device) if engine.device.type == "cuda" else None
    return Meters(
        workload,
        job,
        clock,
        local_phases=list_local_phases(resolved, engine),
        wall=wall,
        gpu=gpu,
    )


def list_local_phases(resolved: ResolvedSettings, engine: Engine) -> tuple[str, ...]:
    """Return the phases of a step in which a rank does not wait for other ranks; they show slow ranks.

    A backward that reduces gradients waits for other ranks; with pipeline stages they are reduced after it.
    All phases wait if ranks share a sample (tensor and sequence parallelism) or statistics of the batch
    (synchronised batch normalisation). The result is empty for a single rank, which has no other to compare
    with.
    """
    split = resolved.split
    if split.world_size == 1 or split.tensor_parallel > 1 or split.sequence_parallel > 1:
        return ()
    if any(is_sync_batch_norm(layer) for layer in engine.module.modules()):
        return ()
    return ("forward", "backward") if split.pipeline_stages > 1 else ("forward",)


def _build_recomputed_flops(
    language: CausalLMConfig | None, engine: Engine, length: int | None
) -> Callable[[], float]:
    """Return a function that counts the FLOPs that the backward of a row recomputes.

    Only matrix products count. `selective` recomputation stores their results, so it recomputes none.
    """
    if length is None or language is None or language.activation_checkpointing in ("none", "selective"):
        return lambda: 0.0
    from pipeline.models.activation_checkpointing import compute_recomputed_share

    block_flops = length * block_flops_per_token(engine.module, length)
    return lambda: block_flops * compute_recomputed_share(engine.module)


@tag_errors(Phase.MODEL)
@unmap_freed_tensors()
def build_engine(
    config: RunConfig, resolved: ResolvedSettings, job: Job, data: DataBundle, *, resumes: bool = False
) -> Engine:
    """Build the model and the engine for the split. Collective.

    Args:
        config: Recipe of the run.
        resolved: Resolved settings, with the split.
        job: Ranks of the job.
        data: Data of the run; the model takes sizes from it, such as the vocabulary's.
        resumes: Whether a checkpoint will fill the weights, so that initial weights are not read or drawn.

    Raises:
        ConfigError, ModelError: The model, its weights or the engine cannot be built as the recipe says.
    """
    split = resolved.split
    context = build_transform_context(config, resolved, job)
    needs_initial = not resumes or config.adapter is not None  # checkpoints of an adapter have no base
    # With `strict`, the file of model.weights fills every tensor, so none needs to be drawn.
    draws_initial = needs_initial and (config.model.weights is None or not config.model.strict)

    def build_sharded_model(sharding: Sharding) -> nn.Module:
        if config.adapter is not None:
            sharding = choose_base_sharding(config.adapter, config.model, sharding, context.dtype)
        request = build_model_request(config, data, sharding, draws_initial)
        model = build_model(config.model, request, config.seed)
        if config.model.weights is not None and needs_initial:
            load_weights(
                model,
                config.model,
                sharding=sharding,
                job=job,
                open_checkpoint=open_checkpoint,
                new_ids=get_trained_vocabulary(config, data),
            )
        adapter = None
        if config.adapter is not None:
            adapter = AdapterRequest(config.adapter, config.seed, sharding, job)
        model = apply_transforms(model, config.model, replace(context, adapter=adapter))
        if resolved.compile:
            compile_blocks(model)
        return model

    allow_tf32(resolved.tf32)
    if resolved.deepspeed is None:
        model = build_sharded_model(DevicePlacement(job.device, torch.float32))
        return TorchEngine(model, config.optimizer, config.engine, split, job)
    from pipeline.engine.deepspeed_base import start_deepspeed
    from pipeline.engine.deepspeed_engine import DeepSpeedEngine, build_sharding
    from pipeline.engine.native_ops import SwapFolder, prepare_native_ops

    start_deepspeed(job)
    if split.pipeline_stages > 1:
        from pipeline.engine.pipeline_engine import PipelineEngine
        from pipeline.engine.stages import StageSharding

        stages = StageSharding(resolved.deepspeed, split, job)
        build_sharded_model(stages)
        assert stages.model is not None  # StageSharding stores this stage's part of the model
        return PipelineEngine(
            stages.model,
            optimizer=config.optimizer,
            config=resolved.deepspeed,
            split=split,
            job=job,
            bounds=stages.bounds,
        )
    swap = SwapFolder(prepare_native_ops(resolved.deepspeed, job), job)
    sharding = build_sharding(swap.config, split, job.device)
    model = build_sharded_model(sharding)
    swap.check_space(count_parameters(model))
    engine = DeepSpeedEngine(
        model,
        optimizer=config.optimizer,
        config=swap.config,
        split=split,
        job=job,
        autocast=context.is_autocast,
        sharding=sharding,
    )
    engine.cleanup.callback(swap.close)
    weakref.finalize(engine, swap.close)  # in case the engine is never closed
    return engine


def choose_base_sharding(
    adapter: AdapterConfig, model: ModelSection, sharding: Sharding, dtype: torch.dtype
) -> Sharding:
    """Return the sharding for a model with an adapter: its frozen base in 4 bits, or in the run's precision.

    Without DeepSpeed, the adapter's weights are fp32, and in a bf16 run the frozen linear layers of the base
    are bf16. Autocast would round these weights for each product anyway: the products are equal, bit by bit,
    in half the memory. In all other cases the sharding is returned unchanged.

    Args:
        adapter: Section `adapter` of the recipe.
        model: Section `model` of the recipe.
        sharding: Sharding of the model without an adapter.
        dtype: Dtype of matrix products.
    """
    if adapter.quantize is not None:
        from pipeline.models.quantized import QuantizedBasePlacement  # imports bitsandbytes

        assert isinstance(sharding, DevicePlacement)  # the settings refuse other splits
        return QuantizedBasePlacement(sharding, adapter, model)
    if isinstance(sharding, DevicePlacement) and sharding.dtype != dtype:
        return HalfBasePlacement(sharding, adapter, dtype)
    return sharding


def build_transform_context(config: RunConfig, resolved: ResolvedSettings, job: Job) -> TransformContext:
    """Return the context of the model transforms, without an adapter."""
    split = resolved.split
    documents = config.data.documents
    # transformers' language models are written for parameters in half precision, other modules for fp32.
    is_half = resolved.deepspeed is not None and split.precision != "fp32"
    return TransformContext(
        job.device,
        split.dp_world_size,
        is_autocast=is_half and config.model.language_model is None,
        separate_documents=documents is not None and documents.separate_documents,
        dtype=DTYPES[split.precision],
    )


def get_trained_vocabulary(config: RunConfig, data: DataBundle) -> dict[str, int] | None:
    """Return the vocabulary (token -> id) if the run trained its own tokenizer, else `None`.

    load_weights needs it to move the embeddings of a file to the ids of this vocabulary.
    """
    documents = config.data.documents
    pretrained = documents.tokenizer.pretrained if documents is not None else None
    if data.tokenizer is None or pretrained is not None:
        return None
    return data.tokenizer.get_vocab()


@dataclass(frozen=True)
class RestoredRun:
    """Components of a run after the newest checkpoint, if there is one, was read into them."""

    resolved: ResolvedSettings
    """Resolved settings, with the micro-batch that was found if the recipe says `auto`."""
    data: DataBundle
    """Data of the run, with reference log-probabilities if the objective uses them."""
    objective: Objective
    engine: Engine
    adapter: Mapping[str, Any]
    """Description of the adapter, see checkpoint.adapters; empty without one."""
    checkpoints: CheckpointStore
    checkpoint: Manifest | None
    """Checkpoint that the run resumes from; `None` for a new run."""
    checkpoint_state: dict[str, Any]
    """State stored in that checkpoint besides the engine's; empty for a new run."""
    loader: TrainLoader
    """Loader of this rank's training batches, at the position of the checkpoint."""
    schedule: RunSchedule
    start: TrainState
    """Progress at the start of this process."""


def assemble(
    config: RunConfig,
    resolved: ResolvedSettings,
    job: Job,
    data: DataBundle,
    directory: Path,
    tasks: LoadedTasks | None = None,
) -> RunComponents:
    """Build every component of a run, and restore the newest checkpoint if there is one. Collective.

    Args:
        config: Recipe of the run.
        resolved: Resolved settings.
        job: Ranks of the job.
        data: Data of the run.
        directory: Run directory.
        tasks: Tasks of `eval.tasks`; `None` without any.

    Raises:
        PipelineError: A component cannot be built as the recipe says, or the checkpoint cannot be restored.
    """
    restored = build_and_restore(config, resolved, job, data, directory)
    resolved = restored.resolved
    data = restored.data
    objective = restored.objective
    engine = restored.engine
    start = restored.start
    checkpoint_state = restored.checkpoint_state
    eval_loader = build_eval_loader(config, resolved.batch_plan, data, engine)
    # A checkpoint may be saved before the evaluation of its own step, which the resumed run then does first.
    lacks_evaluation = not has_evaluation(checkpoint_state)
    owes_evaluation = lacks_evaluation and restored.schedule.eval.is_due_or_first(start.global_step)
    max_steps = restored.schedule.max_steps
    meters = build_meters(
        config,
        resolved,
        job=job,
        engine=engine,
        objective=objective,
        directory=directory,
        resumed=restored.checkpoint,
    )
    trackers = build_trackers(
        config,
        run_dir=directory,
        is_main_process=job.ranks.is_main_process,
        start_step=start.global_step,
        max_steps=max_steps,
        run_config=describe_run(config, resolved, job, directory),
        redo_evaluation=owes_evaluation,
    )
    if job.ranks.is_main_process and config.wandb.checkpoints:
        restored.checkpoints.set_listener(trackers.show)
    safeguard = Safeguard(config.watch, restored.schedule.log.every, trackers.tell)
    safeguard.load_state_dict(checkpoint_state.get("safeguard", {}))
    alerts = build_alerts(
        config,
        resolved,
        job=job,
        engine=engine,
        start_step=start.global_step,
        max_steps=max_steps,
        detectors=safeguard.detectors,
        checkpoint_state=checkpoint_state,
    )
    replica_check = ReplicaCheck(job, engine.replicas, config.watch, start.global_step)
    # On a GPU a row is read one step later, so that no step waits; a rollback needs the row immediately.
    rows_behind = int(engine.device.type == "cuda" and not safeguard.rolls_back)
    histograms_every = config.wandb.histograms_every
    peak_learning_rate = config.optimizer.learning_rate or suggest_learning_rate(engine.module)
    return RunComponents(
        job=job,
        resolved=resolved,
        start=start,
        schedule=replace(restored.schedule, owes_evaluation=owes_evaluation, rows_behind=rows_behind),
        engine=engine,
        objective=objective,
        loader=restored.loader,
        learning_rate=LearningRate(peak_learning_rate, config.schedule, max_steps),
        seed=config.seed,
        adds_noise=config.model.neftune_alpha is not None,
        eval_loader=eval_loader,
        eval_config=config.eval,
        checkpoints=restored.checkpoints,
        adapter=restored.adapter,
        trackers=trackers,
        meters=meters,
        alerts=alerts,
        safeguard=safeguard,
        expectation=build_expectation(config, resolved, job, data, engine.module),
        replica_check=replica_check if replica_check.is_on else None,
        histograms=HistogramMeter(engine, job, histograms_every) if histograms_every else None,
        callbacks=build_callbacks(
            config, job, trackers.tell, checkpoint_state, has_held_out=eval_loader is not None
        ),
        tasks=build_tasks(tasks, config, restored, job=job, directory=directory, trackers=trackers),
        report_sample=build_text_sampler(engine, data, config, trackers.tell),
    )


def build_tasks(
    tasks: LoadedTasks | None,
    config: RunConfig,
    restored: RestoredRun,
    *,
    job: Job,
    directory: Path,
    trackers: Trackers,
) -> TrainingTasks | None:
    """Return the evaluation of a run on its tasks; `None` without any. Only runs with tasks import lm-eval.

    Raises:
        ConfigError: See TrainingTasks.
    """
    if tasks is None:
        return None
    from pipeline.evaluation.training_tasks import TrainingTasks

    return TrainingTasks(
        tasks,
        config,
        restored.resolved.batch_plan,
        job=job,
        engine=restored.engine,
        tokenizer=restored.data.tokenizer,
        directory=directory,
        show=trackers.show,
    )


def build_and_restore(
    config: RunConfig, resolved: ResolvedSettings, job: Job, data: DataBundle, directory: Path
) -> RestoredRun:
    """Build objective, engine and loader, and read the newest checkpoint into them. Collective.

    The arguments and errors are those of `assemble`.
    """
    objective = build_checked_objective(config, resolved, data)
    checkpoints = build_store(config, resolved, job, directory)
    job.progress.start_activity("resuming")
    checkpoint = checkpoints.choose()  # before building, so that skipped checkpoints are logged first
    if checkpoint is not None and job.ranks.is_main_process:
        record_changes(directory, checkpoint.folder.name)
    job.progress.start_activity("starting")
    resumes = checkpoint is not None
    engine = build_engine(config, resolved, job, data, resumes=resumes)
    adapter = adapters.describe_adapter(config, engine.module, job, open_checkpoint, checkpoint)
    find_micro_batch = partial(choose_micro_batch, config=config, job=job, engine=engine, objective=objective)
    if not resumes:
        resolved = find_micro_batch(resolved=resolved, data=add_zero_reference(data, objective))
    if isinstance(objective, SegmentObjective) and objective.has_reference:
        rows = ReferenceRows(data, resolved.batch_plan.micro_batch_size, config.loader.num_workers)
        data = add_reference(
            rows, config, job, directory, engine=engine, objective=objective, resumes=resumes, adapter=adapter
        )
    loader = build_loader(config, resolved.batch_plan, data, engine)
    schedule = build_run_schedule(config, loader, job, data)
    warn_about_choices(config, resolved, job, loader, schedule.max_steps)
    if job.ranks.is_main_process:  # for programs that read the run's checkpoints later
        write_model_description(engine.module, data.tokenizer, directory / "model")
    job.progress.start_activity("resuming")
    start, checkpoint_state = restore_progress(
        checkpoints, checkpoint, engine=engine, source=loader, max_steps=schedule.max_steps, adapter=adapter
    )
    job.progress.start_activity("starting")
    if resolved.batch_plan.is_provisional:  # a resumed run: the search needs the optimizer state in memory
        resolved = find_micro_batch(resolved=resolved, data=data)
        loader.set_batch_division(
            resolved.batch_plan.micro_batch_size, resolved.batch_plan.gradient_accumulation_steps
        )
    return RestoredRun(
        resolved=resolved,
        data=data,
        objective=objective,
        engine=engine,
        adapter=adapter,
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        checkpoint_state=checkpoint_state,
        loader=loader,
        schedule=schedule,
        start=start,
    )


def choose_micro_batch(
    *,
    config: RunConfig,
    resolved: ResolvedSettings,
    job: Job,
    data: DataBundle,
    engine: Engine,
    objective: Objective,
) -> ResolvedSettings:
    """Return `resolved` with a micro-batch that fits, if the recipe says `auto`. Collective."""

    def build_loader_of_plan(plan: BatchPlan) -> TrainLoader:
        return build_loader(config, plan, data, engine)

    search = MicroBatchSearch(
        config=config,
        resolved=resolved,
        job=job,
        engine=engine,
        objective=objective,
        build_loader=build_loader_of_plan,
        cache_folder=get_cache_folder(config),
        guess=guess_micro_batch(config, resolved, job, data) if resolved.batch_plan.is_provisional else None,
    )
    return search.resolve_auto()


def add_reference(
    rows: ReferenceRows,
    config: RunConfig,
    job: Job,
    directory: Path,
    *,
    engine: Engine,
    objective: SegmentObjective,
    resumes: bool,
    adapter: Mapping[str, Any],
) -> DataBundle:
    """Return the data with the reference log-probabilities of the run's initial model. Collective.

    A resumed run reads them from its directory. A new run computes them, or takes them from the cache.

    Args:
        rows: Data without reference log-probabilities, and how to read it.
        config: Recipe of the run.
        job: Ranks of the job.
        directory: Run directory.
        engine: Engine with the initial model.
        objective: Objective of the run.
        resumes: Whether the run resumes from a checkpoint.
        adapter: Description of the adapter, see checkpoint.adapters; empty without one.
    """
    if resumes:
        return restore_reference_logps(rows.data, directory, job)
    documents = config.data.documents
    cache = Path(documents.cache_dir).expanduser() / "reference" if documents is not None else None
    # The digest of the engine's weights does not cover the adapter's base.
    key = {**config.model.model_dump(mode="json"), **adapters.drop_file_stamps(adapter)}
    return compute_reference(
        rows, job=job, engine=engine, objective=objective, directory=directory, cache=cache, key=key
    )


def build_run_schedule(config: RunConfig, loader: TrainLoader, job: Job, data: DataBundle) -> RunSchedule:
    """Return the steps at which the run logs, evaluates, saves and ends. Collective.

    Raises:
        ConfigError: An interval cannot be resolved (`resolve_intervals`), or the user's own learning rate
            schedule fails.
        DataError: The ranks compute different curricula.
    """
    samples = (config.max_epochs or 1.0) * loader.samples_per_epoch
    max_steps = config.max_steps or math.ceil(samples / loader.global_batch_size)
    check_user_schedule(config.schedule, max_steps)
    check_same_curriculum(job, data, max_steps)
    intervals = resolve_intervals(config, loader.steps_per_epoch)
    return RunSchedule(
        max_steps=max_steps,
        samples_per_epoch=loader.samples_per_epoch,
        log=Cadence(intervals.log, max_steps),
        eval=Cadence(intervals.eval, max_steps),
        tasks=Cadence(intervals.eval * config.eval.tasks_every, max_steps),
        save=Cadence(intervals.save, max_steps),
        save_minutes=config.checkpoint.every_minutes,
        grace_seconds=config.checkpoint.grace_seconds,
    )


def build_checked_objective(config: RunConfig, resolved: ResolvedSettings, data: DataBundle) -> Objective:
    """Return the recipe's objective.

    Raises:
        DataError: The data's answers do not suit the objective, see SegmentObjective.check_answer_counts.
    """
    objective = build_objective(config, resolved.compile)
    if isinstance(objective, SegmentObjective):
        objective.check_answer_counts(data.answer_counts)
    return objective


def describe_run(config: RunConfig, resolved: ResolvedSettings, job: Job, directory: Path) -> dict[str, Any]:
    """Return a run's settings and environment for trackers that show them."""
    recipe = config.model_dump(mode="json")
    environment = directory / ENVIRONMENT
    description = {"recipe": recipe, "deepspeed": resolved.deepspeed, "world_size": job.ranks.world_size}
    if job.ranks.is_main_process and environment.exists():
        description["environment"] = json.loads(environment.read_text())
    return description


@unmap_freed_tensors()
def restore_progress(
    checkpoints: CheckpointStore,
    checkpoint: Manifest | None,
    *,
    engine: Engine,
    source: BatchSource,
    max_steps: int,
    adapter: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[TrainState, dict[str, Any]]:
    """Restore engine and data from the checkpoint, if there is one. Collective.

    Returns:
        The run's progress, and the state stored in the checkpoint, which is empty for a new run.

    Raises:
        ConfigError: The checkpoint is of a later step than `max_steps`.
        CheckpointError: The adapter was trained on top of another base.
    """
    if checkpoint is None:
        return TrainState.start(engine.device), {}
    adapters.refuse_other_base(checkpoint.state, adapter, checkpoints.folder.parent)
    if checkpoint.global_step > max_steps:
        raise ConfigError(
            f"{checkpoints.folder.parent} is at step {checkpoint.global_step} already, and max_steps is "
            f"{max_steps}; give a higher max_steps (or max_epochs), or another run_dir"
        )
    state = checkpoints.restore(engine, checkpoint)
    source.load_state_dict(state)
    return TrainState.from_checkpoint(state, engine.device), state


def build_loader(config: RunConfig, plan: BatchPlan, data: DataBundle, engine: Engine) -> TrainLoader:
    """Return the loader of this rank's training batches."""
    return TrainLoader(
        data.train,
        data.collate,
        build_order(data, config.seed, plan.global_batch_size),
        engine.device,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        dp_rank=engine.dp_rank,
        dp_world_size=engine.dp_world_size,
        seed=config.seed,
        num_workers=config.loader.num_workers,
        vocab_size=get_vocabulary_size(engine.module) if config.model.language_model is not None else None,
        left_out=config.loader.leave_out,
    )


def build_store(config: RunConfig, resolved: ResolvedSettings, job: Job, directory: Path) -> CheckpointStore:
    """Return the store of this run's checkpoints, with its retention rule. Collective."""
    section = config.checkpoint
    retention = Retention(section.keep_last, section.keep_every, section.keep_best)
    return CheckpointStore(directory / "checkpoints", retention, job, str(resolved.split))
