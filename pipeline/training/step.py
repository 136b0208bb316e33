"""Makes one optimizer step that counts, with its samples, learning rate, random numbers and flags."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.data.loader import BatchSource, PrefetchingSource
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.progress import Progress
from pipeline.distributed.stopping import (
    END_FLAG,
    EVALUATE_FLAG,
    SAVE_FLAG,
    STOP_FLAG,
    FlagReader,
    Flags,
    PeriodicTimer,
    StopOnSignal,
)
from pipeline.engine.interface import Engine, StepResult
from pipeline.engine.schedule import LearningRate
from pipeline.monitoring.histograms import HistogramMeter
from pipeline.monitoring.profiler import StepContext
from pipeline.objectives import Objective
from pipeline.training.callbacks import CallbackRunner
from pipeline.training.replica_check import ReplicaCheck
from pipeline.training.safeguard import Recovery, Safeguard, add_noise_keys

FLAG_OF_REQUEST = {"evaluate": EVALUATE_FLAG, "save": SAVE_FLAG, "stop": END_FLAG}
"""Flag of each request of a callback."""


class StepOutcome(NamedTuple):
    """Result of one optimizer step."""

    result: StepResult | None
    """Result of the engine; `None` if all ranks agreed to stop before a step counted."""
    requests: Flags
    """Requests that all ranks have received in the meantime."""
    learning_rate: float
    """Learning rate of the step."""


@dataclass
class TrainStep:
    """Makes optimizer steps until one counts. Collective. A field is `None` if the recipe does not use it."""

    engine: Engine
    objective: Objective
    source: BatchSource
    """Source of this rank's batches."""
    learning_rate: LearningRate
    """Function from the number of steps completed to the learning rate of the next step."""
    seed: int
    """Seed of the run."""
    adds_noise: bool
    """Whether batches carry the keys of the noise on embeddings (`model.neftune_alpha`)."""
    progress: Progress
    stop: StopOnSignal
    """Receiver of the signals that request a stop."""
    safeguard: Safeguard
    """Decides whether a step counts."""
    recovery: Recovery
    """Reports replicas that differ, and searches for the cause of a non-finite step."""
    replica_check: ReplicaCheck | None = None
    histograms: HistogramMeter | None = None
    callbacks: CallbackRunner | None = None
    profiled: StepContext = nullcontext
    """Function that returns a context manager around the step of the given number."""

    def __post_init__(self) -> None:
        source = self.source
        self._prefetching = (
            source if isinstance(source, PrefetchingSource) and source.is_prefetching else None
        )
        self._flag_reader = FlagReader(self.engine.device)

    def run(self, global_step: int, save_timer: PeriodicTimer | None) -> StepOutcome:
        """Make optimizer steps until one counts: usually the first, unless the safeguard skips batches.

        Args:
            global_step: Number of optimizer steps completed.
            save_timer: Timer that requests checkpoints; `None` on ranks other than 0, or without
                `checkpoint.every_minutes`.

        Raises:
            NonFiniteLossError, StoppedError: Too many steps in a row were skipped.
            DeviceFailedError: Replicas differ, and `watch.on_corruption` is `stop`.
        """
        engine = self.engine
        source = self.source
        phases = self.engine.phases
        requests = Flags()
        learning_rate = self.learning_rate(global_step)
        while True:
            self.progress.start_activity("step", global_step)
            first_sample = source.samples_seen
            with phases.measure("data"):  # on a GPU, the time that it waits for the host
                micro_batches = source.next_group()
            samples = (first_sample, source.samples_seen)
            if self.replica_check is not None:
                self.replica_check.begin(global_step)
            if self.adds_noise:
                micro_batches = add_noise_keys(micro_batches, self.seed, global_step)
            # Random numbers depend on (seed, step, rank) only, so no generator state is saved, and a resumed
            # run draws what an uninterrupted run would have drawn.
            seed_step(self.seed, global_step, engine.seed_rank)
            # The flags are summed over all ranks together with the step's token count.
            flags = STOP_FLAG if self.stop.signal_number is not None else 0
            if not flags and save_timer is not None and save_timer.due():
                flags = SAVE_FLAG
            if self.callbacks is not None:
                for request in self.callbacks.take_requests():
                    flags |= FLAG_OF_REQUEST[request]
            limits = self.safeguard.limits if self.safeguard.reads_steps else None
            watched = (
                nullcontext() if self.histograms is None else self.histograms.watch_step(global_step + 1)
            )
            with self.profiled(global_step + 1), watched:
                result = engine.train_step(micro_batches, self.objective, learning_rate, flags, limits)
            if self._prefetching is not None:  # while the device computes
                with phases.measure("data"):
                    self._prefetching.prefetch()
            corruption = None if self.replica_check is None else self.replica_check.end(global_step)
            if corruption is not None:
                self.recovery.report_corruption(global_step, corruption)
            requests |= self._flag_reader.read(result.flags)
            if self.safeguard.accepts_step(global_step + 1, result, samples, self.recovery.describe_samples):
                return StepOutcome(result, requests, learning_rate)
            if self.safeguard.is_nonfinite:
                self.recovery.find_nonfinite_cause(global_step + 1, samples)
            if requests.stop:
                return StepOutcome(None, requests, learning_rate)

    def forget_requests(self) -> None:
        """Discard the requests that are not read yet, because a rollback undid their steps."""
        self._flag_reader = FlagReader(self.engine.device)
