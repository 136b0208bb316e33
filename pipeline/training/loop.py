"""The training loop, which decides when to step, log, evaluate, save and stop.

It calls the components of a run. It does not know how they compute, nor which files they write.
"""

from __future__ import annotations

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.checkpoint.catalog import folder_name
from pipeline.checkpoint.store import CheckpointStore, SaveOutcome
from pipeline.config.schema import EvalConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.data.loader import BatchSource, EvalLoader
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.distributed.stopping import Flags, PeriodicTimer, StopOnSignal
from pipeline.engine.interface import Engine, StepResult
from pipeline.engine.schedule import LearningRate
from pipeline.errors import CheckpointError
from pipeline.evaluation.held_out import evaluate, get_best_metric
from pipeline.monitoring.alerts import Alert, RollbackRequested, RowDetails, collect_alert_state
from pipeline.monitoring.events import STOPPED_EARLY, Event
from pipeline.monitoring.histograms import HistogramMeter
from pipeline.monitoring.metrics import Meters
from pipeline.monitoring.profiler import StepContext
from pipeline.monitoring.row_queue import DeferredRow, RowQueue
from pipeline.monitoring.trackers.interface import Trackers
from pipeline.objectives import Objective
from pipeline.training.callbacks import CallbackRunner, Moment
from pipeline.training.expectation import Expectation
from pipeline.training.replica_check import ReplicaCheck
from pipeline.training.safeguard import Recovery, Safeguard
from pipeline.training.step import TrainStep

if TYPE_CHECKING:  # lm-eval is imported only for runs with tasks
    from pipeline.evaluation.training_tasks import TrainingTasks

log = logging.getLogger(__name__)


class GcFreezer:
    """Excludes long-lived objects from garbage collection while a run lasts.

    On entry it freezes everything imported so far, and `freeze` adds the model, the engine and compiled code.
    With transformers imported there are 400,000 objects, and a full collection takes 0.2 s. Such a collection
    on one rank makes all other ranks wait in that step. Freezing also saves 0.3 to 0.5 s of the start.
    Younger objects are still collected, since a user's model may hold activations in reference cycles.

    If the process has already frozen objects itself, this does nothing: the two could not be told apart.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def freeze(self) -> None:
        """Exclude all objects that exist now from garbage collection."""
        if self._is_ours:
            gc.collect()  # frozen garbage would never be freed
            gc.freeze()

    def __enter__(self) -> GcFreezer:
        self._is_ours = not gc.get_freeze_count()
        if self._is_ours:
            gc.freeze()
        return self

    def __exit__(self, *raised: object) -> None:
        """Make all frozen objects collectable again."""
        if self._is_ours:
            gc.unfreeze()
        self._is_ours = False


@dataclass(frozen=True)
class TrainState:
    """Progress of a run. The tensors are 0-dim on the device; reading one synchronizes with the device."""

    global_step: int
    """Number of optimizer steps completed."""
    tokens_seen: Tensor
    """Number of tokens or samples that counted in the loss, over all ranks; see `Objective.unit`."""
    skipped_steps: Tensor
    """Number of completed steps whose gradient was not finite, so that they changed no weights."""

    def after(self, result: StepResult) -> TrainState:
        """Return the state one optimizer step later."""
        return TrainState(
            global_step=self.global_step + 1,
            tokens_seen=self.tokens_seen + result.global_count,
            skipped_steps=self.skipped_steps + result.skipped.to(self.skipped_steps),
        )

    @staticmethod
    def start(device: torch.device) -> TrainState:
        """Return the state at the beginning of a run."""
        return TrainState.from_checkpoint({"global_step": 0, "tokens_seen": 0, "skipped_steps": 0}, device)

    @staticmethod
    def from_checkpoint(state: Mapping[str, Any], device: torch.device) -> TrainState:
        """Return the progress that the state stored in a checkpoint describes."""
        return TrainState(
            global_step=int(state["global_step"]),
            tokens_seen=torch.tensor(float(state["tokens_seen"]), dtype=torch.float64, device=device),
            skipped_steps=torch.tensor(float(state["skipped_steps"]), dtype=torch.float64, device=device),
        )


@dataclass(frozen=True)
class Cadence:
    """Schedule of a recurring action, equal on all ranks."""

    every: int
    """Number of steps between two actions; 0 for the last step only."""
    last: int
    """Number of the run's last step, at which the action is always due."""

    def is_due(self, step: int) -> bool:
        """Return whether the action is due after this step."""
        return step == self.last or (self.every > 0 and step % self.every == 0)

    def is_due_before_last(self, step: int) -> bool:
        """Return whether the action is due at any step after this one and before the last."""
        return self.every > 0 and (step // self.every + 1) * self.every < self.last

    def is_due_or_first(self, step: int) -> bool:
        """Return whether the action is due after this step; always true before the first step (0)."""
        return step == 0 or self.is_due(step)


@dataclass(frozen=True)
class RunSchedule:
    """Schedule by which a run logs, evaluates, saves and ends."""

    max_steps: int
    """Number of the run's last optimizer step."""
    samples_per_epoch: int
    """Number of training samples of one pass over the data, over all ranks."""
    log: Cadence
    """Schedule of log rows; the first step has a row, too."""
    eval: Cadence
    """Schedule of evaluations."""
    tasks: Cadence
    """Schedule of evaluations that include tasks."""
    save: Cadence
    """Schedule of checkpoints."""
    save_minutes: float
    """Minutes between further checkpoints, besides those of `save`; 0 for none."""
    grace_seconds: float | None
    """Seconds from a signal to stop until the scheduler kills the process; `None` if there is no limit."""
    owes_evaluation: bool = False
    """Whether this process begins with an evaluation: of the untrained model, or of a checkpoint whose
    evaluation was due and did not take place."""
    rows_behind: int = 0
    """Number of further steps that are launched before a row is read: 1 on a GPU, which still computes the
    row; 0 on a CPU, or if the run may roll back."""


@dataclass(frozen=True)
class RunComponents:
    """Components of a run, built by pipeline.training.assemble. `None` if the recipe does not ask for one."""

    job: Job
    """Ranks and device of this process."""
    resolved: ResolvedSettings
    """Resolved settings, with the micro-batch that was found if the recipe says `auto`."""
    start: TrainState
    """Progress at the start of this process: of the checkpoint that the run resumes from, or of a new run."""
    schedule: RunSchedule
    engine: Engine
    objective: Objective
    loader: BatchSource
    """Source of this rank's training batches."""
    learning_rate: LearningRate
    """Function from the number of steps completed to the learning rate of the next step."""
    seed: int
    """Seed of the run."""
    adds_noise: bool
    """Whether batches carry the keys of the noise on embeddings (`model.neftune_alpha`)."""
    eval_loader: EvalLoader | None
    """Loader of this rank's held-out batches; `None` if no data is held out."""
    eval_config: EvalConfig
    """Section `eval` of the recipe, whose `best_metric` chooses the best checkpoint."""
    checkpoints: CheckpointStore
    """Store of the run's checkpoints."""
    adapter: Mapping[str, Any]
    """Description of an adapter and its base for checkpoints, see checkpoint.adapters; empty without one."""
    trackers: Trackers
    """Receivers of rows and events, such as metrics.jsonl."""
    meters: Meters
    """Measures steps and builds log rows."""
    alerts: tuple[Alert, ...]
    """Alerts that judge each row."""
    safeguard: Safeguard
    """Decides which steps count."""
    expectation: Expectation
    """Forecast of memory and speed."""
    replica_check: ReplicaCheck | None = None
    """Comparison of replicas; `None` if nothing is compared."""
    histograms: HistogramMeter | None = None
    """Histograms of weights and gradients."""
    callbacks: CallbackRunner | None = None
    tasks: TrainingTasks | None = None
    """Evaluation tasks of lm-evaluation-harness."""
    report_sample: Callable[[int], None] | None = None
    """Function that generates and reports a sample after the evaluation of a step. Collective."""


@dataclass(frozen=True)
class Step:
    """One optimizer step and its results."""

    global_step: int
    """Number of optimizer steps completed, this one included."""
    evaluation: dict[str, float] | None
    """Evaluation of the weights after the step; `None` if none was due or there is nothing to evaluate on."""
    deferred_row: DeferredRow | None = field(repr=False)
    """Log row, readable once the device has computed the step; `None` if none was due."""

    @property
    def row(self) -> dict[str, float] | None:
        """Log row; `None` if none was due after the step. On a GPU this waits for the step to end."""
        return self.deferred_row.read().row if self.deferred_row is not None else None


class TrainLoop:
    """Makes the steps of a run and everything that is due after each. All calls are collective.

    From the first step to the last, a signal requests a stop. The request is sent as a flag with the token
    count of a step, and takes effect once all ranks have read it. On CUDA the flags are read two steps late,
    so that the host never waits for the device. As a context manager the loop waits on exit for a pending
    save; after an exception it waits for no other rank.

    Args:
        parts: Components of the run.
        gc_freezer: Freezes the objects that exist after the first step; `None` to freeze nothing.
        profiled: Function that returns a context manager around the step of the given number.
    """

    def __init__(
        self, parts: RunComponents, gc_freezer: GcFreezer | None = None, profiled: StepContext = nullcontext
    ):
        self.state = parts.start
        """Progress of the run."""
        self._parts = parts
        self._schedule = parts.schedule
        self._gc_freezer = gc_freezer
        self._save_timer: PeriodicTimer | None = None
        self._stop = StopOnSignal()
        self._recovery = Recovery(
            job=parts.job,
            engine=parts.engine,
            objective=parts.objective,
            source=parts.loader,
            plan=parts.resolved.batch_plan,
            seed=parts.seed,
            adds_noise=parts.adds_noise,
            checkpoints=parts.checkpoints,
            safeguard=parts.safeguard,
            replica_check=parts.replica_check,
            meters=parts.meters,
            alerts=parts.alerts,
            callbacks=parts.callbacks,
            trackers=parts.trackers,
        )
        self._train_step = TrainStep(
            engine=parts.engine,
            objective=parts.objective,
            source=parts.loader,
            learning_rate=parts.learning_rate,
            seed=parts.seed,
            adds_noise=parts.adds_noise,
            progress=parts.job.progress,
            stop=self._stop,
            safeguard=parts.safeguard,
            recovery=self._recovery,
            replica_check=parts.replica_check,
            histograms=parts.histograms,
            callbacks=parts.callbacks,
            profiled=profiled,
        )
        self._rows = RowQueue(
            alerts=parts.alerts,
            trackers=parts.trackers,
            handle_alert=self._recovery.handle_alert,
            on_row=self._after_row if parts.callbacks is not None else None,
        )
        self._evaluation: dict[str, float] | None = None  # row of the last evaluation by this process
        self._evaluated_at = parts.callbacks.evaluated_at if parts.callbacks is not None else -1
        self._requests = Flags()  # requests of callbacks and of the save timer that are not done yet
        self._write_seconds = 0.0  # of the last completed save
        self._signals = ExitStack()
        self._has_begun = False
        self._stopped = False  # whether all ranks agreed to stop because of a signal
        self._is_over = False  # whether no further step can be made, for any reason
        self.is_finished = False
        """Whether the run has made and saved its last step."""
        self.stopped_early = ""
        """Reason why a callback ended the run before `max_steps`, known to rank 0; empty if none did."""

    @property
    def stopped_by(self) -> int | None:
        """Number of the signal that stopped the run; `None` if none did."""
        return (self._stop.signal_number or signal.SIGTERM) if self._stopped else None

    def grace_left(self) -> float:
        """Return the seconds until the scheduler kills the process.

        Infinite if the recipe sets no limit, or before a signal to stop.
        """
        grace = self._schedule.grace_seconds
        if grace is None or self._stop.signal_time is None:
            return math.inf
        return grace - (time.monotonic() - self._stop.signal_time)

    def step(self) -> Step | None:
        """Make one optimizer step, with the log row, the evaluation and the checkpoint that are due.

        After the last step, or once all ranks agree to stop, the final checkpoint is saved.

        Returns:
            The step; `None` if the run is over.

        Raises:
            StoppedError, NonFiniteLossError, DeviceFailedError: See Safeguard and Recovery.
            CheckpointError: A checkpoint cannot be written.
        """
        step = self._step()
        if self._parts.checkpoints.is_under_way:
            self._parts.checkpoints.hold_device()  # the caller may change the weights
        return step

    def train(self) -> None:
        """Make all remaining steps."""
        while self._step() is not None:
            pass

    def _step(self) -> Step | None:
        if not self._has_begun:
            self._begin()
        if self._is_over:
            return None
        parts = self._parts
        schedule = self._schedule
        row = None
        result, agreed, learning_rate = self._train_step.run(self.state.global_step, self._save_timer)
        if result is None:
            self._stopped = True
            self._end_if_due()
            return None
        self.state = self.state.after(result)
        step = self.state.global_step
        parts.meters.observe(result)
        if step == parts.start.global_step + 1:
            self._prepare_saves(step)
        if step == 1 or schedule.log.is_due(step):
            row = self._build_row(learning_rate)
            self._rows.add(step, row, parts.histograms.finish_step(step) if parts.histograms else None)
        # On a GPU this writes the row of the previous step, so that no step waits for its own row.
        rollback = self._rows.write_until(step - schedule.rows_behind)
        if rollback is not None:
            return self._roll_back(rollback)
        if any(agreed):
            self._requests |= agreed
        if (schedule.eval.is_due(step) or self._requests.evaluate) and not agreed.stop:
            self._evaluate()
        self._stopped |= agreed.stop
        # The checkpoint of the last step is saved at the end, where waiting for it needs no copy in memory.
        is_last = step >= schedule.max_steps or self._requests.end
        if not self._stopped and not is_last and (self._requests.save or schedule.save.is_due(step)):
            if self._save_timer is not None:
                self._save_timer.restart()
            self._save()
        if parts.checkpoints.is_under_way:
            self._observe_saves()
        if self._stopped or is_last:
            self._end_if_due()
        if self._gc_freezer is not None and not self._is_over:
            with parts.meters.exclude_from_step_time():
                self._gc_freezer.freeze()
            self._gc_freezer = None
        return Step(step, self._evaluation if self._evaluated_at == step else None, row)

    def _prepare_saves(self, first_step: int) -> None:
        """Prepare the store if any checkpoint is due before the last step.

        Args:
            first_step: Number of this process's first step, which is completed.
        """
        parts = self._parts
        schedule = self._schedule
        is_due = schedule.save_minutes or schedule.save.is_due_before_last(first_step - 1)
        if first_step < schedule.max_steps and is_due:
            with parts.meters.exclude_from_step_time("checkpoint"):
                parts.checkpoints.prepare(parts.engine)

    def _roll_back(self, request: RollbackRequested) -> Step:
        """Restore the state before a bad step, as if no step since had been made."""
        checkpoint_state = self._recovery.roll_back(request, self.state.global_step)
        self._train_step.forget_requests()
        self.state = TrainState.from_checkpoint(checkpoint_state, self._parts.engine.device)
        self._evaluation = None
        self._evaluated_at = -1
        self._requests = Flags()
        return Step(self.state.global_step, None, None)

    def _write_rows(self) -> None:
        """Write all rows so far. Synchronizes with the device."""
        rollback = self._rows.write_until(self.state.global_step)
        # A run that may roll back reads each row with its step, so no row can request a rollback here.
        assert rollback is None

    def evaluate(self) -> dict[str, float] | None:
        """Evaluate the current weights unless this was already done, and log the row.

        Returns:
            The row; see `_evaluate`.
        """
        if not self._has_begun:
            self._begin()
        if self._evaluated_at == self.state.global_step and self._evaluation is not None:
            return self._evaluation
        row = self._evaluate()
        self._end_if_due()
        return row

    def save(self) -> Path:
        """Save a checkpoint of this step, wait until it is on the disk, and return its folder.

        Raises:
            CheckpointError: The checkpoint cannot be written, or the run has made no step yet.
        """
        if self.state.global_step == 0:
            raise CheckpointError("the run has nothing to save before its first step; make a step first")
        self._save(waits=True)
        self._observe_saves()
        return self._parts.checkpoints.folder / folder_name(self.state.global_step)

    def _report_totals(self) -> None:
        """Report measured memory and speed against the forecast, and this process's time by phase."""
        if self._has_begun and not self._parts.trackers.is_empty:
            meters = self._parts.meters
            comparison = self._parts.expectation.compare(meters.peak_gib, meters.samples_per_second)
            if comparison is not None:
                self._parts.trackers.tell(self.state.global_step, comparison)
            time_spent = meters.build_time_event()
            if self._parts.objective.unit == "tokens":
                tokens = {"tokens_seen": float(self.state.tokens_seen)}
                time_spent = replace(time_spent, fields={**time_spent.fields, **tokens})
            self._parts.trackers.tell(self.state.global_step, time_spent)

    def __enter__(self) -> TrainLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        if error is None:
            self._write_rows()
            with self._parts.meters.exclude_from_step_time("checkpoint"):
                self._parts.checkpoints.close()
            if not self._stopped:
                self._report_totals()
        else:
            self._rows.write_what_arrives()

    def _begin(self) -> None:
        """Start the clocks and make the evaluation that is due before the first step of this process.

        That is the evaluation of an untrained model, or one that a stop cut off. A stop loses no row: its
        checkpoint has no evaluation loss, and so the next start knows that it must evaluate first.
        """
        self._has_begun = True
        parts = self._parts
        if self._schedule.save_minutes and parts.job.ranks.is_main_process:  # one clock for all ranks
            self._save_timer = PeriodicTimer(60 * self._schedule.save_minutes)
        self._signals.enter_context(self._stop)
        parts.meters.begin()
        if parts.callbacks is not None:
            self._add_requests(parts.callbacks.run_begins(self._build_moment(parts.callbacks)))
        owes_evaluation = self._schedule.owes_evaluation or self._requests.evaluate
        if owes_evaluation and self._evaluate() is not None and self.state.global_step > 0:
            self._save()  # again, because the evaluation decides which checkpoint is the best
        self._end_if_due()

    def _end_if_due(self) -> None:
        """Save the final checkpoint and close the run if it is finished or stopped.

        A run that was stopped before its first step saves nothing; the same command starts it again.
        """
        step = self.state.global_step
        if self._is_over or not (self._stopped or self._requests.end or step >= self._schedule.max_steps):
            return
        if self._requests.end and not self._stopped and self._evaluated_at != step:
            self._evaluate()
        self._is_over = True
        self._write_rows()
        if self._requests.end and not self._stopped and step < self._schedule.max_steps:
            self._report_early_stop()
        self._parts.job.progress.start_activity("saving", step)
        with self._parts.meters.exclude_from_step_time("checkpoint"):
            if step > 0 and (not self._stopped or self._has_time_to_save()):
                self._call_before_save("save", *([] if self._stopped else ["evaluate", "stop"]))
                self._parts.checkpoints.save_final(self._parts.engine, self._build_checkpoint_state())
            self._parts.checkpoints.wait()
        self.is_finished = not self._stopped
        if self._parts.callbacks is not None:
            now = self._build_moment(self._parts.callbacks, is_finished=self.is_finished)
            self._parts.callbacks.call("run_ends", now)
        if self._stopped:  # before the trackers are closed with the reason for the end
            self._report_totals()
        self._parts.job.progress.start_activity("ending")
        self._signals.close()

    def _save(self, waits: bool = False) -> None:
        """Save a checkpoint of this step.

        Args:
            waits: Whether to wait until the checkpoint is on the disk.
        """
        parts = self._parts
        self._write_rows()  # so that all rows up to the checkpoint's step are on the disk
        parts.job.progress.start_activity("saving", self.state.global_step)
        self._call_before_save("save")
        save = parts.checkpoints.save_final if waits else parts.checkpoints.save
        with parts.meters.exclude_from_step_time("checkpoint"):
            save(parts.engine, self._build_checkpoint_state())

    def _observe_saves(self) -> None:
        """Pass the times of completed saves to the meters."""
        for outcome in self._parts.checkpoints.poll():
            self._observe_save(outcome)

    def _observe_save(self, outcome: SaveOutcome) -> None:
        self._write_seconds = outcome.write_seconds or 0.0
        self._parts.meters.observe_save(outcome.stall_seconds, self._write_seconds)

    def _has_time_to_save(self) -> bool:
        """Return whether another save fits into the grace period, judged by the duration of the last one.

        A killed save harms nothing, but the run would not end with the exit code of a stop.
        """
        seconds_left = self.grace_left()
        fits = self._write_seconds < seconds_left
        if not fits:
            log.warning(
                "the final checkpoint is skipped: %.0f s of checkpoint.grace_seconds are left, and the last "
                "checkpoint took %.0f s; the same command resumes from that one",
                seconds_left,
                self._write_seconds,
            )
        is_late = torch.tensor(float(not fits), device=self._parts.engine.device)
        return bool(self._parts.job.all_reduce_sum(is_late) == 0)  # alike on all ranks

    def _build_row(self, learning_rate: float) -> DeferredRow:
        """Return the row of the steps since the last row, readable once the device has computed it.

        Collective.
        """
        parts = self._parts
        further: dict[str, float | Tensor] = {
            "train/learning_rate": learning_rate,
            **parts.loader.metrics(),
            "train/skipped_steps": self.state.skipped_steps,
        }
        if parts.objective.unit == "tokens":
            further["train/tokens_seen"] = self.state.tokens_seen
        return parts.meters.collect_row(further)

    def _evaluate(self) -> dict[str, float] | None:
        """Evaluate the current weights, log the row and pass it to the callbacks.

        Returns:
            The row; `None` if there is nothing to evaluate on, or all ranks agreed to stop before the
            evaluation ended.
        """
        parts = self._parts
        step = self.state.global_step
        tasks = parts.tasks if self._are_tasks_due(step) else None
        if parts.eval_loader is None and tasks is None:
            return None
        self._write_rows()
        parts.job.progress.start_activity("evaluation", step)
        # A model that draws random numbers in its evaluation draws the same ones after a resume.
        seed_step(parts.seed, step, parts.engine.seed_rank)
        with parts.meters.exclude_from_step_time("evaluation"):
            row: dict[str, float] | None = {}
            if parts.eval_loader is not None:
                row = evaluate(parts.engine, parts.objective, parts.eval_loader, parts.job, self._stop)
            if row is not None and tasks is not None:
                scores = tasks.evaluate(step, self._stop)
                row = None if scores is None else row | scores
            if row is None:
                self._stopped = True
            else:
                # Raises before the first step if the evaluation lacks the metric of eval.best_metric.
                get_best_metric(parts.eval_config, row, parts.objective)
                rollback = self._rows.write(step, RowDetails(row))
                assert rollback is None  # only alerts about training request a rollback
                self._evaluation = row
                self._evaluated_at = step
                if tasks is not None:
                    tasks.report(step)
                if parts.report_sample is not None:
                    parts.report_sample(step)
                if parts.callbacks is not None:
                    self._add_requests(
                        parts.callbacks.after_evaluation(self._build_moment(parts.callbacks, metrics=row))
                    )
                self._requests = self._requests._replace(evaluate=False)
        return row

    def _are_tasks_due(self, step: int) -> bool:
        """Return whether an evaluation of this step includes the tasks."""
        is_always = self._parts.eval_config.tasks_every == 1 or self._requests.end
        return is_always or self._schedule.tasks.is_due_or_first(step)

    def _add_requests(self, requests: Collection[str]) -> None:
        """Add requests of callbacks to those that the run acts on, alike on all ranks."""
        self._requests |= Flags(
            save="save" in requests, evaluate="evaluate" in requests, end="stop" in requests
        )

    def _build_moment(self, callbacks: CallbackRunner, **more: Any) -> Moment:
        """Return the moment that callbacks receive. Synchronizes with the device."""
        tokens = float(self.state.tokens_seen) if self._parts.objective.unit == "tokens" else 0.0
        return callbacks.build_moment(self.state.global_step, self._parts.loader.samples_seen, tokens, **more)

    def _after_row(self, step: int, row: Mapping[str, float]) -> None:
        """Call the callbacks with a row, which may belong to an earlier step than the current one."""
        callbacks = self._parts.callbacks
        assert callbacks is not None
        samples = int(row["train/samples_seen"])
        tokens = row.get("train/tokens_seen", 0.0)
        callbacks.call("after_row", callbacks.build_moment(step, samples, tokens, metrics=row))

    def _call_before_save(self, *done: str) -> None:
        """Call `before_save` of the callbacks, and mark the requests `done` as done by this save."""
        callbacks = self._parts.callbacks
        if callbacks is not None:
            callbacks.call("before_save", self._build_moment(callbacks))
            callbacks.mark_done(*done)
        if "save" in done:
            self._requests = self._requests._replace(save=False)

    def _report_early_stop(self) -> None:
        """Report the reason why the run ends early. Only rank 0 knows it."""
        callbacks = self._parts.callbacks
        step = self.state.global_step
        if callbacks is not None and callbacks.stop_reason:
            self.stopped_early = callbacks.stop_reason
            message = f"the run ends at step {step} of {self._schedule.max_steps}: {callbacks.stop_reason}"
            self._parts.trackers.tell(step, Event(STOPPED_EARLY, message, level="info"))

    def _build_checkpoint_state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores besides the engine's, as JSON values.

        It has no state of random number generators, because these are seeded from seed, step and rank.
        """
        # Only an evaluation of exactly these weights may choose the best checkpoint.
        row = self._evaluation if self._evaluated_at == self.state.global_step else None
        best_by = None
        if row is not None:
            best_by = get_best_metric(self._parts.eval_config, row, self._parts.objective)
        return {
            "global_step": self.state.global_step,
            "tokens_seen": float(self.state.tokens_seen),
            "unit": self._parts.objective.unit,
            "skipped_steps": float(self.state.skipped_steps),
            "eval_loss": row.get("eval/loss") if row is not None else None,
            "best_by": best_by,
            "safeguard": self._parts.safeguard.state_dict(),
            "watchers": collect_alert_state(self._parts.alerts),
            "callbacks": self._parts.callbacks.state_dict() if self._parts.callbacks is not None else {},
            **self._parts.adapter,
            **self._parts.meters.state_dict(),
            **self._parts.loader.state_dict(),
        }
