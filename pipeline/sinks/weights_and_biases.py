"""Weights & Biases: one run, logged by one process, which can never stop or hold up training.

Rows are exactly once on the server also after a kill: W&B itself loses what it had not sent yet, so a resumed
run is filled up from metrics.jsonl. W&B's own step never falls: a rollback puts it ahead of `global_step`.
Not here: the metrics themselves, and secrets (wandb finds its own key).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipeline.command_lines import own_command
from pipeline.config.schema import WandbConfig
from pipeline.errors import one_line
from pipeline.events import ROLLBACK, RUN_FAILED, SAMPLE, Event, Histograms, Shown
from pipeline.sinks.dispensable import SinkThread, wait_for
from pipeline.sinks.rewinds import is_rollback
from pipeline.sinks.scratch import temporary_files_in_scratch
from pipeline.sinks.wandb_checkpoints import CheckpointArtifacts
from pipeline.sinks.wandb_files import NOT_UPLOADED
from pipeline.sinks.wandb_start import (
    FINISH_TIMEOUT_SECONDS,
    choose_mode,
    forget_empty_variables,
    lack_of_room,
    open_run,
    run_arguments,
)
from pipeline.working_tree import GIT_DIFF

logger = logging.getLogger(__name__)
T = TypeVar("T")

FAILURE = "failure"
SAMPLES = 100
"""Lines of the table of samples: each evaluation sends it whole."""

AXES = {"global_step": "global_step", "tokens_seen": "train/tokens_seen"}
BEST = {"loss": "min", "perplexity": "min", "accuracy": "max", "per_second": "max", "mfu": "max"}
"""How the name of a metric ends -> which of its values is the best; the summary has that and the last."""


def open_wandb(
    config: WandbConfig,
    *,
    run_name: str,
    run_dir: Path,
    start_step: int,
    run_config: dict[str, Any],
    earlier: Callable[[], Iterable[Mapping[str, Any]]],
) -> WandbSink | None:
    """Open the run, or open it offline where there is no key or no server, and say which in one line.

    Args:
        config: The section `wandb` of the recipe.
        run_name: Group of the run where neither the recipe nor W&B's variable names one.
        run_dir: Directory of the run; its folder `wandb` has W&B's files, or links to them.
        start_step: 0 makes a new W&B run; otherwise the run goes on under the id it had.
        run_config: Shown as the run's configuration.
        earlier: Reads rows and rollbacks up to `start_step`; rows that W&B has not got are sent again.

    Returns:
        The sink, or None where W&B is disabled or cannot be started at all.
    """

    @temporary_files_in_scratch()
    def start() -> WandbSink | None:
        # wandb posts its own telemetry to the same server. With a server that hangs, that kept the process
        # 20 s at its exit. The variable is wandb's own switch and is read when its service starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        forget_empty_variables()
        mode, reason = choose_mode(config)
        if mode == "disabled":
            return None
        (run_dir / "wandb").mkdir(exist_ok=True)
        if (lacking := lack_of_room(run_dir / "wandb")) is not None:
            logger.warning("W&B is left out: %s; metrics.jsonl has them all", lacking)
            return None
        arguments = run_arguments(config, run_name, run_dir, run_config)
        run, newest = open_run(mode, reason, arguments, run_dir, is_resume=start_step > 0)
        if (run_dir / GIT_DIFF).exists():
            run.save(str(run_dir / GIT_DIFF), base_path=str(run_dir), policy="now")
        sink = WandbSink(run, newest, AXES[config.x_axis])
        if start_step == 0 and newest >= 0:
            logger.warning(
                "W&B: run %s has steps up to %d already and keeps them; this run's rows up to there are in "
                "metrics.jsonl alone (another WANDB_RUN_ID, or none, begins anew)",
                run.id,
                newest,
            )
        if start_step > 0:
            for record in earlier():
                sink.repeat(record)
            if newest > sink.wandb_step(start_step):
                logger.info("W&B has steps of this run beyond step %d already and keeps them", start_step)
        return sink

    return _never_crash("cannot start", start)


class WandbSink:
    """Hands rows to wandb's own process, which sends them on; `write` does not wait for the network."""

    def __init__(self, run: Any, newest: int, axis: str = "global_step") -> None:
        """Args:
        run: Of wandb, started.
        newest: W&B's own step up to which it has the rows; it keeps them.
        axis: The metric that curves are drawn over.
        """
        self._run = run
        self._newest_there = newest
        self._is_on, self._is_full = True, False
        self._artifacts: SinkThread | None = None
        self._samples = list[list[Any]]()
        self._step, self._row = 0, dict[str, Any]()  # the newest, which is still to be sent
        self._global_step = self._offset = self._rewinds = 0
        self._axis, self._defined = axis, set[str]()
        self._summary = dict[str, dict[str, float]]()
        for name in {axis, "global_step", "rewinds"}:
            run.define_metric(name, hidden=True)
        run.define_metric("*", step_metric=axis)
        if FAILURE in run.summary.keys():  # noqa: SIM118 (it is no dict): of the start before
            del run.summary[FAILURE]

    def wandb_step(self, step: int) -> int:
        """W&B's own step, which has to rise, of a global step."""
        return step + self._offset

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Log one row with its global step. Rows of one step are one there, sent when the next comes."""
        for name, value in row.items():
            if (best := _best_of(name)) is not None:
                better = np.fmin if best == "min" else np.fmax  # of a number and NaN the number
                so_far = self._summary.get(name, {}).get(best, math.nan)
                self._summary[name] = {best: float(better(value, so_far)), "last": float(value)}
        self._global_step, at = step, self.wandb_step(step)
        if at <= self._newest_there:
            return
        if at != self._step:
            self._send()
        self._step = at
        self._row |= {**row, "global_step": step} | ({"rewinds": self._rewinds} if self._rewinds else {})

    def repeat(self, record: Mapping[str, Any]) -> None:
        """Take a row or event of the run's record that was there before."""
        if is_rollback(record):
            self._rewind(record["step"], int(record["from_step"]))
        elif record.get("event") == SAMPLE:
            self._add_sample(record["step"], record)
        elif "event" not in record:
            self.write(record["step"], {key: value for key, value in record.items() if key != "step"})

    def _add_sample(self, step: int, fields: Mapping[str, Any]) -> None:
        """The table so far, with one more line, goes with the row of its step."""
        self._samples.append([step, self._rewinds, fields["prompt"], fields["text"]])
        if self.wandb_step(step) == self._step and self._row:
            self._row["samples"] = self._samples[-SAMPLES:]

    def _rewind(self, step: int, from_step: int) -> None:
        """The steps after `step` come again. One more than they are: so may the evaluation of `step`."""
        self._send()
        self._offset += from_step - step + 1
        self._rewinds += 1

    def tell(self, step: int, event: Event) -> None:
        """Send an alert, by mail or chat as the user's settings there say; W&B holds back repeated ones. How
        a run failed stands in the summary too, as `failure`."""
        if event.name == ROLLBACK:
            self._rewind(step, int(event.fields["from_step"]))
        if event.name == SAMPLE:
            self._add_sample(step, event.fields)
        if self._is_on and event.level != "info":
            self._is_on = _never_crash("stopped", lambda: self._alert(step, event)) is not None

    def show(self, what: Shown) -> None:
        """Log the checkpoints that are new, or have histograms go with the row of their step."""
        if isinstance(what, Histograms):
            if self.wandb_step(what.step) == self._step and self._row:
                self._row["histograms"] = what
        elif self._is_on:
            if self._artifacts is None:
                name = "W&B's list of checkpoints"
                self._artifacts = SinkThread(lambda: CheckpointArtifacts(self._run), name)
            self._artifacts.show(what)

    def close(self, exit_code: int) -> None:
        """Finish the run; waits for the server at most `FINISH_TIMEOUT_SECONDS`.

        Of a run that a signal stopped the newest step is kept back: W&B takes no more for a step that it has,
        and an evaluation of it may still come. When the run goes on it is sent with that.
        """
        is_stopped = exit_code > 128
        if not is_stopped:
            self._send()
        if self._artifacts is not None:
            self._artifacts.close(exit_code)
            wait_for([self._artifacts], FINISH_TIMEOUT_SECONDS)
        if self._is_on:
            self._is_on = False
            _never_crash("did not finish", lambda: self._finish(0 if is_stopped else exit_code))

    def _send(self) -> None:
        row, self._row = self._row, {}
        if row and self._has_room():
            self._is_on = _never_crash("stopped", lambda: self._log(row)) is not None

    def _has_room(self) -> bool:
        """Whether W&B takes rows; the first time that its disk has no room for them, one line."""
        if self._is_on and not self._is_full and (lacking := lack_of_room(Path(self._run.dir))) is not None:
            self._is_full = True
            logger.warning(
                "W&B gets no more rows from step %d on: %s; metrics.jsonl has them all, and once there is "
                "room, the run fills W&B up when it goes on",
                self._step,
                lacking,
            )
        return self._is_on and not self._is_full

    def _log(self, row: dict[str, Any]) -> bool:
        for name in row.keys() - self._defined:
            if (best := _best_of(name)) is not None:
                self._run.define_metric(name, step_metric=self._axis, summary=f"{best},last")
        self._defined |= row.keys()
        if (samples := row.pop("samples", None)) is not None:
            import wandb

            table = wandb.Table(columns=["global_step", "rewinds", "prompt", "text"], data=samples)
            # Bound here: for a table that is not, `log` makes an artifact too, and waits for the server.
            table.bind_to_run(self._run, "samples", self._step)
            row["samples"] = table
        if (histograms := row.pop("histograms", None)) is not None:
            row |= _drawn(histograms)
        self._run.log(row, step=self._step, commit=True)
        return True

    def _alert(self, step: int, event: Event) -> bool:
        level = "ERROR" if event.level == "error" else "WARN"
        self._run.alert(title=event.name, text=f"step {step}: {event.line}", level=level, wait_duration=60)
        if event.name == RUN_FAILED:
            self._run.summary[FAILURE] = str(event.fields.get("traceback", event.message))
        return True

    def _finish(self, exit_code: int) -> None:
        self._run.summary.update(self._summary)  # wandb knows the best since the last start alone
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            folder = Path(self._run.dir).parent
            (folder / NOT_UPLOADED).touch()
            logger.warning(
                "W&B did not take the last rows within %.0f s; metrics.jsonl has them all; to upload them: "
                "%s",
                FINISH_TIMEOUT_SECONDS,
                own_command("sync", "--upload", folder.parent.parent),
            )


def _best_of(name: str) -> str | None:
    """Whether the best value of a metric is its `min` or `max`; None: it has no best."""
    return next((best for end, best in BEST.items() if name.endswith(end)), None)


def _drawn(what: Histograms) -> dict[str, Any]:
    """As `wandb.watch` names them."""
    import wandb

    edges = what.edges.tolist()
    return {
        f"{group}/{name}": wandb.Histogram(np_histogram=(counts.tolist(), edges))
        for group, of in (("parameters", what.weights), ("gradients", what.gradients))
        for name, counts in of.items()
    }


def _never_crash(what: str, action: Callable[[], T]) -> T | None:
    """The action's result, or None, said in one line, where W&B failed: the record is metrics.jsonl."""
    try:
        return action()
    # Everything: wandb talks to another process and over the network, and raises whatever those raise
    # (ConnectionResetError, pydantic's errors, assertions). None of it is a reason to lose a training run.
    except Exception as error:
        logger.warning(
            "W&B %s (%s: %s); training goes on without it", what, type(error).__name__, one_line(error)
        )
        if isinstance(error, ConnectionError):
            import wandb

            # Unhooks its dead process from the interpreter's exit, which would end in a traceback.
            with contextlib.suppress(ConnectionError):
                wandb.teardown()
        return None
