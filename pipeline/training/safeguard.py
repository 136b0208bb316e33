"""Reacts to bad steps as the section `watch` of a recipe says: skips the batch, rolls back or ends the run.

Every decision rests on numbers that are equal on all ranks, so the ranks agree without communication.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import WatchConfig
from pipeline.data.batches import Batch, LoadedBatch
from pipeline.data.loader import BatchSource, ReplayableSource
from pipeline.data.random_numbers import derive_token_keys, seed_step
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine, StepLimits, StepResult
from pipeline.engine.nonfinite_cause import NonFiniteCauseSearch
from pipeline.errors import DeviceFailedError, NonFiniteLossError, StoppedError
from pipeline.models.embeddings import NOISE_KEYS
from pipeline.monitoring.alerts import Alert, EmitEvent, RollbackRequested, restore_alerts
from pipeline.monitoring.alerts.rules import GRAD_NORM_THRESHOLD, LOSS_THRESHOLD, SpikeDetector
from pipeline.monitoring.events import NO_TARGETS, ROLLBACK, Event
from pipeline.monitoring.metrics import Meters
from pipeline.monitoring.trackers.interface import Trackers
from pipeline.objectives import Objective
from pipeline.training.callbacks import CallbackRunner
from pipeline.training.replica_check import ReplicaCheck

MAX_IN_A_ROW = 10
"""Number of skipped batches in a row that ends a run, and largest number of rollbacks without progress."""
ACTION_KEYS = {
    "loss_spike": "on_spike",
    "grad_norm_spike": "on_spike",
    "non_finite": "on_nonfinite",
}
"""Key of the section `watch` that sets the action for each event."""


class Safeguard:
    """Decides which steps count, and when a run skips a batch, rolls back or stops.

    A skipped step changes no weights, and its batch is not read again. `global_step` does not advance, so the
    next batch gets the same learning rate and the same seed.

    Args:
        watch: Section `watch` of the recipe.
        steps_per_row: Number of steps between two log rows. An alert may report a step that is this old, so
            the samples of that many steps and of `watch.rollback_steps` more are remembered.
        tell: Receives the step and the event of a skipped batch.
    """

    def __init__(self, watch: WatchConfig, steps_per_row: int, tell: EmitEvent):
        self._watch = watch
        self._tell = tell
        self.reads_steps = "skip" in (watch.on_spike, watch.on_nonfinite)
        """Whether the result of each step is read on the host, so that the step may be skipped."""
        self._detectors = {
            "loss": SpikeDetector(LOSS_THRESHOLD),
            "gradient norm": SpikeDetector(GRAD_NORM_THRESHOLD),
        }
        self._skipped_in_a_row = 0
        self.is_nonfinite = False
        """Whether the last skipped step had an infinite or NaN loss or gradient."""
        # Pairs of step and positions of its samples in the data order, [first, last).
        self._samples: deque[tuple[int, tuple[int, int]]] = deque(maxlen=steps_per_row + watch.rollback_steps)
        self._excluded: list[tuple[int, int]] = []  # positions that rollbacks excluded, [first, last) each
        self._rollbacks_in_a_row = 0
        self._last_bad_step = 0

    @property
    def detectors(self) -> tuple[SpikeDetector, SpikeDetector]:
        """Spike detectors of the loss and of the gradient norm, which the alerts share."""
        return self._detectors["loss"], self._detectors["gradient norm"]

    @property
    def rolls_back(self) -> bool:
        """Return whether the run may roll back to a checkpoint."""
        return "rollback" in (self._watch.on_spike, self._watch.on_nonfinite)

    @property
    def limits(self) -> StepLimits | None:
        """Limits above which the engine refuses the next step; `None` if the recipe skips no step."""
        if not self.reads_steps:
            return None
        if self._watch.on_spike != "skip":
            return StepLimits(math.inf, math.inf)
        return StepLimits(self._detectors["loss"].limit, self._detectors["gradient norm"].limit)

    def accepts_step(
        self, step: int, result: StepResult, samples: tuple[int, int], describe: Callable[[int, int], str]
    ) -> bool:
        """Return whether a step counts, and report a skipped one.

        If steps may be skipped, this synchronizes with the device.

        Args:
            step: Number of the step if it counts.
            result: Result of the engine's step.
            samples: Positions of its samples in the data order, [first, last).
            describe: Returns a description of the samples at such positions.

        Raises:
            NonFiniteLossError, StoppedError: Too many steps in a row were skipped.
        """
        if not self.reads_steps:
            self._samples.append((step, samples))
            return True
        assert result.loss is not None
        assert result.grad_norm is not None
        grad_norm = torch.as_tensor(result.grad_norm, dtype=torch.float64, device=result.loss.device)
        # In one tensor, so that the host waits only once.
        loss, norm, skipped = torch.stack([result.loss, grad_norm, result.skipped.double()]).tolist()
        values = {"loss": loss, "gradient norm": norm}
        is_finite = all(map(math.isfinite, values.values()))
        if result.loss_scale is not None and self._watch.on_spike == "skip":
            # In fp16 the gradient of a loss that is much too high overflows: a spike, not a non-finite loss.
            is_finite |= math.isfinite(loss) and loss > self._detectors["loss"].limit
        if result.is_loss_scale_search:
            action = "log"
        else:
            action = self._watch.on_spike if is_finite else self._watch.on_nonfinite
        spikes = [name for name, detector in self._detectors.items() if values[name] > detector.limit]
        if self._watch.on_spike == "skip" and (is_finite or action == "skip"):
            for name, detector in self._detectors.items():
                detector.add(values[name])
        if not skipped or action != "skip":
            self._skipped_in_a_row = 0
            self._samples.append((step, samples))
            return True
        self._skipped_in_a_row += 1
        self.is_nonfinite = not is_finite
        spikes = spikes if is_finite else []
        self._tell(step, self._describe_skip(step, values, spikes, samples, describe(*samples)))
        self._stop_after_many_skips(is_finite)
        return False

    def _describe_skip(
        self,
        step: int,
        values: Mapping[str, float],
        spikes: Sequence[str],
        samples: tuple[int, int],
        description: str,
    ) -> Event:
        """Return the event of a skipped batch.

        Args:
            step: Number that the step would have had.
            values: Loss and gradient norm of the step.
            spikes: Names of the values above their limits; empty if a value is infinite or NaN.
            samples: Positions of the batch in the data order, [first, last).
            description: Description of the samples.
        """
        reason = " and ".join(
            f"its {name} of {values[name]:.4g} is above {self._detectors[name].limit:.4g}" for name in spikes
        )
        if not spikes:
            reason = f"its loss is {values['loss']:.4g} and its gradient norm {values['gradient norm']:.4g}"
        first = samples[0]
        last = samples[1] - 1
        return Event(
            "skip",
            f"step {step}: a batch is skipped, because {reason}; samples {first} to {last} of the data "
            f"order: {description}",
            "look at these samples; loader.leave_out excludes them from the next run",
            fields={
                "loss": values["loss"],
                "grad_norm": values["gradient norm"],
                "first_sample": first,
                "last_sample": last,
            },
        )

    def _stop_after_many_skips(self, is_finite: bool) -> None:
        """Raise an error if too many batches in a row were skipped.

        Args:
            is_finite: Whether the last of them was skipped for a spike.
        """
        count = self._skipped_in_a_row
        if count < MAX_IN_A_ROW:
            return
        if not is_finite:
            raise NonFiniteLossError(
                f"the last {count} batches had an infinite or NaN loss or gradient and were skipped "
                "(watch.on_nonfinite: skip), so the data alone is not the cause; lower "
                "optimizer.learning_rate, raise schedule.warmup, or set watch.on_nonfinite=rollback"
            )
        raise StoppedError(
            f"the last {count} batches were skipped as spikes (watch.on_spike: skip), so the weights have "
            "changed rather than the data; set watch.on_spike=rollback, or lower optimizer.learning_rate"
        )

    def find_samples(self, step: int) -> tuple[int, int] | None:
        """Return the positions of a step's samples in the data order, [first, last).

        Returns:
            `None` if the step is older than those that are remembered.
        """
        return dict(self._samples).get(step)

    def act_on_alert(self, step: int, event: Event) -> RollbackRequested | None:
        """Act on an alert as the recipe says.

        Returns:
            The request for a rollback; `None` if none is needed.

        Raises:
            StoppedError: The recipe ends the run on this alert.
        """
        key = ACTION_KEYS.get(event.name)
        action = getattr(self._watch, key) if key is not None else "log"
        bad_step = int(event.fields.get("at_step", step))
        if action == "stop":  # the event has already reported what happened and what to try
            raise StoppedError(f"{event.name} at step {bad_step} ends the run (watch.{key}: stop)")
        if action == "rollback":
            return RollbackRequested(bad_step, event)
        return None

    def begin_rollback(self, request: RollbackRequested) -> int:
        """Count a rollback, and return the last step whose checkpoint the run may resume from.

        Raises:
            StoppedError: The run rolled back too often without progress.
        """
        made_progress = request.step > self._last_bad_step
        self._rollbacks_in_a_row = 1 if made_progress else self._rollbacks_in_a_row + 1
        self._last_bad_step = max(self._last_bad_step, request.step)
        if self._rollbacks_in_a_row > MAX_IN_A_ROW:
            raise StoppedError(
                f"the run rolled back {MAX_IN_A_ROW} times and did not get beyond {request.why.name} at step "
                f"{request.step}: lower optimizer.learning_rate, or look at the data"
            )
        return max(request.step - self._watch.rollback_steps, 0)

    def exclude_samples(self, request: RollbackRequested) -> list[tuple[int, int]]:
        """Exclude the samples of `watch.rollback_steps` steps, the bad one last; forget those of all steps.

        Returns:
            Positions that no later step may read, for this rollback and all before it: intervals
            [first, last) of the data order.
        """
        first_step = request.step - self._watch.rollback_steps + 1
        self._excluded += [samples for step, samples in self._samples if first_step <= step <= request.step]
        self._samples.clear()
        return self._excluded

    def describe_rollback(
        self, request: RollbackRequested, abandoned: int, step: int, excluded: Sequence[tuple[int, int]]
    ) -> Event:
        """Return the event of a rollback.

        Args:
            request: Bad step and the event that reported it.
            abandoned: Number of the step that the run had reached.
            step: Number of the checkpoint's step, from which the run continues.
            excluded: Positions that `exclude_samples` returned.
        """
        first = min(first for first, _ in excluded)
        last = max(last for _, last in excluded) - 1
        return Event(
            ROLLBACK,
            f"the run continues from step {step}, and skips samples {first} to {last} of the data order: "
            f"{request.why.message}",
            fields={"from_step": abandoned, "first_sample": first, "last_sample": last},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the detectors' state for a checkpoint, as JSON values."""
        return {name: detector.state_dict() for name, detector in self._detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. The state of a new run is empty."""
        for name, detector in self._detectors.items():
            if name in state:
                detector.load_state_dict(state[name])


MAX_CAUSE_SEARCHES = 3  # per process
CAUSE_ADVICE = "look at these samples and at that part of the model"
UNKNOWN_SAMPLES = "no longer known"


@dataclass
class Recovery:
    """Carries out the reaction to alerts and bad steps: rollback, cause search or stop. Collective."""

    job: Job
    engine: Engine
    objective: Objective
    source: BatchSource
    """Source of this rank's training batches."""
    plan: BatchPlan
    """Division of a step's batch into micro-batches."""
    seed: int
    """Seed of the run."""
    adds_noise: bool
    """Whether batches carry the keys of the noise on embeddings (`model.neftune_alpha`)."""
    checkpoints: CheckpointStore
    safeguard: Safeguard
    replica_check: ReplicaCheck | None
    meters: Meters
    alerts: Sequence[Alert]
    callbacks: CallbackRunner | None
    trackers: Trackers

    def __post_init__(self) -> None:
        self._replayable = self.source if isinstance(self.source, ReplayableSource) else None
        self._num_searches = 0

    def describe_samples(self, first: int, last: int) -> str:
        """Return a description of the samples at [first, last) of the data order, for a message."""
        return UNKNOWN_SAMPLES if self._replayable is None else self._replayable.describe(first, last)

    def handle_alert(self, step: int, event: Event) -> RollbackRequested | None:
        """Report an alert with its samples or its cause, and act on it as the recipe says.

        Returns:
            The request for a rollback; `None` if none is needed.

        Raises:
            StoppedError: See Safeguard.act_on_alert.
        """
        if event.name == NO_TARGETS and "at_step" in event.fields:
            samples = self.safeguard.find_samples(int(event.fields["at_step"]))
            description = UNKNOWN_SAMPLES if samples is None else self.describe_samples(*samples)
            event = replace(event, message=f"{event.message}; samples: {description}")
        self.trackers.tell(step, event)
        if event.name == "non_finite" and event.level != "info":
            bad_step = int(event.fields["at_step"])
            samples = self.safeguard.find_samples(bad_step)
            if samples is not None:
                self.find_nonfinite_cause(bad_step, samples)
        return self.safeguard.act_on_alert(step, event)

    def roll_back(self, request: RollbackRequested, abandoned: int) -> dict[str, Any]:
        """Restore a checkpoint before the bad step, and exclude the samples of the steps up to the bad one.

        The checkpoint is the newest that is at least `watch.rollback_steps` before the bad step.

        Args:
            request: Bad step and the event that reported it.
            abandoned: Number of the step that the run had reached.

        Returns:
            The training state stored in the checkpoint.

        Raises:
            StoppedError: There is no such checkpoint, or the run rolled back too often.
        """
        last_good_step = self.safeguard.begin_rollback(request)
        self.job.progress.start_activity("resuming", abandoned)
        with self.meters.exclude_from_step_time("checkpoint"):
            state = self.checkpoints.roll_back(self.engine, last_good_step)
        if state is None:
            raise StoppedError(
                f"{request.why.name} at step {request.step}: there is no checkpoint of step {last_good_step} "
                "or earlier to roll back to; lower checkpoint.every or watch.rollback_steps, or raise "
                "checkpoint.keep_last"
            )
        step = int(state["global_step"])
        excluded = self.safeguard.exclude_samples(request)
        self.source.load_state_dict(state)
        if self._replayable is not None:
            self._replayable.leave_out(excluded)
        self.safeguard.load_state_dict(state.get("safeguard", {}))
        restore_alerts(self.alerts, state.get("watchers", {}))
        if self.callbacks is not None:
            self.callbacks.load_state_dict(state.get("callbacks", {}))
        if self.replica_check is not None:
            self.replica_check.note_rollback(step)
        self.meters.restart()
        self.trackers.tell(step, self.safeguard.describe_rollback(request, abandoned, step, excluded))
        return state

    def report_corruption(self, step: int, event: Event) -> None:
        """Report that replicas differ, and end the run if the recipe says so.

        Args:
            step: Number of steps completed.
            event: Event of the comparison, see ReplicaCheck.end.

        Raises:
            DeviceFailedError: `watch.on_corruption` is `stop`. Before that, checkpoints after the last
                comparison without a difference are marked, so that no run resumes from them.
        """
        check = self.replica_check
        assert check is not None
        self.trackers.tell(step, event)
        if check.stops_run:
            self.checkpoints.distrust_after(check.good_until)
            raise DeviceFailedError(
                f"{event.name} at step {step} on ranks {event.fields['ranks']} (watch.on_corruption: stop): "
                f"checkpoints after step {check.good_until} are no longer used; the same command resumes "
                "from an earlier one"
            )

    def find_nonfinite_cause(self, step: int, samples: tuple[int, int]) -> None:
        """Repeat a bad step and report which tensor was infinite or NaN first, see NonFiniteCauseSearch.

        Good steps measure nothing for this, and the repeated step changes nothing. Does nothing after
        MAX_CAUSE_SEARCHES searches, or if the source cannot read batches again.

        Args:
            step: Number of the bad step.
            samples: Positions of its samples in the data order, [first, last).
        """
        if self._num_searches == MAX_CAUSE_SEARCHES or self._replayable is None:
            return
        self._num_searches += 1
        micro_batches = self._replayable.read_again(samples[0])
        if self.adds_noise:
            micro_batches = add_noise_keys(micro_batches, self.seed, step - 1)
        seed = partial(seed_step, self.seed, step - 1, self.engine.seed_rank)
        search = NonFiniteCauseSearch(self.engine, self.objective, self.job, self.plan, seed)
        cause = search.find(micro_batches)
        if cause is None:
            message = (
                f"step {step} is finite when repeated: the weights have changed, or the failure is random"
            )
            self.trackers.tell(step, Event("non_finite_cause", message, level="info"))
            return
        rank = self.job.rank_processes[cause.rank] if self.job.rank_processes else "this process"
        message = f"step {step}: the first infinite or NaN value is {cause.describe(rank)}"
        self.trackers.tell(step, Event("non_finite_cause", message, CAUSE_ADVICE))


def add_noise_keys(micro_batches: Sequence[Batch], seed: int, step: int) -> list[Batch]:
    """Return the batches with the keys from which the noise on each token's embedding is computed (NEFTune).

    Args:
        micro_batches: Batches of the step after `step`.
        seed: Seed of the run.
        step: Number of optimizer steps completed.
    """
    return [
        LoadedBatch({**batch, NOISE_KEYS: derive_token_keys(batch, seed, step)}).copy_metadata_from(batch)
        for batch in micro_batches
    ]
