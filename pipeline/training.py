"""The loop: when to step, log, evaluate, save and stop. It knows no device, rank, file or format."""

from __future__ import annotations

import logging
import random
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.schema import ScheduleConfig
from pipeline.data.loader import EvalLoader
from pipeline.data.random_numbers import derive_seed
from pipeline.data.source import BatchSource
from pipeline.distributed.process_group import Job
from pipeline.distributed.stopping import SAVE_FLAG, STOP_FLAG, Alarm, FlagReader, StopOnSignal
from pipeline.engine.interface import Engine, StepResult
from pipeline.evaluation import evaluate
from pipeline.metrics import Meters
from pipeline.objectives import Objective
from pipeline.schedule import multiplier
from pipeline.sinks import Sinks
from pipeline.watchers import Watcher, ask

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """How far the run is. The tensors are 0-dim on the device: reading one waits for it."""

    global_step: int
    tokens_seen: Tensor
    skipped_steps: Tensor

    def after(self, result: StepResult) -> TrainState:
        """The state one optimizer step later."""
        return replace(
            self,
            global_step=self.global_step + 1,
            tokens_seen=self.tokens_seen + result.global_count,
            skipped_steps=self.skipped_steps + result.skipped.to(self.skipped_steps),
        )

    @staticmethod
    def start(device: torch.device, step: int = 0, tokens: float = 0, skipped: float = 0) -> TrainState:
        """The state at the beginning of a run, or as a checkpoint remembers it."""
        numbers = (torch.tensor(float(n), dtype=torch.float64, device=device) for n in (tokens, skipped))
        return TrainState(step, *numbers)


@dataclass(frozen=True)
class Cadence:
    """Every `every` steps, and at the last one. Pure, so that all ranks agree."""

    every: int
    last: int

    def due(self, step: int) -> bool:
        return step == self.last or (self.every > 0 and step % self.every == 0)


def rows_until(step: int, logs: Cadence, evaluations: Cadence | None, owes: bool) -> dict[str, list[int]]:
    """Of which steps, up to this one, a run has written rows: of training, and of evaluations.

    Args:
        owes: The evaluation of this very step has still to come.
    """
    due = {"train": [at for at in range(1, step + 1) if at == 1 or logs.due(at)]}
    if evaluations is not None:
        due["eval"] = [0, *(at for at in range(1, step + 1 - owes) if evaluations.due(at))] if step else []
    return due


@dataclass(frozen=True)
class Measured:
    """The last evaluation."""

    step: int | None = None
    loss: float | None = None
    stopped: bool = False
    """It was not ended: a stop was agreed."""


@dataclass(frozen=True)
class Run:
    """Everything the loop needs, built by pipeline.assemble."""

    job: Job
    engine: Engine
    objective: Objective
    loader: BatchSource
    eval_loader: EvalLoader | None
    checkpoints: CheckpointStore
    sinks: Sinks
    meters: Meters
    watchers: tuple[Watcher, ...]
    """What is asked about each row of training."""
    start: TrainState
    owes_evaluation: bool
    """That of the step it starts at has still to be done: of the first one, or of one that was stopped."""
    max_steps: int
    peak_learning_rate: float
    schedule: ScheduleConfig
    seed: int
    log: Cadence
    eval: Cadence
    save: Cadence
    save_minutes: float
    """Between checkpoints, besides those of `save`; 0: only those."""
    grace_seconds: float | None
    """Between a signal to stop and the kill."""


def train(run: Run) -> tuple[TrainState, int | None]:
    """Trains to the last step, or until a stop is agreed.

    Returns:
        The final state, and the number of the signal that stopped the run (None: it finished).
    """
    state = run.start
    flag_reader = FlagReader(run.engine.device)
    # One clock for all ranks.
    alarm = Alarm(60 * run.save_minutes if run.job.ranks.is_main_process else 0)
    objective = run.meters.timed(run.objective)
    write_seconds = 0.0
    with StopOnSignal() as stop:
        measured = _catch_up(run, stop)
        stopped = measured.stopped
        while state.global_step < run.max_steps and not stopped:
            run.job.progress.at("step", state.global_step)
            with run.meters.waiting_for_data():
                micro_batches = run.loader.next_group()
            seed_step(run.seed, state.global_step, run.engine.seed_rank)
            learning_rate = run.peak_learning_rate * multiplier(
                run.schedule, state.global_step, run.max_steps
            )
            flags = STOP_FLAG if stop.requested else SAVE_FLAG if alarm.due() else 0
            result = run.engine.train_step(micro_batches, objective, learning_rate, flags)
            with run.meters.waiting_for_data():
                run.loader.fetch_ahead()
            state = state.after(result)
            run.meters.observe(result)
            agreed = flag_reader.read(result.flags)
            if state.global_step == 1 or run.log.due(state.global_step):
                row = _row(run, state, learning_rate)
                ask(run.watchers, state.global_step, row)
                run.sinks.write(state.global_step, row)
            if run.eval.due(state.global_step) and not agreed.stop:
                measured = _evaluate(run, state.global_step, stop)
            stopped = agreed.stop or measured.stopped
            if not stopped and (agreed.save or run.save.due(state.global_step)):
                alarm.restart()
                _save(run, state, measured)
            write_seconds = _saved(run, write_seconds)
        _save_last(run, state, measured, stop if stopped else None, write_seconds)
        return state, (stop.signal_number or signal.SIGTERM) if stopped else None


def _catch_up(run: Run, stop: StopOnSignal) -> Measured:
    """The evaluation that is due where the run starts: before the first step, or one that a stop left out."""
    if not run.owes_evaluation:
        return Measured()
    step = run.start.global_step
    measured = _evaluate(run, step, stop)
    if step > 0 and measured.loss is not None:
        _save(run, run.start, measured)  # once more: the best is chosen by it
    return measured


def _save_last(
    run: Run, state: TrainState, measured: Measured, stop: StopOnSignal | None, write_seconds: float
) -> None:
    """The checkpoint that a run ends with, finished or stopped.

    A run that was stopped before its first step has nothing to keep: it starts again.
    """
    run.job.progress.at("saving", state.global_step)
    if state.global_step > 0 and (stop is None or _has_time_to_save(run, stop, write_seconds)):
        run.checkpoints.save_final(run.engine, _remembered(run, state, measured))
    run.checkpoints.close()


def _save(run: Run, state: TrainState, measured: Measured) -> None:
    run.job.progress.at("saving", state.global_step)
    with run.meters.paused():
        run.checkpoints.save(run.engine, _remembered(run, state, measured))


def _saved(run: Run, write_seconds: float) -> float:
    """Measures the saves that have ended; how long the last one was written."""
    for outcome in run.checkpoints.poll():
        write_seconds = outcome.write_seconds or 0.0
        run.meters.observe_save(outcome.stall_seconds, write_seconds)
    return write_seconds


def _has_time_to_save(run: Run, stop: StopOnSignal, write_seconds: float) -> bool:
    """Whether one more save fits into the grace after a signal, by how long the last one took. Collective.

    A save that is killed harms nothing, but the run would not end with the exit code of a stop.
    """
    fits = True
    if run.grace_seconds is not None and stop.came_at is not None:
        left = run.grace_seconds - (time.monotonic() - stop.came_at)
        fits = write_seconds < left
        if not fits:
            log.warning(
                "not saved once more: %.0f s of checkpoint.grace_seconds are left, and the last checkpoint "
                "took %.0f s; the run goes on from that one",
                left,
                write_seconds,
            )
    return bool(run.job.all_reduce_sum(torch.tensor(float(not fits), device=run.engine.device)) == 0)


def _row(run: Run, state: TrainState, learning_rate: float) -> dict[str, float]:
    row = run.meters.summary() | {
        "train/learning_rate": learning_rate,
        "train/samples_seen": run.loader.samples_seen,
        "train/epoch": run.loader.epoch,
        "train/skipped_steps": int(state.skipped_steps),
    }
    if run.objective.unit == "tokens":
        row["train/tokens_seen"] = int(state.tokens_seen)
    samples = run.loader.source_samples()
    if len(samples) > 1:
        row |= {f"data/{name}_samples": count for name, count in samples.items()}
    return row


def _evaluate(run: Run, step: int, stop: StopOnSignal) -> Measured:
    if run.eval_loader is None:
        return Measured()
    run.job.progress.at("evaluation", step)
    seed_step(run.seed, step, run.engine.seed_rank)  # a model that draws here too draws the same after a stop
    with run.meters.paused():
        row = evaluate(run.engine, run.objective, run.eval_loader, run.job, stop)
        if row is None:
            return Measured(stopped=True)
        run.sinks.write(step, row)
    return Measured(step, row["eval/loss"])


def _remembered(run: Run, state: TrainState, measured: Measured) -> dict[str, Any]:
    """What a checkpoint keeps besides the engine's state; random numbers follow from seed and step."""
    return {
        "global_step": state.global_step,
        "tokens_seen": float(state.tokens_seen),
        "skipped_steps": float(state.skipped_steps),
        # Of these very weights, or not known: the best is chosen by it.
        "eval_loss": measured.loss if measured.step == state.global_step else None,
        **run.loader.state_dict(),
    }


def seed_step(seed: int, step: int, seed_rank: int) -> None:
    """Makes a step's random numbers (dropout) a pure function of seed, step and rank.

    No generator state needs to be saved, and a resumed run draws what the unbroken one would have drawn.
    """
    bits = derive_seed(seed, step, seed_rank) % 2**32
    torch.manual_seed(bits)
    np.random.seed(bits)
    random.seed(bits)
