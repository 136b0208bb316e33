"""The loop: when to step, log, evaluate, save and stop. It knows no device, rank, file or format."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.schema import ScheduleConfig
from pipeline.data.loader import EvalLoader
from pipeline.data.prefetch import DevicePrefetcher
from pipeline.distributed.process_group import Job
from pipeline.distributed.stopping import StopAgreement, StopOnSignal
from pipeline.engine.interface import Engine, StepResult
from pipeline.evaluation import evaluate
from pipeline.metrics import Meters
from pipeline.objectives import Objective
from pipeline.schedule import multiplier
from pipeline.sinks import Sinks


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


@dataclass(frozen=True)
class Run:
    """Everything the loop needs, built by pipeline.assemble."""

    job: Job
    engine: Engine
    objective: Objective
    loader: DevicePrefetcher
    eval_loader: EvalLoader | None
    checkpoints: CheckpointStore
    sinks: Sinks
    meters: Meters
    start: TrainState
    max_steps: int
    peak_learning_rate: float
    schedule: ScheduleConfig
    seed: int
    log: Cadence
    eval: Cadence
    save: Cadence


def train(run: Run) -> tuple[TrainState, int | None]:
    """Trains to the last step, or until a stop is agreed.

    Returns:
        The final state, and the number of the signal that stopped the run (None: it finished).
    """
    state = run.start
    agreement = StopAgreement(run.engine.device)
    stopped = False
    eval_loss: float | None = None
    with StopOnSignal() as stop:
        if state.global_step == 0:
            eval_loss = _evaluate(run, 0)
        while state.global_step < run.max_steps and not stopped:
            with run.meters.waiting_for_data():
                micro_batches = run.loader.next_group()
            seed_step(run.seed, state.global_step, run.engine.seed_rank)
            learning_rate = run.peak_learning_rate * multiplier(
                run.schedule, state.global_step, run.max_steps
            )
            result = run.engine.train_step(micro_batches, run.objective, learning_rate, stop.requested)
            with run.meters.waiting_for_data():
                run.loader.fetch_ahead()
            state = state.after(result)
            run.meters.observe(result)
            stopped = agreement.submit(result.stop_votes)
            if state.global_step == 1 or run.log.due(state.global_step):
                run.sinks.write(state.global_step, _row(run, state, learning_rate))
            if run.eval.due(state.global_step):
                eval_loss = _evaluate(run, state.global_step)
            if not stopped and run.save.due(state.global_step):
                with run.meters.paused():
                    run.checkpoints.save(run.engine, _remembered(run, state, eval_loss))
            for outcome in run.checkpoints.poll():
                run.meters.observe_save(outcome.stall_seconds, outcome.write_seconds or 0.0)
        run.checkpoints.save_final(run.engine, _remembered(run, state, eval_loss))
        run.checkpoints.close()
        return state, (stop.signal_number or 15) if stopped else None


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


def _evaluate(run: Run, step: int) -> float | None:
    if run.eval_loader is None:
        return None
    with run.meters.paused():
        row = evaluate(run.engine, run.objective, run.eval_loader, run.job)
        run.sinks.write(step, row)
    return row["eval/loss"]


def _remembered(run: Run, state: TrainState, eval_loss: float | None) -> dict[str, Any]:
    """What a checkpoint keeps besides the engine's state; random numbers follow from seed and step."""
    return {
        "global_step": state.global_step,
        "tokens_seen": float(state.tokens_seen),
        "skipped_steps": float(state.skipped_steps),
        "eval_loss": eval_loss,
        **run.loader.state_dict(),
    }


def seed_step(seed: int, step: int, seed_rank: int) -> None:
    """Makes a step's random numbers (dropout) a pure function of seed, step and rank.

    No generator state needs to be saved, and a resumed run draws what the unbroken one would have drawn.
    """
    mixed = int(np.random.SeedSequence((seed, step, seed_rank)).generate_state(1)[0])
    torch.manual_seed(mixed)
    np.random.seed(mixed)
    random.seed(mixed)
