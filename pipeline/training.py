"""The loop: when to step, log, evaluate, save and stop. It knows no device, rank, file or format."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pipeline.callbacks import CallbackRunner, Moment
from pipeline.checkpoint.catalog import folder_name
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.stopping import Alarm, Flags, StopOnSignal
from pipeline.errors import CheckpointError
from pipeline.evaluation import evaluate, measured_by
from pipeline.events import STOPPED_EARLY, Event
from pipeline.long_lived import LongLived
from pipeline.parts import Parts
from pipeline.profiler import Profiled
from pipeline.rows import LateRow, LateRows
from pipeline.safeguard import GoBack
from pipeline.stepping import Stepper
from pipeline.watchers import Seen, state_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One optimizer step, and what came of it."""

    global_step: int
    """Optimizer steps done, this one included."""
    evaluation: dict[str, float] | None
    """Of the weights after it; None: none was due, or there is nothing to evaluate on."""
    late_row: LateRow | None = field(repr=False)

    @property
    def row(self) -> dict[str, float] | None:
        """What is logged of it; None: it was no step of `log.every`. On a GPU it waits for the step's end."""
        return self.late_row.read().row if self.late_row is not None else None


class Loop:
    """Steps a run, and does after each step what is due. All calls are collective.

    From the first step to the last a signal asks it to stop, and counts as one once all ranks know of it.
    As a context manager it gives back what it holds; after an exception it waits for nobody.
    """

    def __init__(self, parts: Parts, long_lived: LongLived | None = None, profiled: Profiled = nullcontext):
        self.state = parts.start
        self._parts = parts
        self._long_lived = long_lived
        self._alarm = Alarm(0)
        self._stop = StopOnSignal()
        self._stepper = Stepper(parts, self._stop, profiled)
        on_row = self._after_row if parts.callbacks is not None else None
        self._rows = LateRows(parts.watchers, parts.sinks, self._stepper.answer, on_row)
        self._evaluation: dict[str, float] | None = None
        self._evaluated_at = parts.callbacks.evaluated_at if parts.callbacks is not None else -1
        self._asked = Flags()
        self._write_seconds = 0.0
        self._signals = ExitStack()
        self._has_begun = self._stopped = self._is_over = False
        self.is_finished = False
        """It made its last step, and that is saved."""
        self.stopped_early = ""
        """Why a callback ended the run before `max_steps`, as rank 0 knows; empty: none did."""

    @property
    def stopped_by(self) -> int | None:
        """The number of the signal that stopped the run; None: nothing did."""
        return (self._stop.signal_number or signal.SIGTERM) if self._stopped else None

    def grace_left(self) -> float:
        """Return the seconds of checkpoint.grace_seconds that a signal has left; infinite without a limit."""
        grace = self._parts.grace_seconds
        if grace is None or self._stop.came_at is None:
            return math.inf
        return grace - (time.monotonic() - self._stop.came_at)

    def step(self) -> Step | None:
        """One optimizer step with the log row, evaluation and checkpoint that are due; after the last one, or
        where a stop is agreed, the checkpoint that the run ends with.

        Returns:
            None: the run is over.
        """
        done = self._step()
        self._parts.checkpoints.hold_device()  # the caller may change the weights
        return done

    def train(self) -> None:
        """All steps that are left."""
        while self._step() is not None:
            pass

    def _step(self) -> Step | None:
        self._begin()
        if self._is_over:
            return None
        parts, late = self._parts, None
        learning_rate = self._stepper.learning_rate(self.state.global_step)
        result, agreed = self._stepper.step(self.state.global_step, self._alarm)
        if result is None:
            self._stopped = True
            self._end_where_due()
            return None
        self.state = self.state.after(result)
        step = self.state.global_step
        parts.meters.observe(result)
        start = parts.start.global_step
        if step == start + 1 < parts.max_steps and (parts.save_minutes or parts.save.due_between(start)):
            with parts.meters.paused("checkpoint"):
                parts.checkpoints.prepare(parts.engine)
        if step == 1 or parts.log.due(step):
            late = self._row(learning_rate)
            self._rows.add(step, late, parts.histograms.taken(step) if parts.histograms else None)
        try:
            self._rows.write_until(step - parts.rows_behind)
        except GoBack as found:
            self.state = self._stepper.go_back(found, step)
            self._evaluation, self._evaluated_at = None, -1
            self._asked = Flags()
            return Step(self.state.global_step, None, None)
        self._asked |= agreed
        if (parts.eval.due(step) or self._asked.evaluate) and not agreed.stop:
            self._evaluate()
        self._stopped |= agreed.stop
        # The checkpoint of the last step is waited for below, without a copy in memory.
        is_last = step >= parts.max_steps or self._asked.end
        if not self._stopped and not is_last and (self._asked.save or parts.save.due(step)):
            self._alarm.restart()
            self._save()
        self._observe_saves()
        self._end_where_due()
        if self._long_lived is not None and not self._is_over:
            with parts.meters.paused():
                self._long_lived.set_aside()
            self._long_lived = None
        return Step(step, self._evaluation if self._evaluated_at == step else None, late)

    def evaluate(self) -> dict[str, float] | None:
        """The evaluation of the weights as they are, done where it was not yet, and logged.

        Returns:
            None: nothing is held out, or a stop was agreed before the end.
        """
        self._begin()
        if self._evaluated_at == self.state.global_step and self._evaluation is not None:
            return self._evaluation
        row = self._evaluate()
        self._end_where_due()
        return row

    def save(self) -> Path:
        """A checkpoint of this step, on the disk when this returns: its folder.

        Raises:
            CheckpointError: it cannot be written, or there was no step yet.
        """
        if self.state.global_step == 0:
            raise CheckpointError("a run has nothing to save before its first step")
        self._save(at_once=True)
        self._observe_saves()
        return self._parts.checkpoints.folder / folder_name(self.state.global_step)

    def _conclude(self) -> None:
        """Tells what the run took against what was expected, and where this process's time went."""
        if self._has_begun and not self._parts.sinks.is_empty:
            if (came := self._parts.expectation.conclusion()) is not None:
                self._parts.sinks.tell(self.state.global_step, came)
            time_spent = self._parts.meters.conclusion()
            if self._parts.objective.unit == "tokens":
                tokens = {"tokens_seen": float(self.state.tokens_seen)}
                time_spent = replace(time_spent, fields={**time_spent.fields, **tokens})
            self._parts.sinks.tell(self.state.global_step, time_spent)

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        if error is None:
            self._rows.write_until(self.state.global_step)
            with self._parts.meters.paused("checkpoint"):
                self._parts.checkpoints.close()
            if not self._stopped:
                self._conclude()
        else:
            self._rows.write_what_arrives()

    def _begin(self) -> None:
        """Before the first step: the evaluation that is due there, the first or one that a stop left out."""
        if self._has_begun:
            return
        self._has_begun = True
        parts = self._parts
        # One clock for all ranks.
        self._alarm = Alarm(60 * parts.save_minutes if parts.job.ranks.is_main_process else 0)
        self._signals.enter_context(self._stop)
        parts.meters.begin()
        if parts.callbacks is not None:
            self._ask(parts.callbacks.run_begins(self._now(parts.callbacks)))
        owes = parts.owes_evaluation or self._asked.evaluate
        if owes and self._evaluate() is not None and self.state.global_step > 0:
            self._save()  # once more: the best is chosen by it
        self._end_where_due()

    def _end_where_due(self) -> None:
        """The checkpoint that a run ends with, finished or stopped.

        A run that was stopped before its first step has nothing to keep: it starts again.
        """
        step = self.state.global_step
        if self._is_over or not (self._stopped or self._asked.end or step >= self._parts.max_steps):
            return
        if self._asked.end and not self._stopped and self._evaluated_at != step:
            self._evaluate()
        self._is_over = True
        self._rows.write_until(step)
        if self._asked.end and not self._stopped and step < self._parts.max_steps:
            self._tell_of_early_stop()
        self._parts.job.progress.at("saving", step)
        with self._parts.meters.paused("checkpoint"):
            if step > 0 and (not self._stopped or self._has_time_to_save()):
                self._before_save("save", *([] if self._stopped else ["evaluate", "stop"]))
                self._parts.checkpoints.save_final(self._parts.engine, self._remembered())
            self._parts.checkpoints.wait()
        self.is_finished = not self._stopped
        if self._parts.callbacks is not None:
            now = self._now(self._parts.callbacks, is_finished=self.is_finished)
            self._parts.callbacks.call("run_ends", now)
        if self._stopped:  # a sink then learns how it ended, and is closed
            self._conclude()
        self._parts.job.progress.at("ending")
        self._signals.close()

    def _save(self, at_once: bool = False) -> None:
        parts = self._parts
        self._rows.write_until(self.state.global_step)  # of a checkpoint's steps all rows are on the disk
        parts.job.progress.at("saving", self.state.global_step)
        self._before_save("save")
        save = parts.checkpoints.save_final if at_once else parts.checkpoints.save
        with parts.meters.paused("checkpoint"):
            save(parts.engine, self._remembered())

    def _observe_saves(self) -> None:
        """Measures the saves that have ended."""
        for outcome in self._parts.checkpoints.poll():
            self._write_seconds = outcome.write_seconds or 0.0
            self._parts.meters.observe_save(outcome.stall_seconds, self._write_seconds)

    def _has_time_to_save(self) -> bool:
        """Whether one more save fits into the grace after a signal, by how long the last one took.

        A save that is killed harms nothing, but the run would not end with the exit code of a stop.
        """
        left = self.grace_left()
        fits = self._write_seconds < left
        if not fits:
            log.warning(
                "not saved once more: %.0f s of checkpoint.grace_seconds are left, and the last "
                "checkpoint took %.0f s; the run goes on from that one",
                left,
                self._write_seconds,
            )
        late = torch.tensor(float(not fits), device=self._parts.engine.device)
        return bool(self._parts.job.all_reduce_sum(late) == 0)

    def _row(self, learning_rate: float) -> LateRow:
        parts = self._parts
        further: dict[str, float | Tensor] = {
            "train/learning_rate": learning_rate,
            "train/samples_seen": parts.loader.samples_seen,
            "train/epoch": parts.loader.epoch,
            "train/skipped_steps": self.state.skipped_steps,
        }
        if parts.objective.unit == "tokens":
            further["train/tokens_seen"] = self.state.tokens_seen
        samples = parts.loader.source_samples()
        if len(samples) > 1:
            further |= {f"data/{name}_samples": count for name, count in samples.items()}
        return parts.meters.summary(further)

    def _evaluate(self) -> dict[str, float] | None:
        parts, step = self._parts, self.state.global_step
        if parts.eval_loader is None:
            return None
        self._rows.write_until(step)
        parts.job.progress.at("evaluation", step)
        # A model that draws here too draws the same after a stop.
        seed_step(parts.seed, step, parts.engine.seed_rank)
        with parts.meters.paused("evaluation"):
            row = evaluate(parts.engine, parts.objective, parts.eval_loader, parts.job, self._stop)
            if row is not None:
                # Refuses a best metric that the evaluation lacks, before the first step.
                measured_by(parts.best_by, row, parts.objective)
            if row is None:
                self._stopped = True
            else:
                self._rows.write(step, Seen(row))
                self._evaluation, self._evaluated_at = row, step
                if parts.tell_sample is not None:
                    parts.tell_sample(step)
                if parts.callbacks is not None:
                    self._ask(parts.callbacks.after_evaluation(self._now(parts.callbacks, metrics=row)))
                self._asked = self._asked._replace(evaluate=False)
        return row

    def _ask(self, requests: Collection[str]) -> None:
        """Have the run do what callbacks ask for, on all ranks alike."""
        self._asked |= Flags(save="save" in requests, evaluate="evaluate" in requests, end="stop" in requests)

    def _now(self, callbacks: CallbackRunner, **more: Any) -> Moment:
        """Return the moment for callbacks; waits for the device."""
        tokens = float(self.state.tokens_seen) if self._parts.objective.unit == "tokens" else 0.0
        return callbacks.moment(self.state.global_step, self._parts.loader.samples_seen, tokens, **more)

    def _after_row(self, step: int, row: Mapping[str, float]) -> None:
        """Call the callbacks with a row, which may be that of an earlier step than the last."""
        callbacks = self._parts.callbacks
        assert callbacks is not None
        samples, tokens = int(row["train/samples_seen"]), row.get("train/tokens_seen", 0.0)
        callbacks.call("after_row", callbacks.moment(step, samples, tokens, metrics=row))

    def _before_save(self, *closed: str) -> None:
        """Call the callbacks before their state is saved, and close these of their requests."""
        callbacks = self._parts.callbacks
        if callbacks is not None:
            callbacks.call("before_save", self._now(callbacks))
            callbacks.close(*closed)
        if "save" in closed:
            self._asked = self._asked._replace(save=False)

    def _tell_of_early_stop(self) -> None:
        """Record why the run ends here. Rank 0 alone knows."""
        callbacks, step = self._parts.callbacks, self.state.global_step
        if callbacks is not None and callbacks.reason:
            self.stopped_early = callbacks.reason
            message = f"the run ends at step {step} of {self._parts.max_steps}: {callbacks.reason}"
            self._parts.sinks.tell(step, Event(STOPPED_EARLY, message, level="info"))

    def _remembered(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the engine's state; random numbers follow from seed and step."""
        # Of these very weights, or not known: the best is chosen by it.
        row = self._evaluation if self._evaluated_at == self.state.global_step else None
        return {
            "global_step": self.state.global_step,
            "tokens_seen": float(self.state.tokens_seen),
            "skipped_steps": float(self.state.skipped_steps),
            "eval_loss": row["eval/loss"] if row is not None else None,
            "best_by": measured_by(self._parts.best_by, row, self._parts.objective)
            if row is not None
            else None,
            "safeguard": self._parts.safeguard.state_dict(),
            "watchers": state_of(self._parts.watchers),
            "callbacks": self._parts.callbacks.state_dict() if self._parts.callbacks is not None else {},
            **self._parts.adapter,
            **self._parts.meters.remembered(),
            **self._parts.loader.state_dict(),
        }
