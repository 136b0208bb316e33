"""Runs callbacks, a user's own code at named moments of a run, and defines the callback EarlyStopping.

Callbacks run only on rank 0, so that ranks never get different answers. Requests in an answer to a row are
sent to all ranks with the flags of the next step, which needs no further collective. Requests before the
first step and after an evaluation are broadcast, because the host waits there anyway.
"""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.config.import_paths import check_signature, errors_in_one_line, import_object
from pipeline.config.schema import CallbackConfig, RunConfig
from pipeline.errors import CallbackError, ConfigError, PipelineError
from pipeline.monitoring.events import RESERVED_EVENT_NAMES, Event

if TYPE_CHECKING:
    from pipeline.distributed.process_group import Job

EARLY_STOPPING = "early_stopping"
"""Name of the callback that the section `early_stopping` adds."""
MOMENTS = ("run_begins", "after_row", "after_evaluation", "before_save", "run_ends")
"""Names of the methods of Callback that a run calls."""


@dataclass(frozen=True)
class Moment:
    """Progress of a run at the time of a call. Read-only."""

    step: int
    """Number of optimizer steps completed."""
    samples: int
    """Number of samples seen, over all ranks."""
    tokens: float
    """Number of tokens seen, over all ranks; 0 if the run counts samples or pairs instead."""
    config: RunConfig
    """The recipe."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Row as in metrics.jsonl, for `after_row` and `after_evaluation`; else empty."""
    is_finished: bool = False
    """Whether the run is complete, for `run_ends`. If it is not, a signal stopped the run, and the same
    command resumes it."""


@dataclass(frozen=True)
class Answer:
    """Requests that a method of a callback returns, on which all ranks act."""

    alert: Event | None = None
    """Event for metrics.jsonl, and for all trackers that show alerts; `None` for none."""
    evaluate: bool = False
    """Whether to evaluate now."""
    save: bool = False
    """Whether to write a checkpoint now."""
    stop: str = ""
    """Reason to end the run, as at its last step with an evaluation, a checkpoint and a summary; empty to
    continue."""

    @property
    def requests(self) -> set[str]:
        """Names of the fields that ask the run for something: `evaluate`, `save`, `stop`."""
        return {name for name in ("evaluate", "save", "stop") if getattr(self, name)}


class Callback:
    """Base class of your callbacks. Override the methods that you need.

    The run calls them on rank 0 with the `Moment` of the call. Each may return an `Answer`, on which all
    ranks act, or `None`. A method that raises ends the run with a `CallbackError`.
    """

    def run_begins(self, now: Moment) -> Answer | None:
        """React to the start of the run, before its first step and after each resume."""

    def after_row(self, now: Moment) -> Answer | None:
        """React to a row of training, in `now.metrics`. On a GPU the next step has already begun."""

    def after_evaluation(self, now: Moment) -> Answer | None:
        """React to an evaluation, in `now.metrics`."""

    def before_save(self, now: Moment) -> Answer | None:
        """Prepare for a checkpoint, before `state_dict` is called."""

    def run_ends(self, now: Moment) -> Answer | None:
        """React to the end of the run, after its last checkpoint. The answer can only alert."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, after a resume or a rollback."""


class EarlyStopping(Callback):
    """Ends a run whose evaluation no longer improves. The section `early_stopping` of a recipe adds it.

    Args:
        patience: Number of evaluations in a row without an improvement that end the run.
        min_delta: Smallest change of the metric that counts as an improvement.
        metric: Name of the metric, without `eval/`.
        is_lowest: Whether the lowest value is the best.
    """

    def __init__(self, patience: int, min_delta: float = 0.0, metric: str = "loss", is_lowest: bool = True):
        self._patience = patience
        self._min_delta = min_delta
        self._key = f"eval/{metric}"
        self._sign = 1 if is_lowest else -1
        self._best: float | None = None
        self._best_step = 0
        self._evaluations_since_best = 0

    def run_begins(self, now: Moment) -> Answer | None:
        """Stop again if early stopping has ended this run before and the patience is the same."""
        return self._stop_if_impatient()

    def after_evaluation(self, now: Moment) -> Answer | None:
        """Count the evaluation, and stop the run if too many did not improve."""
        value = now.metrics.get(self._key, math.nan)  # missing if nothing was counted
        improves = self._best is None or self._sign * (self._best - value) > self._min_delta
        if improves and not math.isnan(value):
            self._best = value
            self._best_step = now.step
            self._evaluations_since_best = 0
        else:
            self._evaluations_since_best += 1
        return self._stop_if_impatient()

    def _stop_if_impatient(self) -> Answer | None:
        if self._evaluations_since_best < self._patience:
            return None
        best = f"best {self._best:.4g} at step {self._best_step}" if self._best is not None else "always NaN"
        count = self._evaluations_since_best
        return Answer(stop=f"{self._key} did not improve in {count} evaluations, {best}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step and the number of evaluations since then."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "without": self._evaluations_since_best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, its step and the count."""
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._evaluations_since_best = state["without"]


class CallbackRunner:
    """Runs callbacks on rank 0 and sends their requests to all ranks.

    A request is open from the answer until the run has acted on it. Checkpoints store open requests, so that
    a run that is stopped in between acts on them after its resume.

    Args:
        callbacks: Pairs of name and callback; empty on all ranks but 0.
        config: Recipe of the run.
        job: Ranks of the job.
        tell: Receives the step and an alert.
        has_eval: Whether there is anything to evaluate on; otherwise requests to evaluate are ignored.
    """

    def __init__(
        self,
        callbacks: list[tuple[str, Callback]],
        config: RunConfig,
        job: Job,
        tell: Callable[[int, Event], None],
        has_eval: bool,
    ):
        self._callbacks = callbacks
        self._config = config
        self._job = job
        self._tell = tell
        self.evaluated_at = -1
        """Step of the last evaluation, also of one before a resume; -1 if there was none."""
        self._possible = {"save", "stop", *(["evaluate"] if has_eval else [])}
        self._open: set[str] = set()
        # Open requests that other ranks have received or will receive with the flags of a step.
        self._sent: set[str] = set()
        # Requests that were sent before a resume, for `run_begins`.
        self._sent_before_resume: set[str] = set()
        self.stop_reason = ""
        """Reason to stop the run, known only on rank 0; empty if there is none."""
        self._initial_states = self._collect_states()

    def build_moment(self, step: int, samples: int, tokens: float, **more: Any) -> Moment:
        """Return the moment to pass to callbacks; `more` are its further fields."""
        metrics = MappingProxyType(dict(more.pop("metrics", {})))
        return Moment(step, samples, tokens, self._config, metrics, **more)

    def run_begins(self, now: Moment) -> set[str]:
        """Call `run_begins` of the callbacks; return the requests that all ranks act on now. Collective."""
        return self._broadcast(self._sent_before_resume | self.call("run_begins", now))

    def after_evaluation(self, now: Moment) -> set[str]:
        """Call `after_evaluation` of the callbacks; return the requests that all ranks act on now.

        Collective. A request to evaluate counts as done.
        """
        self.evaluated_at = now.step
        requests = self._broadcast(self.call("after_evaluation", now))
        self.mark_done("evaluate")
        return requests - {"evaluate"}

    def call(self, method: str, now: Moment) -> set[str]:
        """Call one method of every callback, report their alerts, and open and return their requests.

        Does nothing on ranks other than 0.

        Args:
            method: Name of the method, one of MOMENTS.
            now: Argument of the method.

        Raises:
            CallbackError: A callback raised an exception, or returned neither `None` nor an `Answer`.
        """
        requests: set[str] = set()
        for name, callback in self._callbacks:
            with _name_failures(f"{name}.{method} at step {now.step}"):
                answer = getattr(callback, method)(now)
                if answer is None:
                    continue
                if not isinstance(answer, Answer):
                    raise TypeError(f"it returned {answer!r}; expected None or a pipeline.Answer")
                if answer.alert is not None:
                    self._report_alert(now.step, answer.alert)
            requests |= answer.requests & self._possible
            if answer.stop:
                self.stop_reason = self.stop_reason or f"{name}: {answer.stop}"
        self._open |= requests
        return requests

    def _report_alert(self, step: int, alert: Event) -> None:
        if alert.name in RESERVED_EVENT_NAMES:
            raise ValueError(f"{alert.name!r} is an event of the run itself; give the alert another name")
        self._tell(step, alert)

    def _broadcast(self, requests: set[str]) -> set[str]:
        """Return rank 0's requests on all ranks."""
        self._sent |= requests
        return set(self._job.broadcast_object(sorted(requests)))

    def take_requests(self) -> set[str]:
        """Return the requests to send with the flags of the next step, each once. Empty if not on rank 0."""
        new = self._open - self._sent
        self._sent |= new
        return new

    def mark_done(self, *requests: str) -> None:
        """Mark requests as done."""
        self._open -= set(requests)
        self._sent -= set(requests)
        if "stop" in requests:
            self.stop_reason = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Only rank 0's value is complete."""
        return {
            "states": self._collect_states(),
            "open": sorted(self._open),
            "sent": sorted(self._sent),
            "reason": self.stop_reason,
            "evaluated_at": self.evaluated_at,
        }

    def _collect_states(self) -> list[list[Any]]:
        """Return name and state of each callback. The states are copies."""
        states = []
        for name, callback in self._callbacks:
            with _name_failures(f"{name}.state_dict"):
                states.append([name, json.loads(json.dumps(callback.state_dict()))])
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. A callback that the checkpoint lacks gets its initial state.

        Several callbacks of one name get their states in the order of the recipe.
        """
        self.evaluated_at = state.get("evaluated_at", -1)
        if not self._callbacks:
            return
        stored = list(state.get("states", []))
        for (name, callback), (_, initial) in zip(self._callbacks, self._initial_states, strict=True):
            own = next((entry for entry in stored if entry[0] == name), None)
            if own is not None:
                stored.remove(own)
            with _name_failures(f"{name}.load_state_dict"):
                callback.load_state_dict(initial if own is None else own[1])
        self._open = set(state.get("open", []))
        self._sent = set()
        self._sent_before_resume = set(state.get("sent", []))
        self.stop_reason = state.get("reason", "")


@contextmanager
def _name_failures(method: str) -> Iterator[None]:
    """Raise a failure of a callback as one line that names the callback; the traceback goes to the log.

    Args:
        method: Name of the callback and of its method.
    """
    with errors_in_one_line(f"callbacks: {method}", CallbackError):
        try:
            yield
        except PipelineError:
            raise
        except Exception:
            logging.getLogger("pipeline.failure").error("%s", traceback.format_exc())
            raise


def import_callbacks(config: RunConfig) -> list[tuple[str, Callable[[], Callback]]]:
    """Return name and constructor of each callback of a recipe: early stopping, then the section `callbacks`.

    Raises:
        ConfigError: An import path is wrong, or names no callback, or `args` do not fit its constructor.
    """
    constructors: list[tuple[str, Callable[[], Callback]]] = []
    if config.early_stopping is not None:
        constructors.append((EARLY_STOPPING, lambda: _build_early_stopping(config)))
    return constructors + [(each.kind, _import_constructor(each)) for each in config.callbacks]


def _build_early_stopping(config: RunConfig) -> EarlyStopping:
    section = config.early_stopping
    assert section is not None
    return EarlyStopping(
        section.patience, section.min_delta, config.eval.best_metric, config.eval.best_is_lowest
    )


def _import_constructor(config: CallbackConfig) -> Callable[[], Callback]:
    """Return a function that makes the callback with its `args`.

    Raises:
        ConfigError: The import path is wrong, names no callback, or the callback has other arguments.
    """
    cls = import_object(config.kind, ConfigError)
    if not (isinstance(cls, type) and issubclass(cls, Callback)):
        raise ConfigError(f"callbacks: {config.kind} is no subclass of pipeline.Callback")
    if all(getattr(cls, moment) is getattr(Callback, moment) for moment in MOMENTS):
        raise ConfigError(
            f"callbacks: {config.kind} overrides no method of Callback; override one of {', '.join(MOMENTS)}"
        )
    message = f"callbacks: {config.kind} cannot be called with its args"
    check_signature(cls, message, ConfigError, **config.args)
    return lambda: cls(**config.args)


def build_callbacks(
    config: RunConfig,
    job: Job,
    tell: Callable[[int, Event], None],
    checkpoint_state: Mapping[str, Any],
    *,
    has_held_out: bool,
) -> CallbackRunner | None:
    """Build the callbacks of a run; return `None` if the recipe has none.

    Args:
        config: Recipe of the run.
        job: Ranks of the job.
        tell: Receives the step and an alert.
        checkpoint_state: State of the checkpoint that the run resumes from; empty for a new run.
        has_held_out: Whether data is held out to evaluate on.

    Raises:
        ConfigError: See import_callbacks; or the recipe has early stopping and no data is held out.
        CallbackError: A callback's constructor or one of its methods for checkpoints raised an exception.
    """
    if config.early_stopping is None and not config.callbacks:
        return None
    if config.early_stopping is not None and not (has_held_out or config.eval.is_best_of_task):
        raise ConfigError("early_stopping: nothing is held out to evaluate on; set data.eval_fraction=0.1")
    callbacks: list[tuple[str, Callback]] = []
    if job.ranks.is_main_process:
        for name, construct in import_callbacks(config):
            with _name_failures(f"{name}.__init__"):
                callbacks.append((name, construct()))
    runner = CallbackRunner(callbacks, config, job, tell, has_held_out or bool(config.eval.tasks))
    if checkpoint_state:
        runner.load_state_dict(checkpoint_state.get("callbacks", {}))
    return runner
