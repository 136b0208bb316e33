"""The class Run, which builds, steps, evaluates and saves a run. The command `train` uses it, too.

The functions `evaluate`, `generate` and `export` need only a checkpoint.

Errors that a user can cause are PipelineErrors. pipeline.training.run_rank turns them into exit codes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.checkpoint.export import ExportResult
from pipeline.checkpoint.export import export as export_weights
from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.optional_packages import require_deepspeed
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.data.same_data_check import check_same_data
from pipeline.distributed.accelerator import choose_accelerator
from pipeline.distributed.machine import process_age, raise_open_files_limit, read_memory_usage
from pipeline.distributed.process_group import Job, describe_device, start_job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.distributed.ranks import Ranks, read_ranks
from pipeline.distributed.signals import stop_with_launcher
from pipeline.distributed.watchdog import may_be_from_peer
from pipeline.engine.memory import count_tensor_bytes
from pipeline.errors import ConfigError, DataError, ModelError, PipelineError
from pipeline.evaluation import from_checkpoint
from pipeline.evaluation.samples import (
    TEMPERATURE,
    TOP_K,
    Prompt,
    generate_text,
    sample_text,
    uses_chat_template,
)
from pipeline.evaluation.sources import ModelSource, open_source
from pipeline.files import replace_file
from pipeline.models.generation import GenerationSettings
from pipeline.monitoring.events import Event
from pipeline.monitoring.logs import log_to_console, log_to_file
from pipeline.monitoring.profiler import build_profiler, snapshot_if_profiling
from pipeline.monitoring.report.page import report_killed_run
from pipeline.monitoring.report.runs import record_processes
from pipeline.monitoring.trackers import check_trackers
from pipeline.monitoring.trackers.notify import notify_failure
from pipeline.planner.shapes import check_pretrained
from pipeline.redaction import declare_secret_variable, redact
from pipeline.training.assemble import assemble
from pipeline.training.banner import print_run_banner
from pipeline.training.callbacks import import_callbacks
from pipeline.training.device_failures import (
    MemoryAdvice,
    MemoryShortage,
    TrainingAdvice,
    advise_on_evaluation,
    advise_on_files,
    advise_on_generation,
    explain_failure,
)
from pipeline.training.expectation import forecast_on_this_machine
from pipeline.training.loop import GcFreezer, RunComponents, Step, TrainLoop
from pipeline.training.run_directory import agree_on_run_directory, write_split

if TYPE_CHECKING:  # lm-eval is imported only for runs with tasks
    from pipeline.evaluation.harness import LoadedTasks

log = logging.getLogger(__name__)


@dataclass
class JobContext:
    """One process of the job with its data. `Run` sets the directory, and `run_rank` sets `has_trained`."""

    job: Job
    """Ranks and device of this process."""
    data: DataBundle
    """Data of the run."""
    directory: Path | None = None
    """Directory of the run; `None` before it is chosen."""
    tasks: LoadedTasks | None = None
    """Tasks of `eval.tasks`; `None` without any."""
    tasks_error: PipelineError | None = None
    """Error of loading the tasks, which `Run` raises; `None` without an error, and on local rank 0."""
    created_folders: tuple[Path, ...] = ()
    """Folders that this process created for the run, innermost first."""
    has_trained: bool = False
    """Whether the run has completed a step. Set when training ends."""


@tag_errors(Phase.DATA)
def join_job(settings: Settings, ranks: Ranks, deepspeed: dict[str, Any] | None) -> JobContext:
    """Load the evaluation tasks, prepare the data and join the process group. Collective.

    Before that, this sets up logging to the console and checks what can be checked without a process group.

    Args:
        settings: From `load_settings`.
        ranks: Rank and world size of this process, from the launcher's environment.
        deepspeed: DeepSpeed's configuration for the device expected here, validated by DeepSpeed's own
            code; `None` without DeepSpeed.

    Raises:
        PipelineError: Something in the recipe, the JSON, the tasks or the data cannot be used, or some ranks
            did not join in time.
    """
    webhook_variable = settings.config.notify.webhook_env
    if webhook_variable is not None:
        declare_secret_variable(webhook_variable)
    log_to_console(ranks, settings.config.log.console)
    raise_open_files_limit(ranks.world_size, warn=ranks.is_main_process)
    choose_accelerator(warn=ranks.is_main_process)  # before DeepSpeed chooses one by itself
    if deepspeed is not None:
        require_deepspeed()
        from pipeline.engine.deepspeed_patches import check_with_deepspeed

        check_with_deepspeed(deepspeed)
    if ranks.is_main_process:
        check_trackers(settings.config)  # before data preparation, which can take hours
        import_callbacks(settings.config)
    check_pretrained(settings.config)
    tasks = None
    tasks_error = None
    if settings.config.eval.tasks:
        from pipeline.evaluation.training_tasks import load_training_tasks  # imports lm-eval

        try:
            tasks = load_training_tasks(settings)
        except PipelineError as error:
            if ranks.local_rank == 0:
                raise
            tasks_error = error  # without a job, the console shows only errors of local rank 0
    # Prepare data before the process group exists: it may take longer than the group's timeout. The rank
    # that gets the file lock prepares; the others wait for the lock, not in a collective.
    data = prepare_data(settings.config.data)
    section = settings.config.distributed
    job = start_job(
        ranks,
        distributed=settings.deepspeed is not None or ranks.world_size > 1,
        timeout=timedelta(seconds=section.timeout_seconds),
        bind_to_cores=section.bind_cores,
    )
    if ranks.world_size > 1:
        job.start_watchdog(section)
    return JobContext(job, data, tasks=tasks, tasks_error=tasks_error)


@contextmanager
def translate_device_failures(
    device: torch.device, advise: Callable[[MemoryShortage], MemoryAdvice]
) -> Iterator[None]:
    """Translate device failures inside the `with` block. Also usable as a decorator.

    Args:
        device: Device that the block computes on.
        advise: Returns the advice for a shortage of memory.

    Raises:
        DeviceMemoryError, DeviceFailedError: The original exception of torch or the system is the cause.
    """
    try:
        yield
    except Exception as error:
        explained = None if isinstance(error, PipelineError) else explain_failure(error, device, advise)
        if explained is None:
            raise
        raise explained from error


class Run:
    """A training run, in this process alone or as one rank of several that a launcher started.

    The constructor builds data, model and engine. If the run's directory has a checkpoint, the run resumes
    from it. Use the run in a `with` statement, or call `close`. Every method is collective: all ranks call
    the same methods in the same order.

    Between the first step and the last, SIGINT, SIGTERM, SIGUSR1 and SIGHUP request a stop, as they do for
    the command. `step` then saves a checkpoint, and the next call returns `None`.

    Args:
        settings: From `load_settings`.
        joined: Result of `join_job` if the process has already joined its job. Its fields about the directory
            are set here. The caller closes the engine and leaves the process group; `Run` does neither.

    Raises:
        PipelineError: Something you gave cannot be used. The subclass says what: ConfigError, DataError,
            ModelError, CheckpointError or LaunchError.
        DeviceMemoryError: The device ran out of memory. Every method raises this, too.
        DeviceFailedError: The device failed. Every method raises this, too.
    """

    def __init__(self, settings: Settings, joined: JobContext | None = None):
        self._stack = ExitStack()
        self._sample: str | None = None
        owns_job = joined is None
        # In a notebook the process is older than the run.
        start_time = time.perf_counter() - (0.0 if owns_job else process_age())
        # If the constructor fails, the stack undoes what was done so far, last first.
        with ExitStack() as stack:
            if joined is None:
                joined = _join_own_job(settings)
                stack.push(partial(_leave_job, joined.job))
            self._settings = settings
            self._job = joined.job
            self._data = joined.data
            self._translate_failures = partial(translate_device_failures, self._job.device)
            self._advice = TrainingAdvice(settings, self._job, read_memory_usage().resident)
            stack.enter_context(self._translate_failures(self._advice))
            if joined.tasks_error is not None:
                raise joined.tasks_error
            self._advice.forecast = partial(forecast_on_this_machine, self._job, self._data)
            config = settings.config
            resolved = settings.resolve(self._job.ranks.world_size, describe_device(self._job.device))
            check_same_data(self._job, self._data, is_custom=":" in config.data.kind)
            split = {
                "data": self._data.fingerprint,
                "global_batch_size": resolved.batch_plan.global_batch_size,
                "deepspeed": resolved.deepspeed,
                "world_size": self._job.ranks.world_size,
                "tf32": resolved.tf32,
            }
            killed_event = self._open_directory(joined, split, stack)
            gc_freezer = stack.enter_context(GcFreezer())
            stack.enter_context(snapshot_if_profiling(config, self._job, self._directory))
            self._parts = assemble(
                config, resolved, self._job, self._data, self._directory, tasks=joined.tasks
            )
            self._advice.count_states = partial(count_tensor_bytes, self._parts.engine)
            if resolved.batch_plan.is_provisional:
                resolved = self._record_micro_batch(split)
            self._parts.meters.set_start_time(start_time)
            if owns_job:
                stack.push(partial(_close_engine, self._parts))
            stack.callback(self._parts.loader.close)
            if self._job.watchdog is not None and not owns_job:
                # run_rank sends the alert once the watchdog has had time to find the cause on another rank.
                self._parts.trackers.may_notify = lambda error: not may_be_from_peer(error)
            stack.enter_context(self._parts.trackers)
            if killed_event is not None:
                self._parts.trackers.tell(self._parts.start.global_step, killed_event)
            profiler = build_profiler(
                config,
                self._directory,
                job=self._job,
                start=self._parts.start.global_step,
                tell=self._parts.trackers.tell,
            )
            profiled = stack.enter_context(profiler)
            self._loop = stack.enter_context(TrainLoop(self._parts, gc_freezer, profiled))
            self._has_chat_template = uses_chat_template(config.data, self._data.tokenizer)
            print_run_banner(settings, resolved, self._parts, self._directory)
            self._stack = stack.pop_all()

    def _open_directory(self, joined: JobContext, split: dict[str, Any], stack: ExitStack) -> Event | None:
        """Choose and lock the run's directory, and point logs and the watchdog to it.

        Args:
            joined: Receives the directory and the folders that were created.
            split: Content of split.json.
            stack: Receives the callbacks that release the lock and write summary.json at the end.

        Returns:
            An event if the run's last process was killed, on rank 0; else `None`.
        """
        config = self._settings.config
        self._directory, lock, created_folders = agree_on_run_directory(config, split, self._job)
        joined.directory = self._directory
        joined.created_folders = created_folders
        advise = self._advice.advise_on_killed
        killed_event = None
        if lock is not None:
            stack.callback(lock.release)
            killed_event = report_killed_run(self._directory, advise)
        stack.push(self._mark_finished)
        log_to_file(self._directory, self._job.ranks)
        if self._job.ranks.is_main_process:
            record_processes(self._directory, self._job.rank_processes)
        if self._job.watchdog is not None:
            notify = partial(notify_failure, config.notify, self._directory.resolve().name)
            self._job.watchdog.set_run_dir(self._directory, notify)
            self._job.watchdog.set_memory_advice(advise)
        return killed_event

    def _record_micro_batch(self, split: dict[str, Any]) -> ResolvedSettings:
        """Return the settings with the micro-batch that was found, and write it to split.json."""
        resolved = self._parts.resolved
        micro_batch_size = resolved.batch_plan.micro_batch_size
        self._advice.settings = self._settings.with_micro_batch_size(micro_batch_size)
        if self.is_main_process:
            found = {"deepspeed": resolved.deepspeed, "micro_batch_size": micro_batch_size}
            write_split(self._directory, split | found)
        return resolved

    @property
    def directory(self) -> Path:
        """Directory of the run: `runs/NAME-TIME`, or the recipe's `run_dir`."""
        return self._directory

    @property
    def is_main_process(self) -> bool:
        """Return whether this process is rank 0."""
        return self._job.ranks.is_main_process

    @property
    def global_step(self) -> int:
        """Number of optimizer steps completed, including those before a resume."""
        return self._loop.state.global_step

    @property
    def max_steps(self) -> int:
        """Number of the run's last optimizer step."""
        return self._parts.schedule.max_steps

    @property
    def stopped_by(self) -> int | None:
        """Number of the signal that stopped the run early; `None` if none did."""
        return self._loop.stopped_by

    @property
    def model(self) -> nn.Module:
        """The model without any wrapper, or this rank's shard of it. Valid until the run is closed."""
        return self._parts.engine.module

    def step(self) -> Step | None:
        """Make one optimizer step, with the log row, the evaluation and the checkpoint that are due after it.

        After the last step, or once all ranks agree to stop, the run's final checkpoint is saved.

        Returns:
            The step; `None` if the run was already over.

        Raises:
            NonFiniteLossError: Too many steps in a row had an infinite or NaN gradient.
            PipelineError: Something else that the user gave cannot be used, such as a row of the data.
        """
        with self._translate_failures(self._advice):
            return self._loop.step()

    def train(self) -> None:
        """Make all remaining steps, or those until a stop; see `stopped_by`.

        Raises:
            NonFiniteLossError: See `step`.
            PipelineError: See `step`.
        """
        with self._translate_failures(self._advice):
            self._loop.train()

    def evaluate(self) -> dict[str, float] | None:
        """Evaluate the current weights on the held-out data and the tasks, and log the row.

        If this step has been evaluated already, its row is returned and nothing is computed.

        Returns:
            The row (`eval/loss` ...); `None` if all ranks agreed to stop before the evaluation ended.

        Raises:
            DataError: No data is held out, and the run has no tasks.
        """
        if self._parts.eval_loader is None and self._parts.tasks is None:
            raise DataError(
                "data: nothing is held out to evaluate on; data.eval_fraction=0.1 holds out a tenth of the "
                "documents"
            )
        with self._translate_failures(self._advice):
            return self._loop.evaluate()

    def generate(
        self, prompt: str, *, max_new_tokens: int = 128, temperature: float = TEMPERATURE, seed: int = 0
    ) -> str:
        """Generate text with the current weights, between two steps and under any split.

        Training continues as if this had not been called.

        Args:
            prompt: Text to continue; for a model that trains on conversations, a question to answer.
            max_new_tokens: Maximum number of tokens to generate.
            temperature: Divisor of the logits; 0 always takes the likeliest token.
            seed: Seed of the sampling.

        Returns:
            The prompt with its continuation, or the answer.

        Raises:
            ModelError: The model is no language model, or the prompt is longer than its context.
        """
        if self._data.tokenizer is None:
            raise ModelError("this model writes no text; only language models do (model.kind: causal_lm)")
        settings = GenerationSettings(max_new_tokens, temperature, TOP_K, seed=seed)
        engine = self._parts.engine
        tokenizer = self._data.tokenizer
        with self._translate_failures(partial(advise_on_generation, max_new_tokens)):
            return generate_text(
                engine, tokenizer, prompt, settings, is_conversational=self._has_chat_template
            )

    def sample(self) -> str | None:
        """Generate the recipe's sample (section `sample`). It is also stored in summary.json.

        Returns:
            Prompt and continuation; `None` if the recipe asks for no sample or the model writes no text.
        """
        config = self._settings.config
        tokenizer = self._data.tokenizer
        if tokenizer is not None and config.sample.max_new_tokens:
            engine = self._parts.engine
            with self._translate_failures(partial(advise_on_generation, config.sample.max_new_tokens)):
                sample = sample_text(engine, self._data, config)
                self._sample = None if sample is None else sample.prompt + sample.text
        return self._sample

    def save(self) -> Path:
        """Save a checkpoint of this step unless it exists, and wait until it is on the disk.

        Returns:
            Folder of the checkpoint.

        Raises:
            CheckpointError: The checkpoint cannot be written, or the run has made no step yet.
        """
        with self._translate_failures(self._advice):
            return self._loop.save()

    def close(self) -> None:
        """End the run, as leaving its `with` statement does. A second call does nothing.

        This waits for a pending save, writes summary.json if the run is finished, unlocks the directory, and
        leaves the process group if the run joined it itself.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run as `close` does. After an exception this waits for nothing.

        With several ranks, no rank leaves the process group after an exception; the processes must exit.
        """
        stack = self._stack
        self._stack = ExitStack()
        if error is None and self.stopped_by is not None:
            # Half of the remaining grace period: the report and the process's exit need time, too.
            self._parts.trackers.close(128 + self.stopped_by, at_most=self._loop.grace_left() / 2)
        stack.__exit__(kind, error, trace)

    def _mark_finished(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write summary.json for a finished run, so that the same settings start a new run."""
        if error is not None or not self._loop.is_finished or not self.is_main_process:
            return
        summary = {
            "global_step": self.global_step,
            "skipped_steps": int(self._loop.state.skipped_steps),
            "sample": redact(self._sample),
        }
        if self._loop.stopped_early:
            summary["stopped_early"] = self._loop.stopped_early
        try:
            replace_file(self.directory / "summary.json", json.dumps(summary, indent=2))
        except OSError as problem:  # only a warning, because the last checkpoint is complete
            log.warning("summary.json cannot be written, so this run looks unfinished: %s", problem)


def _close_engine(parts: RunComponents, kind: object, error: BaseException | None, trace: object) -> None:
    if error is None or parts.job.ranks.world_size == 1:
        parts.engine.close()


def _join_own_job(settings: Settings) -> JobContext:
    """Join the job that the launcher's environment describes, or a job of this process alone."""
    ranks = read_ranks(os.environ)
    expected = settings.resolve_before_torch(ranks.world_size)
    if ranks.world_size > 1:
        stop_with_launcher(ranks)
    return join_job(settings, ranks, expected.deepspeed)


def _leave_job(job: Job, kind: object, error: BaseException | None, trace: object) -> None:
    if error is None:
        job.barrier()
    if error is None or job.ranks.world_size == 1:
        job.close()


def evaluate(
    source: str | Path, overrides: Sequence[str] = (), *, step: str | int = "last", import_paths: bool = True
) -> dict[str, float]:
    """Evaluate a checkpoint in one process, and return the row that the run would write.

    The checkpoint may come from any split.

    Args:
        source: Run directory, or one of its checkpoints.
        overrides: `key=value` of the sections data, eval, loader and batch.
        step: Checkpoint of the run: a step, `last` or `best`.
        import_paths: Whether code that the run's recipe names may be imported and run.

    Returns:
        Name of each metric -> value: `eval/loss` ...

    Raises:
        ConfigError: An override is not allowed or not valid, or the source is no run.
        DataError: No data is held out.
        CheckpointError: The checkpoint does not exist, or its weights are damaged.
        ModelError: The weights do not fit the model.
        DeviceMemoryError: The device ran out of memory.
        DeviceFailedError: The device failed.
    """
    return evaluate_source(open_source(source, step, overrides, import_paths=import_paths))


def evaluate_source(source: ModelSource) -> dict[str, float]:
    """Evaluate the checkpoint of a source on its run's data; see `evaluate`."""
    run = source.run
    if run is None:
        command = format_pipeline_command("evaluate", source.location, "--tasks", "addition")
        raise ConfigError(
            f"{source.location} is no run, so it has no held-out data to evaluate on; name tasks: {command}"
        )
    data = from_checkpoint.read_data(run)
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    advise = partial(advise_on_evaluation, run.micro_batch_size, run.sequence_length)
    with translate_device_failures(job.device, advise):
        return from_checkpoint.evaluate(run, job, data)


def generate(
    source: str | Path,
    prompt: Prompt,
    overrides: Sequence[str] = (),
    *,
    step: str | int = "last",
    base: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    import_paths: bool = True,
) -> str:
    """Generate text with a language model, in one process.

    A model that was trained on conversations answers the prompt, and so does a model of a folder or the hub
    with a chat template. Any other model continues it.

    Args:
        source: Run directory, one of its checkpoints, folder of transformers or of peft, or hub name.
        prompt: Text to continue or question to answer; or messages with `role` and `content` to answer.
        overrides: `key=value` of a run's sections data, eval, loader and batch, or
            `model.trust_remote_code=true`.
        step: Checkpoint of a run: a step, `last` or `best`.
        base: Folder, run or hub name of an adapter's base; `None`: the one that its config names.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        top_k: Number of likeliest tokens to draw from; 0: all tokens.
        top_p: Probability that the likeliest tokens have together, from which one is drawn.
        min_p: Lowest probability of a token to draw, as a share of the likeliest token's.
        stop: Strings that end the text, and are not part of it.
        seed: Seed of the sampling.
        import_paths: Whether code that a run's recipe names may be imported and run.

    Returns:
        The prompt with its continuation, or the answer.

    Raises:
        ConfigError: An override is not allowed or not valid.
        DataError: A value is out of its range, or the chat template refuses the conversation.
        ModelError: There is no such model, it is no language model, or the prompt is longer than its context.
        CheckpointError: The checkpoint does not exist, or its weights are damaged.
        DeviceMemoryError: The device ran out of memory.
        DeviceFailedError: The device failed.
    """
    settings = GenerationSettings(
        max_new_tokens, temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    opened = open_source(source, step, overrides, base=base, import_paths=import_paths)
    return generate_from_source(opened, prompt, settings, stop)


def generate_from_source(
    source: ModelSource, prompt: Prompt, settings: GenerationSettings, stop: Sequence[str]
) -> str:
    """Return a text by the language model of a source; see `generate` and generate_text."""
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    with translate_device_failures(job.device, partial(advise_on_generation, settings.max_new_tokens)):
        model = source.load(job)
        return generate_text(
            model.engine,
            model.tokenizer,
            prompt,
            settings,
            is_conversational=model.is_conversational,
            end_ids=model.end_ids,
            stop=stop,
        )


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: str | int = "last",
    dtype: str | None = None,
    merge: bool = False,
) -> ExportResult:
    """Write the weights of a checkpoint of any split to a folder.

    transformers opens the exported folder of a transformers model, and peft opens that of an adapter. The
    export runs in one process, and needs no GPU and none of the run's machines. It needs memory for the
    largest tensor.

    Args:
        run: Run directory, or one of its checkpoints.
        out: Folder to write, which must not exist or must be empty.
        step: Checkpoint of the run: a step, `last` or `best`.
        dtype: Dtype of the weights: `fp32`, `bf16` or `fp16`. `None` for fp32, or for a merged adapter the
            dtype of its base.
        merge: Whether to merge an adapter into its base, which must be at its recorded path.

    Returns:
        The files, their size, and the class of transformers that opens the folder.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged, `out` cannot be written, an argument
            does not suit the checkpoint, or a value does not fit into fp16.
        ModelError: The base of an adapter cannot be opened, or the adapter cannot be merged into it.
        DeviceMemoryError: The machine ran out of memory.
    """
    with translate_device_failures(torch.device("cpu"), advise_on_files):
        return export_weights(run, out, step=step, dtype=dtype, merge=merge)
