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

MOST_IN_A_ROW = 10
"""Number of skipped steps or rollbacks in a row, without progress, that ends a run."""
CAUSES = {
    "loss_spike": "on_spike",
    "grad_norm_spike": "on_spike",
    "non_finite": "on_nonfinite",
}
"""Field of `watch` that sets the action for each event."""


class Safeguard:
    """Decides which steps count, and when a run skips a batch, rolls back or stops.

    A skipped step leaves no trace. `global_step`, and with it learning rate and random numbers, stays as it
    was, and only the data advances.

    Args:
        watch: Section `watch` of the recipe.
        steps_kept: Number of latest steps whose samples are remembered, at least those between two rows.
        tell: Receives the step and the event of a skipped batch.
    """

    def __init__(self, watch: WatchConfig, steps_kept: int, tell: EmitEvent):
        self._watch = watch
        self._tell = tell
        self.reads_steps = "skip" in (watch.on_spike, watch.on_nonfinite)
        """Whether the result of each step is read on the host, so that the step may be skipped."""
        self._detectors = {
            "loss": SpikeDetector(LOSS_THRESHOLD),
            "gradient norm": SpikeDetector(GRAD_NORM_THRESHOLD),
        }
        self._left_out = 0
        self.is_nonfinite = False
        """Whether the last skipped step had an infinite or NaN loss or gradient."""
        self._samples: deque[tuple[int, tuple[int, int]]] = deque(maxlen=steps_kept + watch.rollback_steps)
        self._stretches: list[tuple[int, int]] = []
        self._backs = 0
        self._furthest = 0

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
        """Limits of the next step; `None` if every step with a finite gradient counts."""
        if not self.reads_steps:
            return None
        if self._watch.on_spike != "skip":
            return StepLimits(math.inf, math.inf)
        return StepLimits(self._detectors["loss"].limit, self._detectors["gradient norm"].limit)

    def accepts_step(
        self, step: int, result: StepResult, samples: tuple[int, int], describe: Callable[[int, int], str]
    ) -> bool:
        """Return whether a step counts. If steps may be skipped, this waits for the device.

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
        norm = torch.as_tensor(result.grad_norm, dtype=torch.float64, device=result.loss.device)
        loss, norm_now, skipped = torch.stack([result.loss, norm, result.skipped.double()]).tolist()
        seen = {"loss": loss, "gradient norm": norm_now}
        is_finite = all(map(math.isfinite, seen.values()))
        if result.loss_scale is not None and self._watch.on_spike == "skip":
            # In fp16 the gradient of a loss that is much too high overflows: a spike, not a non-finite loss.
            is_finite |= math.isfinite(loss) and loss > self._detectors["loss"].limit
        action = self._watch.on_spike if is_finite else self._watch.on_nonfinite
        action = "log" if result.is_loss_scale_search else action
        spikes = [name for name, detector in self._detectors.items() if seen[name] > detector.limit]
        if self._watch.on_spike == "skip" and (is_finite or action == "skip"):
            for name, detector in self._detectors.items():
                detector.add(seen[name])
        if not skipped or action != "skip":
            self._left_out = 0
            self._samples.append((step, samples))
            return True
        self._left_out += 1
        self.is_nonfinite = not is_finite
        spikes = spikes if is_finite else []
        self._tell(step, self._describe_skip(step, seen, spikes, samples, describe(*samples)))
        self._end_if_hopeless(self._left_out, is_finite)
        return False

    def _describe_skip(
        self,
        step: int,
        seen: Mapping[str, float],
        spikes: Sequence[str],
        samples: tuple[int, int],
        named: str,
    ) -> Event:
        what = " and ".join(
            f"its {name} of {seen[name]:.4g} is above {self._detectors[name].limit:.4g}" for name in spikes
        )
        what = what or f"its loss is {seen['loss']:.4g} and its gradient norm {seen['gradient norm']:.4g}"
        first, last = samples
        return Event(
            "skip",
            f"step {step}: a batch is left out, {what}; samples {first} to {last - 1} of the order: {named}",
            "look at these samples; loader.leave_out keeps them out of the next run",
            fields={
                "loss": seen["loss"],
                "grad_norm": seen["gradient norm"],
                "first_sample": first,
                "last_sample": last - 1,
            },
        )

    def _end_if_hopeless(self, times: int, is_finite: bool) -> None:
        if times < MOST_IN_A_ROW:
            return
        if not is_finite:
            raise NonFiniteLossError(
                f"the last {times} batches had an infinite or NaN loss or gradient and were left out "
                "(watch.on_nonfinite: skip); it is not the data alone: lower optimizer.learning_rate, raise "
                "schedule.warmup, or go back with watch.on_nonfinite=rollback"
            )
        raise StoppedError(
            f"the last {times} batches were left out as spikes (watch.on_spike: skip): it is the weights "
            "that have moved; go back with watch.on_spike=rollback, or lower optimizer.learning_rate"
        )

    def find_samples(self, step: int) -> tuple[int, int] | None:
        """Return the positions of a recent step in the data order, [first, last); `None` if forgotten."""
        return dict(self._samples).get(step)

    def act_on_alert(self, step: int, event: Event) -> RollbackRequested | None:
        """Act on an alert as the recipe says.

        Returns:
            The request for a rollback; `None` if none is needed.

        Raises:
            StoppedError: The recipe ends the run on this alert.
        """
        field = CAUSES.get(event.name)
        action = getattr(self._watch, field) if field is not None else "log"
        bad_step = int(event.fields.get("at_step", step))
        if action == "stop":  # the event has already reported what happened and what to try
            raise StoppedError(f"{event.name} at step {bad_step} ends the run (watch.{field}: stop)")
        if action == "rollback":
            return RollbackRequested(bad_step, event)
        return None

    def begin_rollback(self, found: RollbackRequested) -> int:
        """Return the last step whose checkpoint the run may resume from.

        Raises:
            StoppedError: The run rolled back too often without progress.
        """
        self._backs = self._backs + 1 if found.step <= self._furthest else 1
        self._furthest = max(self._furthest, found.step)
        if self._backs > MOST_IN_A_ROW:
            raise StoppedError(
                f"the run went back {MOST_IN_A_ROW} times and came no further than {found.why.name} at step "
                f"{found.step}: lower optimizer.learning_rate, or look at the data"
            )
        return max(found.step - self._watch.rollback_steps, 0)

    def leave_out(self, found: RollbackRequested) -> list[tuple[int, int]]:
        """Return the positions that no later step may read, for this rollback and all before it.

        They are intervals [first, last) of the data order. Checkpoints store them with the position.
        """
        first = found.step - self._watch.rollback_steps
        self._stretches += [samples for step, samples in self._samples if first < step <= found.step]
        self._samples.clear()
        return self._stretches

    def describe_rollback(
        self, found: RollbackRequested, abandoned: int, step: int, stretches: Sequence[tuple[int, int]]
    ) -> Event:
        """Return the event of a rollback from step `abandoned` to `step`."""
        first = min(a for a, _ in stretches)
        last = max(b for _, b in stretches)
        return Event(
            ROLLBACK,
            f"the run continues from step {step}, and skips samples {first} to {last - 1} of the data order: "
            f"{found.why.message}",
            fields={"from_step": abandoned, "first_sample": first, "last_sample": last - 1},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the detectors' state for a checkpoint, as JSON values."""
        return {name: detector.state_dict() for name, detector in self._detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. The state of a new run is empty."""
        for name, detector in self._detectors.items():
            if name in state:
                detector.load_state_dict(state[name])


MOST_EXAMINED = 3  # bad steps of one process whose cause is searched for
CAUSE_ADVICE = "look at these samples and at that part of the model"
NOT_KNOWN = "not known any more"


@dataclass
class Recovery:
    """Carries out the reaction to alerts and bad steps: rollback, cause search or stop. Collective."""

    job: Job
    engine: Engine
    objective: Objective
    source: BatchSource
    plan: BatchPlan
    seed: int
    adds_noise: bool
    checkpoints: CheckpointStore
    safeguard: Safeguard
    replica_check: ReplicaCheck | None
    meters: Meters
    alerts: Sequence[Alert]
    callbacks: CallbackRunner | None
    trackers: Trackers

    def __post_init__(self) -> None:
        self._replayable = self.source if isinstance(self.source, ReplayableSource) else None
        self._examined = 0

    def describe(self, first: int, last: int) -> str:
        """Return a description of the samples at [first, last) of the data order."""
        return NOT_KNOWN if self._replayable is None else self._replayable.describe(first, last)

    def handle_alert(self, step: int, event: Event) -> RollbackRequested | None:
        """Report an alert with its samples or its cause, and act on it as the recipe says.

        Raises:
            StoppedError: See Safeguard.act_on_alert.
        """
        if event.name == NO_TARGETS and "at_step" in event.fields:
            samples = self.safeguard.find_samples(int(event.fields["at_step"]))
            named = NOT_KNOWN if samples is None else self.describe(*samples)
            event = replace(event, message=f"{event.message}; samples: {named}")
        self.trackers.tell(step, event)
        if event.name == "non_finite" and event.level != "info":
            bad = int(event.fields["at_step"])
            if (samples := self.safeguard.find_samples(bad)) is not None:
                self.find_nonfinite_cause(bad, samples)
        return self.safeguard.act_on_alert(step, event)

    def roll_back(self, request: RollbackRequested, abandoned: int) -> dict[str, Any]:
        """Restore the newest checkpoint before a bad step, and leave out the samples of the steps around it.

        Args:
            request: Bad step and the event that reported it.
            abandoned: Number of the step that the run had reached.

        Returns:
            The training state stored in the checkpoint.

        Raises:
            StoppedError: There is no such checkpoint, or the run rolled back too often.
        """
        until = self.safeguard.begin_rollback(request)
        self.job.progress.start_activity("resuming", abandoned)
        with self.meters.exclude_from_step_time("checkpoint"):
            remembered = self.checkpoints.roll_back(self.engine, until)
        if remembered is None:
            raise StoppedError(
                f"{request.why.name} at step {request.step}: there is no checkpoint of step {until} or "
                "earlier to roll back to; lower checkpoint.every or watch.rollback_steps, or raise "
                "checkpoint.keep_last"
            )
        step = int(remembered["global_step"])
        stretches = self.safeguard.leave_out(request)
        self.source.load_state_dict(remembered)
        if self._replayable is not None:
            self._replayable.leave_out(stretches)
        self.safeguard.load_state_dict(remembered.get("safeguard", {}))
        restore_alerts(self.alerts, remembered.get("watchers", {}))
        if self.callbacks is not None:
            self.callbacks.load_state_dict(remembered.get("callbacks", {}))
        if self.replica_check is not None:
            self.replica_check.note_rollback(step)
        self.meters.restart()
        self.trackers.tell(step, self.safeguard.describe_rollback(request, abandoned, step, stretches))
        return remembered

    def report_corruption(self, step: int, found: Event) -> None:
        """Report that replicas differ, and end the run if the recipe says so.

        Raises:
            DeviceFailedError: The recipe ends the run. Later checkpoints no longer count.
        """
        check = self.replica_check
        assert check is not None
        self.trackers.tell(step, found)
        if check.stops_run:
            self.checkpoints.distrust_after(check.good_until)
            raise DeviceFailedError(
                f"{found.name} at step {step} on ranks {found.fields['ranks']}: no checkpoint after step "
                f"{check.good_until} counts any more; the same command resumes from an earlier one "
                "(watch.on_corruption)"
            )

    def find_nonfinite_cause(self, step: int, samples: tuple[int, int]) -> None:
        """Repeat a bad step and report which tensor was infinite or NaN first, see NonFiniteCauseSearch.

        Good steps measure nothing for this, and the repeated step leaves no trace.
        """
        if self._examined == MOST_EXAMINED or self._replayable is None:
            return
        self._examined += 1
        micro_batches = self._replayable.read_again(samples[0])
        if self.adds_noise:
            micro_batches = add_noise_keys(micro_batches, self.seed, step - 1)
        seed = partial(seed_step, self.seed, step - 1, self.engine.seed_rank)
        search = NonFiniteCauseSearch(self.engine, self.objective, self.job, self.plan, seed)
        cause = search.find(micro_batches)
        if cause is None:
            message = f"step {step} is finite when repeated: the weights have changed, or it was chance"
            self.trackers.tell(step, Event("non_finite_cause", message, level="info"))
            return
        rank = self.job.rank_processes[cause.rank] if self.job.rank_processes else "this process"
        message = f"step {step}: the first that is infinite or NaN is {cause.describe(rank)}"
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
