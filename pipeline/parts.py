"""What a run is made of, how far it is, and what is due at which step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.callbacks import CallbackRunner
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.optimizer_schema import ScheduleConfig
from pipeline.config.schema import EvalConfig
from pipeline.config.settings import Resolved
from pipeline.data.eval_loader import EvalLoader
from pipeline.data.loader import BatchSource
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine, StepResult
from pipeline.expectation import Expectation
from pipeline.histograms import HistogramMeter
from pipeline.metrics import Meters
from pipeline.objectives import Objective
from pipeline.replica_check import ReplicaCheck
from pipeline.safeguard import Safeguard
from pipeline.sinks import Sinks
from pipeline.watchers import Watcher


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
    def start(device: torch.device) -> TrainState:
        """The state at the beginning of a run."""
        return TrainState.of({"global_step": 0, "tokens_seen": 0, "skipped_steps": 0}, device)

    @staticmethod
    def of(remembered: Mapping[str, Any], device: torch.device) -> TrainState:
        """As a checkpoint remembers it."""
        tokens, skipped = (
            torch.tensor(float(remembered[key]), dtype=torch.float64, device=device)
            for key in ("tokens_seen", "skipped_steps")
        )
        return TrainState(int(remembered["global_step"]), tokens, skipped)


@dataclass(frozen=True)
class Cadence:
    """Every `every` steps, and at the last one. Pure, so that all ranks agree."""

    every: int
    last: int

    def due(self, step: int) -> bool:
        return step == self.last or (self.every > 0 and step % self.every == 0)

    def due_between(self, step: int) -> bool:
        """Whether a step behind this one and before the last is due."""
        return self.every > 0 and (step // self.every + 1) * self.every < self.last

    def due_or_first(self, step: int) -> bool:
        """Due, or before the first step."""
        return step == 0 or self.due(step)


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
class Parts:
    """Everything the loop needs, built by pipeline.assemble."""

    job: Job
    resolved: Resolved
    """With the micro-batch that was found, where the recipe leaves it open."""
    engine: Engine
    objective: Objective
    loader: BatchSource
    eval_loader: EvalLoader | None
    checkpoints: CheckpointStore
    sinks: Sinks
    meters: Meters
    watchers: tuple[Watcher, ...]
    """What is asked about each row of training."""
    safeguard: Safeguard
    """What is done about a step that goes wrong."""
    replica_check: ReplicaCheck
    rows_behind: int
    """Steps that are launched before a row is read: 1 on a GPU, which is at work on it; 0 on a CPU, or where
    the run may go back."""
    expectation: Expectation
    """What the run is expected to take."""
    start: TrainState
    owes_evaluation: bool
    """That of the step it starts at has still to be done: of the first one, or of one that was stopped."""
    max_steps: int
    peak_learning_rate: float
    schedule: ScheduleConfig
    seed: int
    best_by: EvalConfig
    """Which metric of an evaluation chooses the best checkpoint."""
    log: Cadence
    eval: Cadence
    save: Cadence
    save_minutes: float
    """Between checkpoints, besides those of `save`; 0: only those."""
    grace_seconds: float | None
    """Between a signal to stop and the kill."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """What checkpoints say of an adapter and its base, see checkpoint.adapters."""
    histograms: HistogramMeter | None = None
    """Of weights and gradients; None: not asked for."""
    adds_noise: bool = False
    """Batches are to bring what noise on the embeddings is drawn from (`model.neftune_alpha`)."""
    callbacks: CallbackRunner | None = None
    tell_sample: Callable[[int], None] | None = None
    """Has the model write after the evaluation of a step. Collective; None: it does not."""
