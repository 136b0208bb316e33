"""A run as an object: built by its settings, stepped, evaluated, saved. `launch/train.py` is written on it.

Beside it the calls that need only a checkpoint: `evaluate`, `generate` and `export`.

What a user can cause is raised as a PipelineError; how a process ends is pipeline.training.run_rank's.
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
from typing import Any

import torch
from torch import nn

from pipeline.checkpoint.export import export as export_weights
from pipeline.config.optional_packages import require_deepspeed
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.data.digest import check_same_data
from pipeline.distributed.accelerator import choose_accelerator
from pipeline.distributed.machine import process_age, raise_open_files_limit, read_memory_usage
from pipeline.distributed.process_group import Job, describe_device, start_job
from pipeline.distributed.progress import Phase, phase
from pipeline.distributed.ranks import Ranks, read_ranks
from pipeline.distributed.signals import stop_with_launcher
from pipeline.engine.memory import count_tensor_bytes
from pipeline.errors import DataError, ModelError, PipelineError
from pipeline.evaluation import from_checkpoint
from pipeline.evaluation.samples import TEMPERATURE, generate_text, sample_text, uses_chat_template
from pipeline.files import replace_file
from pipeline.models.generation import GenerationSettings
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


@dataclass
class JobContext:
    """A process of the job, with its data; and the run's directory, once there is one."""

    job: Job
    data: DataBundle
    directory: Path | None = None
    made: tuple[Path, ...] = ()
    """Folders that this process made for the run, innermost first."""
    has_trained: bool = False
    """Whether a step was made."""


@phase(Phase.DATA)
def join_job(settings: Settings, ranks: Ranks, deepspeed: dict[str, Any] | None) -> JobContext:
    """Prepares the data and joins the process group. Collective.

    Args:
        deepspeed: The configuration on the device that there most likely is, for DeepSpeed's own validation.

    Raises:
        PipelineError: the JSON or the data cannot be used; not all ranks came.
    """
    if (variable := settings.config.notify.webhook_env) is not None:
        declare_secret_variable(variable)
    log_to_console(ranks, settings.config.log.console)
    raise_open_files_limit(ranks.world_size, is_told=ranks.is_main_process)
    choose_accelerator(tells=ranks.is_main_process)  # before DeepSpeed, which would choose itself
    if deepspeed is not None:
        require_deepspeed()
        from pipeline.engine.deepspeed_patches import check_with_deepspeed

        check_with_deepspeed(deepspeed)
    if ranks.is_main_process:
        check_trackers(settings.config)  # before hours go into the data
        import_callbacks(settings.config)
    check_pretrained(settings.config)
    # Before the process group exists: preparing data may take longer than its timeout.
    data = prepare_data(settings.config.data)
    waits = settings.config.distributed
    job = start_job(
        ranks,
        distributed=settings.deepspeed is not None or ranks.world_size > 1,
        timeout=timedelta(seconds=waits.timeout_seconds),
        bound=waits.bind_cores,
    )
    if ranks.world_size > 1:
        job.watch(waits)
    return JobContext(job, data)


log = logging.getLogger(__name__)


@contextmanager
def explain_failures(
    device: torch.device, advise: Callable[[MemoryShortage], MemoryAdvice]
) -> Iterator[None]:
    """Around what computes; or a decorator.

    Raises:
        DeviceMemoryError, DeviceFailedError: in place of torch's or the system's own, which is the cause.
    """
    try:
        yield
    except Exception as error:
        mistake = None if isinstance(error, PipelineError) else explain_failure(error, device, advise)
        if mistake is None:
            raise
        raise mistake from error


class Run:
    """One run of training, in this process alone or as one rank of those that a launcher started.

    It is built here: data, model, engine; where its directory has a checkpoint it goes on from there. Use it
    in `with`, or call `close`. Every method is collective: all ranks call the same ones in the same order.

    Between the first step and the last SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask for a stop, as they do of the
    command: `step` saves and says that it is over.

    Args:
        settings: From `load_settings`.
        joined: What `join` gave, where the process has joined its job already; whoever did leaves it too.

    Raises:
        PipelineError: something the user gave cannot work; ConfigError, DataError, ModelError,
            CheckpointError or LaunchError say what. DeviceMemoryError, DeviceFailedError: also of any method.
    """

    def __init__(self, settings: Settings, joined: JobContext | None = None):
        self._stack = ExitStack()
        leaves = joined is None
        began = time.perf_counter() - (0.0 if leaves else process_age())  # a notebook's is no start of a run
        with ExitStack() as stack:
            if joined is None:
                ranks = read_ranks(os.environ)
                expected = settings.resolve_before_torch(ranks.world_size)
                if ranks.world_size > 1:
                    stop_with_launcher(ranks)
                joined = join_job(settings, ranks, expected.deepspeed)
                stack.push(partial(_leave, joined.job))
            self._settings = settings
            self._job = joined.job
            self._data = joined.data
            self._explained = partial(explain_failures, self._job.device)
            self._advice = TrainingAdvice(settings, self._job, read_memory_usage().resident)
            stack.enter_context(self._explained(self._advice))
            self._advice.plan = partial(forecast_on_this_machine, self._job, self._data)
            config = settings.config
            resolved = settings.resolve(self._job.ranks.world_size, describe_device(self._job.device))
            check_same_data(self._job, self._data, is_custom=":" in config.data.kind)
            known = {
                "data": self._data.fingerprint,
                "global_batch_size": resolved.batch_plan.global_batch_size,
                "deepspeed": resolved.deepspeed,
                "world_size": self._job.ranks.world_size,
                "tf32": resolved.tf32,
            }
            self._directory, lock, made = agree_on_run_directory(config, known, self._job)
            joined.directory = self._directory
            joined.made = made
            if lock is not None:
                stack.callback(lock.release)
            advise = self._advice.advise_on_killed
            killed = report_killed_run(self._directory, advise) if lock is not None else None
            stack.push(self._mark_finished)
            log_to_file(self._directory, self._job.ranks)
            if self._job.ranks.is_main_process:
                record_processes(self._directory, self._job.everyone)
            if self._job.watchdog is not None:
                tell = partial(notify_failure, config.notify, self._directory.resolve().name)
                self._job.watchdog.write_to(self._directory, tell)
                self._job.watchdog.advised_by(advise)
            long_lived = stack.enter_context(GcFreezer())
            stack.enter_context(snapshot_if_profiling(config, self._job, self._directory))
            self._parts = assemble(config, resolved, self._job, self._data, self._directory)
            self._advice.states = partial(count_tensor_bytes, self._parts.engine)
            if resolved.batch_plan.is_auto:
                resolved = self._settled(known)
            self._parts.meters.set_start_time(began)
            if leaves:
                stack.push(partial(_close_engine, self._parts))
            stack.callback(self._parts.loader.close)
            stack.enter_context(self._parts.trackers)
            if killed is not None:
                self._parts.trackers.tell(self._parts.start.global_step, killed)
            profiler = build_profiler(
                config,
                self._directory,
                job=self._job,
                start=self._parts.start.global_step,
                tell=self._parts.trackers.tell,
            )
            profiled = stack.enter_context(profiler)
            self._loop = stack.enter_context(TrainLoop(self._parts, long_lived, profiled))
            self._sample: str | None = None
            self._asks = uses_chat_template(config.data, self._data.tokenizer)
            print_run_banner(settings, resolved, self._parts, self._directory)
            self._stack = stack.pop_all()

    def _settled(self, known: dict[str, Any]) -> ResolvedSettings:
        """With the micro-batch that was found, which what is kept of the run then says."""
        resolved = self._parts.resolved
        found = resolved.batch_plan.micro_batch_size
        self._advice.settings = self._settings.with_micro_batch_size(found)
        known |= {"deepspeed": resolved.deepspeed, "micro_batch_size": found}
        if self.is_main_process:
            write_split(self._directory, known)
        return resolved

    @property
    def directory(self) -> Path:
        """`runs/NAME-TIME`, or what `run_dir` says."""
        return self._directory

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._job.ranks.is_main_process

    @property
    def global_step(self) -> int:
        """Optimizer steps done, with those before a resume."""
        return self._loop.state.global_step

    @property
    def max_steps(self) -> int:
        """Where it ends."""
        return self._parts.schedule.max_steps

    @property
    def stopped_by(self) -> int | None:
        """The number of the signal that ended it early; None: none did."""
        return self._loop.stopped_by

    @property
    def model(self) -> nn.Module:
        """The model, or this rank's part of it, without any wrapper; until the run is closed."""
        return self._parts.engine.module

    def step(self) -> Step | None:
        """One optimizer step, with the log row, the evaluation and the checkpoint that the recipe asks for
        after it; after the last one, or where a stop is agreed, the checkpoint that the run ends with.

        Returns:
            None: the run was over.

        Raises:
            NonFiniteLossError: too many steps in a row had an infinite or NaN gradient.
            PipelineError: something else the user gave does not work, as a row of the data.
        """
        with self._explained(self._advice):
            return self._loop.step()

    def train(self) -> None:
        """All steps that are left, or those until a stop is agreed (`stopped_by`). Raises as `step` does."""
        with self._explained(self._advice):
            self._loop.train()

    def evaluate(self) -> dict[str, float] | None:
        """The row of the held-out data (`eval/loss` ...) with the weights as they are, logged if it is new.

        Returns:
            None: a stop was agreed before the end.

        Raises:
            DataError: nothing is held out.
        """
        if self._parts.eval_loader is None:
            raise DataError(
                "data: nothing is held out to evaluate on; data.eval_fraction=0.1 holds out a tenth of the "
                "documents"
            )
        with self._explained(self._advice):
            return self._loop.evaluate()

    def generate(
        self, prompt: str, *, max_new_tokens: int = 128, temperature: float = TEMPERATURE, seed: int = 0
    ) -> str:
        """As pipeline.generate, with the weights as they are; training goes on as if it had not been.

        Raises:
            ModelError: it is no language model, or the prompt is longer than what it sees.
        """
        if self._data.tokenizer is None:
            raise ModelError("the model writes no text; that is for language models (model.kind: causal_lm)")
        settings = GenerationSettings(max_new_tokens, temperature, seed=seed)
        engine = self._parts.engine
        tokenizer = self._data.tokenizer
        with self._explained(partial(advise_on_generation, max_new_tokens)):
            return generate_text(engine, tokenizer, prompt, settings, asks=self._asks)

    def sample(self) -> str | None:
        """The prompt of the section `sample` and what the model writes after it; in summary.json, too.

        Returns:
            None: it asks for nothing, or the model writes no text.
        """
        config = self._settings.config
        tokenizer = self._data.tokenizer
        if tokenizer is not None and config.sample.max_new_tokens:
            engine = self._parts.engine
            with self._explained(partial(advise_on_generation, config.sample.max_new_tokens)):
                sample = sample_text(engine, self._data, config)
                self._sample = None if sample is None else sample.prompt + sample.text
        return self._sample

    def save(self) -> Path:
        """A checkpoint of this step, unless there is one; on the disk when this returns. Its folder.

        Raises:
            CheckpointError: it cannot be written, or there was no step yet.
        """
        with self._explained(self._advice):
            return self._loop.save()

    def close(self) -> None:
        """Ends it: a save under way is waited for, a finished run gets its summary.json, the directory is
        unlocked and the process group left. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `close`; after an exception nothing is waited for, and of several ranks none leaves the group:
        their processes have to end."""
        stack = self._stack
        self._stack = ExitStack()
        if error is None and self.stopped_by is not None:
            # Half: the report and the process's exit need some, too.
            self._parts.trackers.close(128 + self.stopped_by, at_most=self._loop.grace_left() / 2)
        stack.__exit__(kind, error, trace)

    def _mark_finished(self, kind: object, error: BaseException | None, trace: object) -> None:
        """So that the same settings start a new run."""
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
        except OSError as problem:  # the last checkpoint is whole
            log.warning("summary.json is not written, so that this run looks unfinished: %s", problem)


def _close_engine(parts: RunComponents, kind: object, error: BaseException | None, trace: object) -> None:
    if error is None or parts.job.ranks.world_size == 1:
        parts.engine.close()


def _leave(job: Job, kind: object, error: BaseException | None, trace: object) -> None:
    if error is None:
        job.barrier()
    if error is None or job.ranks.world_size == 1:
        job.close()


def evaluate(
    run: str | Path, overrides: Sequence[str] = (), *, step: str | int = "last", import_paths: bool = True
) -> dict[str, float]:
    """Return the row that the run itself writes at an evaluation, by one process, whatever the checkpoint's
    split.

    Args:
        run: Run directory, or one of its checkpoints.
        overrides: `key=value` of data, eval, loader and batch.
        step: Which checkpoint of the run: a step, `last` or `best`.
        import_paths: Whether the run's recipe may name code to run.

    Raises:
        ConfigError: An override cannot be.
        DataError: Nothing is held out.
        CheckpointError, ModelError: There is no such checkpoint; the weights are damaged, or cannot be put
            into the model.
        DeviceMemoryError, DeviceFailedError: The device is out of memory, or of no more use.
    """
    opened = from_checkpoint.open_trained_run(Path(run), step, overrides, import_paths)
    data = from_checkpoint.read_data(opened)
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    remedies = partial(advise_on_evaluation, opened.micro_batch_size, opened.sequence_length)
    with explain_failures(job.device, remedies):
        return from_checkpoint.evaluate(opened, job, data)


def generate(
    run: str | Path,
    prompt: str,
    overrides: Sequence[str] = (),
    *,
    step: str | int = "last",
    max_new_tokens: int = 128,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    import_paths: bool = True,
) -> str:
    """Return the prompt and what a checkpoint's language model writes after it, by one process.

    A model that was trained on conversations answers the prompt.

    Args:
        run, overrides, step, import_paths: As of `evaluate`.
        temperature: 0: always the likeliest token.

    Raises:
        ConfigError: An override cannot be.
        ModelError: It is no language model, or the prompt is longer than what it can see.
        CheckpointError: The weights are damaged.
        DeviceMemoryError, DeviceFailedError: The device is out of memory, or of no more use.
    """
    opened = from_checkpoint.open_trained_run(Path(run), step, overrides, import_paths)
    tokenizer = from_checkpoint.load_tokenizer(opened)
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    settings = GenerationSettings(max_new_tokens, temperature, seed=seed)
    with explain_failures(job.device, partial(advise_on_generation, max_new_tokens)):
        return from_checkpoint.generate(opened, job, tokenizer, prompt, settings)


export = explain_failures(torch.device("cpu"), advise_on_files)(export_weights)
