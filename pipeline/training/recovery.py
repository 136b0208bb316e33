"""What a run does after an alert or a bad step: finds the cause, rolls back, or ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.batch import BatchPlan
from pipeline.data.batches import Batch, LoadedBatch
from pipeline.data.loader import BatchSource, Replayable
from pipeline.data.random_numbers import seed_step, token_keys
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.engine.nonfinite_cause import CauseSearch
from pipeline.errors import DeviceFailedError, StoppedError
from pipeline.models.embeddings import KEYS
from pipeline.monitoring.alerts import RollbackRequested, Watcher, restore
from pipeline.monitoring.events import NO_TARGETS, Event
from pipeline.monitoring.metrics import Meters
from pipeline.monitoring.trackers import Sinks
from pipeline.objectives import Objective
from pipeline.training.callbacks import CallbackRunner
from pipeline.training.replica_check import ReplicaCheck
from pipeline.training.safeguard import Safeguard

MOST_EXAMINED = 3  # steps of a process
CAUSE_ADVICE = "look at these samples and at that part of the model"
NOT_KNOWN = "not known any more"


class Recovery:
    """Answers alerts and bad steps as the recipe says. All calls are collective."""

    def __init__(
        self,
        *,
        job: Job,
        engine: Engine,
        objective: Objective,
        source: BatchSource,
        plan: BatchPlan,
        seed: int,
        adds_noise: bool,
        checkpoints: CheckpointStore,
        safeguard: Safeguard,
        replica_check: ReplicaCheck | None,
        meters: Meters,
        watchers: Sequence[Watcher],
        callbacks: CallbackRunner | None,
        sinks: Sinks,
    ):
        self._job = job
        self._engine = engine
        self._objective = objective
        self._source = source
        self._replayable = source if isinstance(source, Replayable) else None
        self._plan = plan
        self._seed = seed
        self._adds_noise = adds_noise
        self._checkpoints = checkpoints
        self._safeguard = safeguard
        self._replica_check = replica_check
        self._meters = meters
        self._watchers = watchers
        self._callbacks = callbacks
        self._sinks = sinks
        self._examined = 0

    def describe(self, first: int, last: int) -> str:
        """Return in words which samples are at [first, last) of the order."""
        return NOT_KNOWN if self._replayable is None else self._replayable.describe(first, last)

    def handle_alert(self, step: int, event: Event) -> RollbackRequested | None:
        """Tell an alert, find out more where that is possible, and act as the recipe says.

        Raises:
            StoppedError: see Safeguard.act.
        """
        if event.name == NO_TARGETS and "at_step" in event.fields:
            samples = self._safeguard.samples_of(int(event.fields["at_step"]))
            named = NOT_KNOWN if samples is None else self.describe(*samples)
            event = replace(event, message=f"{event.message}; samples: {named}")
        self._sinks.tell(step, event)
        if event.name == "non_finite" and event.level != "info":
            bad = int(event.fields["at_step"])
            if (samples := self._safeguard.samples_of(bad)) is not None:
                self.examine(bad, samples)
        return self._safeguard.act(step, event)

    def roll_back(self, request: RollbackRequested, abandoned: int) -> dict[str, Any]:
        """Restore the newest checkpoint before a bad step, and leave out the samples since.

        Args:
            abandoned: The step that the run had come to.

        Returns:
            The state that the checkpoint remembers.

        Raises:
            StoppedError: there is no such checkpoint, or the run rolled back too often.
        """
        until = self._safeguard.going_back(request)
        self._job.progress.at("resuming", abandoned)
        with self._meters.exclude_from_step_time("checkpoint"):
            remembered = self._checkpoints.go_back(self._engine, until)
        if remembered is None:
            raise StoppedError(
                f"{request.why.name} at step {request.step}: there is no checkpoint of step {until} or "
                "before it to go back to; lower checkpoint.every or watch.rollback_steps, or raise "
                "checkpoint.keep_last"
            )
        step = int(remembered["global_step"])
        stretches = self._safeguard.leave_out(request)
        self._source.load_state_dict(remembered)
        if self._replayable is not None:
            self._replayable.leave_out(stretches)
        self._safeguard.load_state_dict(remembered.get("safeguard", {}))
        restore(self._watchers, remembered.get("watchers", {}))
        if self._callbacks is not None:
            self._callbacks.load_state_dict(remembered.get("callbacks", {}))
        if self._replica_check is not None:
            self._replica_check.went_back(step)
        self._meters.restart()
        self._sinks.tell(step, self._safeguard.went_back(request, abandoned, step, stretches))
        return remembered

    def distrust(self, step: int, found: Event) -> None:
        """Tell that replicas differ.

        Raises:
            DeviceFailedError: the recipe ends the run there.
        """
        check = self._replica_check
        assert check is not None
        self._sinks.tell(step, found)
        if check.stops:
            self._checkpoints.distrust_after(check.good_until)
            check.leave()
            raise DeviceFailedError(
                f"{found.name} at step {step} on ranks {found.fields['ranks']}: no checkpoint after step "
                f"{check.good_until} counts any more; the same command goes on from one before "
                "(watch.on_corruption)"
            )

    def examine(self, step: int, samples: tuple[int, int]) -> None:
        """Tell what was infinite or NaN first in a step, see CauseSearch."""
        if self._examined == MOST_EXAMINED or self._replayable is None:
            return
        self._examined += 1
        micro_batches = self._replayable.read_again(samples[0])
        if self._adds_noise:
            micro_batches = with_keys(micro_batches, self._seed, step - 1)
        seed = partial(seed_step, self._seed, step - 1, self._engine.seed_rank)
        search = CauseSearch(self._engine, self._objective, self._job, self._plan, seed)
        cause = search.find(micro_batches)
        if cause is None:
            message = f"step {step}, done again, is finite: the weights have moved on, or it was chance"
            self._sinks.tell(step, Event("non_finite_cause", message, level="info"))
            return
        rank = self._job.everyone[cause.rank] if self._job.everyone else "this process"
        message = f"step {step}: the first that is infinite or NaN is {cause.told(rank)}"
        self._sinks.tell(step, Event("non_finite_cause", message, CAUSE_ADVICE))


def with_keys(micro_batches: Sequence[Batch], seed: int, step: int) -> list[Batch]:
    """Return the batches of the step after `step`, with what noise on each of their tokens is drawn from."""
    return [
        LoadedBatch({**batch, KEYS: token_keys(batch, seed, step)}).known_as(batch) for batch in micro_batches
    ]
