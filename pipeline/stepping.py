"""One optimizer step that counts: its samples, learning rate, random numbers, and what the ranks ask for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from pipeline.data.batches import Batch, LoadedBatch
from pipeline.data.random_numbers import seed_step, token_keys
from pipeline.distributed.stopping import (
    END_FLAG,
    EVALUATE_FLAG,
    SAVE_FLAG,
    STOP_FLAG,
    Alarm,
    FlagReader,
    Flags,
    StopOnSignal,
)
from pipeline.engine.interface import StepResult
from pipeline.engine.nonfinite_cause import CauseSearch
from pipeline.errors import DeviceFailedError, StoppedError
from pipeline.events import NO_TARGETS, Event
from pipeline.models.embeddings import KEYS
from pipeline.parts import Parts, TrainState
from pipeline.profiler import Profiled
from pipeline.safeguard import GoBack
from pipeline.schedule import multiplier
from pipeline.watchers import restore

FLAGS = {"evaluate": EVALUATE_FLAG, "save": SAVE_FLAG, "stop": END_FLAG}
"""Request of a callback -> its flag."""
MOST_EXAMINED = 3  # steps of a process
CAUSE_ADVICE = "look at these samples and at that part of the model"


class Stepper:
    """Steps the engine. All calls are collective.

    Args:
        stop: Asks for a stop.
        profiled: Around each step, given its number.
    """

    def __init__(self, parts: Parts, stop: StopOnSignal, profiled: Profiled):
        self._parts = parts
        self._profiled = profiled
        self._stop = stop
        self._objective = parts.meters.timed(parts.objective)
        self._flag_reader = FlagReader(parts.engine.device)
        self._examined = 0

    def learning_rate(self, global_step: int) -> float:
        """Of the step after `global_step` of them."""
        parts = self._parts
        return parts.peak_learning_rate * multiplier(parts.schedule, global_step, parts.max_steps)

    def step(self, global_step: int, alarm: Alarm) -> tuple[StepResult | None, Flags]:
        """The next step that counts: the first one, but where the safeguard leaves samples out.

        Args:
            global_step: Steps done.
            alarm: Asks for a checkpoint.

        Returns:
            What came of it, None where a stop was agreed before; and what the ranks ask for.
        """
        parts, asked = self._parts, Flags()
        while True:
            parts.job.progress.at("step", global_step)
            first = parts.loader.samples_seen
            with parts.meters.waiting_for_data():
                micro_batches = parts.loader.next_group()
            samples = (first, parts.loader.samples_seen)
            parts.replica_check.begin(global_step)
            if parts.adds_noise:
                micro_batches = with_keys(micro_batches, parts.seed, global_step)
            seed_step(parts.seed, global_step, parts.engine.seed_rank)
            flags = STOP_FLAG if self._stop.requested else SAVE_FLAG if alarm.due() else 0
            if parts.callbacks is not None:
                for request in parts.callbacks.to_send():
                    flags |= FLAGS[request]
            rate, limits = self.learning_rate(global_step), parts.safeguard.limits
            with self._profiled(global_step + 1), self._looking(global_step + 1):
                result = parts.engine.train_step(micro_batches, self._objective, rate, flags, limits)
            with parts.meters.waiting_for_data():
                parts.loader.fetch_ahead()
            if (found := parts.replica_check.end(global_step)) is not None:
                self._distrust(global_step, found)
            asked |= self._flag_reader.read(result.flags)
            if parts.safeguard.takes(global_step + 1, result, samples, parts.loader.describe):
                return result, asked
            if parts.safeguard.is_nonfinite:
                self._examine(global_step + 1, samples)
            if asked.stop:
                return None, asked

    def _looking(self, step: int) -> AbstractContextManager[None]:
        """Around a step whose gradients may be wanted."""
        histograms = self._parts.histograms
        return nullcontext() if histograms is None else histograms.looking(step)

    def _distrust(self, step: int, found: Event) -> None:
        """Raises a DeviceFailedError, where the recipe says so."""
        parts = self._parts
        parts.sinks.tell(step, found)
        if parts.replica_check.stops:
            good = parts.replica_check.good_until
            parts.checkpoints.distrust_after(good)
            parts.replica_check.leave()
            raise DeviceFailedError(
                f"{found.name} at step {step} on ranks {found.fields['ranks']}: no checkpoint after step "
                f"{good} counts any more; the same command goes on from one before (watch.on_corruption)"
            )

    def answer(self, step: int, event: Event) -> None:
        """Tells what a watcher said, finds out more where that can be had, and acts as the recipe says.

        Raises:
            GoBack, StoppedError: see Safeguard.act.
        """
        if event.name == NO_TARGETS and "at_step" in event.fields:
            samples = self._parts.safeguard.samples_of(int(event.fields["at_step"]))
            named = self._parts.loader.describe(*samples) if samples is not None else "not known any more"
            event = replace(event, message=f"{event.message}; samples: {named}")
        self._parts.sinks.tell(step, event)
        if event.name == "non_finite" and event.level != "info":
            bad = int(event.fields["at_step"])
            if (samples := self._parts.safeguard.samples_of(bad)) is not None:
                self._examine(bad, samples)
        self._parts.safeguard.act(step, event)

    def go_back(self, found: GoBack, abandoned: int) -> TrainState:
        """To the newest checkpoint before a step that went wrong; what comes leaves its samples out.

        Args:
            abandoned: The step that the run had come to.

        Raises:
            StoppedError: there is no such checkpoint, or the run went back too often.
        """
        parts, until = self._parts, self._parts.safeguard.going_back(found)
        parts.job.progress.at("resuming", abandoned)
        with parts.meters.paused("checkpoint"):
            remembered = parts.checkpoints.go_back(parts.engine, until)
        if remembered is None:
            raise StoppedError(
                f"{found.why.name} at step {found.step}: there is no checkpoint of step {until} or before it "
                "to go back to; lower checkpoint.every or watch.rollback_steps, or raise checkpoint.keep_last"
            )
        state = TrainState.of(remembered, parts.engine.device)
        stretches = parts.safeguard.leave_out(found)
        parts.loader.load_state_dict(remembered)
        parts.loader.leave_out(stretches)
        parts.safeguard.load_state_dict(remembered.get("safeguard", {}))
        restore(parts.watchers, remembered.get("watchers", {}))
        if parts.callbacks is not None:
            parts.callbacks.load_state_dict(remembered.get("callbacks", {}))
            self._flag_reader = FlagReader(parts.engine.device)  # drops requests of the steps given up
        parts.replica_check.went_back(state.global_step)
        parts.meters.restart()
        told = parts.safeguard.went_back(found, abandoned, state.global_step, stretches)
        parts.sinks.tell(state.global_step, told)
        return state

    def _examine(self, step: int, samples: tuple[int, int]) -> None:
        """Tells what was infinite or NaN first in a step, see CauseSearch."""
        parts = self._parts
        if self._examined == MOST_EXAMINED:
            return
        micro_batches = parts.loader.read_again(samples[0])
        if micro_batches is None:
            return
        self._examined += 1
        if parts.adds_noise:
            micro_batches = with_keys(micro_batches, parts.seed, step - 1)
        seed = partial(seed_step, parts.seed, step - 1, parts.engine.seed_rank)
        search = CauseSearch(parts.engine, parts.objective, parts.job, parts.resolved.plan, seed)
        cause = search.find(micro_batches)
        if cause is None:
            message = f"step {step}, done again, is finite: the weights have moved on, or it was chance"
            parts.sinks.tell(step, Event("non_finite_cause", message, level="info"))
            return
        rank = parts.job.everyone[cause.rank] if parts.job.everyone else "this process"
        message = f"step {step}: the first that is infinite or NaN is {cause.told(rank)}"
        parts.sinks.tell(step, Event("non_finite_cause", message, CAUSE_ADVICE))


def with_keys(micro_batches: Sequence[Batch], seed: int, step: int) -> list[Batch]:
    """The batches of the step after `step` of them, with what noise on each of their tokens is drawn from."""
    return [
        LoadedBatch({**batch, KEYS: token_keys(batch, seed, step)}).known_as(batch) for batch in micro_batches
    ]
