"""Weights & Biases tracker: one run, logged by one process. It never stops or delays training.

Each row is on the server exactly once, even after a kill: W&B loses rows that it had not sent yet, so a
resumed run sends them again from metrics.jsonl.

W&B accepts no step twice, so its step is `global_step` plus an offset. Each rollback increases the offset by
the number of steps given up, plus one. Its line in metrics.jsonl has the totals: `steps_given_up`, and
`rewinds`, the number of rollbacks.

The training thread makes no call of W&B that waits for the server. Logging an artifact waits, so artifacts
have a thread of their own. Logging a table would wait, too; a table that is first bound to the run is sent as
a plain file.

W&B's shared mode is not used (wandb 0.31). It ignores `step=`, numbers rows itself, and sends them through
the server's asynchronous path, where a second process that repeats rows adds them again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from pipeline.config.command_lines import find_installed_program, format_shell_line
from pipeline.config.optional_packages import require_package
from pipeline.config.schema import WandbConfig
from pipeline.errors import summarize_error
from pipeline.monitoring.events import (
    ROLLBACK,
    RUN_FAILED,
    SAMPLE,
    Event,
    Histograms,
    Showable,
    TaskTable,
)
from pipeline.monitoring.trackers.interface import GIT_DIFF, TrackerThread, best_direction, wait_for_trackers
from pipeline.monitoring.trackers.jsonl import is_rollback
from pipeline.redaction import redact

if TYPE_CHECKING:  # trackers do not import torch
    from pipeline.checkpoint.catalog import SavedCheckpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE = "failure"
"""Key of the run's summary with the traceback of a failed run."""
MAX_SAMPLES = 100
"""Maximum lines of the table of samples. Each evaluation sends all of them again."""
MAX_TASK_ROWS = 400
"""Maximum lines of the table of tasks: their first documents."""
AXES = {"global_step": "global_step", "tokens_seen": "train/tokens_seen"}
"""The recipe's `wandb.x_axis` -> metric on the x axis of W&B's curves."""
RUN_ID_FILE = "wandb_run_id"
PROJECT = "deepspeed-pipeline"
INIT_TIMEOUT_SECONDS = 10.0
FINISH_TIMEOUT_SECONDS = 8.0
MIN_FREE_BYTES = 8 * 2**20
"""Free bytes on the disk of W&B's files below which no more rows are sent."""
ENVIRONMENT_VARIABLES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
    "job_type": "WANDB_JOB_TYPE",
}
"""Key of the section `wandb`, which is also an argument of `wandb.init` -> W&B's variable for it."""
_MODES = {"dryrun": "offline", "run": "online", "shared": "online"}
"""Other mode of wandb -> the mode that is used instead."""
MAX_HASHED_BYTES = 2**20
"""Size below which a JSON file of a checkpoint is hashed for its artifact."""
STOPPED = "stopped, and training continues without it"
"""Words for `_run_safely` about a failure during training."""


def open_wandb(
    config: WandbConfig,
    *,
    run_name: str,
    run_dir: Path,
    start_step: int,
    run_config: dict[str, Any],
    read_earlier: Callable[[], Iterable[Mapping[str, Any]]],
) -> WandbTracker | None:
    """Open the W&B run: online, or offline if there is no API key or the server does not answer.

    One log line says which, and why.

    Args:
        config: The section `wandb` of the recipe.
        run_name: Default group of the run, if neither the recipe nor W&B's environment variable names one.
        run_dir: Directory of the run; its folder `wandb` has W&B's files, or links to them.
        start_step: 0 creates a new W&B run; otherwise the run continues under its id.
        run_config: Configuration to show.
        read_earlier: Function that reads rows and rollbacks up to `start_step`. Those that W&B lacks are
            sent.

    Returns:
        The tracker; `None` if W&B is disabled or cannot be started.
    """

    def start() -> WandbTracker | None:
        # wandb posts telemetry to the same server. If that server hangs, the exit of the process takes 20 s.
        # wandb reads this variable when its service starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        remove_empty_variables()
        mode, reason = choose_mode(config)
        if mode == "disabled":
            return None
        (run_dir / "wandb").mkdir(exist_ok=True)
        if (lacking := explain_lack_of_space(run_dir / "wandb")) is not None:
            logger.warning(
                "W&B is left out: %s; metrics.jsonl has every row; free some space, and the run sends "
                "all rows to W&B when it resumes",
                lacking,
            )
            return None
        arguments = build_run_arguments(config, run_name, run_dir, run_config)
        run, last_logged_step = open_run(mode, reason, arguments, run_dir, is_resume=start_step > 0)
        if (run_dir / GIT_DIFF).exists():
            run.save(str(run_dir / GIT_DIFF), base_path=str(run_dir), policy="now")
        tracker = WandbTracker(run, last_logged_step, AXES[config.x_axis])
        if start_step == 0 and last_logged_step >= 0:
            logger.warning(
                "W&B: run %s already has W&B steps up to %d and keeps them; this run's rows up to that "
                "step are only in metrics.jsonl (set another WANDB_RUN_ID, or none, to start a new W&B run)",
                run.id,
                last_logged_step,
            )
        if start_step > 0:
            for record in read_earlier():
                tracker.replay(record)
            if last_logged_step > tracker.to_wandb_step(start_step):
                logger.info("W&B already has steps of this run beyond step %d and keeps them", start_step)
        return tracker

    return _run_safely("cannot start, and training continues without it", start)


class WandbTracker:
    """Passes rows to wandb's process, which sends them; `write` does not wait for the network."""

    def __init__(self, run: Any, last_logged_step: int, axis: str = "global_step") -> None:
        """Define the axes of a started run's curves, and remove the failure of an earlier start.

        Args:
            run: Started run of wandb.
            last_logged_step: W&B step up to which the run already has rows, which cannot be changed; -1 if it
                has none.
            axis: Metric on the x axis of curves.
        """
        self._run = run
        self._last_logged_step = last_logged_step
        self._is_enabled = True
        self._has_room = True
        self._artifacts: TrackerThread | None = None
        self._samples = list[list[Any]]()
        # The newest row, which is not sent yet, and its W&B step.
        self._pending_row = dict[str, Any]()
        self._pending_step = 0
        self._offset = 0
        self._rewinds = 0
        self._summary = dict[str, dict[str, float]]()
        for name in {axis, "global_step", "rewinds"}:
            run.define_metric(name, hidden=True)
        run.define_metric("*", step_metric=axis)
        if FAILURE in run.summary.keys():  # noqa: SIM118 (not a dict)
            del run.summary[FAILURE]  # of an earlier start

    def to_wandb_step(self, step: int) -> int:
        """Return the W&B step of a global step. W&B steps must increase."""
        return step + self._offset

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Log one row with its global step.

        Rows of the same step become one row of W&B, which is sent when the next step's row arrives.
        """
        for name, value in row.items():
            if (best := best_direction(name)) is not None:
                better = np.fmin if best == "min" else np.fmax  # ignores a NaN
                previous = self._summary.get(name, {}).get(best, math.nan)
                self._summary[name] = {best: float(better(value, previous)), "last": float(value)}
        at = self.to_wandb_step(step)
        if at <= self._last_logged_step:
            return
        if at != self._pending_step:
            self._send()
        self._pending_step = at
        self._pending_row |= {**row, "global_step": step}
        if self._rewinds:
            self._pending_row["rewinds"] = self._rewinds

    def replay(self, record: Mapping[str, Any]) -> None:
        """Process a row or event that an earlier process of the run recorded."""
        if is_rollback(record):
            self._send()
            self._rewinds = int(record["rewinds"])
            self._offset = int(record["steps_given_up"]) + self._rewinds
        elif record.get("event") == SAMPLE:
            self._add_sample(record["step"], record)
        elif "event" not in record:
            self.write(record["step"], {key: value for key, value in record.items() if key != "step"})

    def _add_sample(self, step: int, fields: Mapping[str, Any]) -> None:
        """Add a line to the table of samples.

        The table is sent with the row of this step. If that is sent already, it is sent with the row of a
        later sample.
        """
        self._samples.append([step, self._rewinds, fields["prompt"], fields["text"]])
        if self.to_wandb_step(step) == self._pending_step and self._pending_row:
            self._pending_row["samples"] = self._samples[-MAX_SAMPLES:]

    def tell(self, step: int, event: Event) -> None:
        """Process an event.

        A rollback shifts the W&B step, and a sample joins the table. A warning or an error becomes an alert.
        W&B suppresses repeated alerts. The traceback of a failed run is also in the run's summary.
        """
        if event.name == ROLLBACK:
            self._send()
            self._rewinds += 1
            # The steps after `step` repeat, and so may the evaluation of `step`.
            self._offset += int(event.fields["from_step"]) - step + 1
        if event.name == SAMPLE:
            self._add_sample(step, event.fields)
        if self._is_enabled and event.level != "info":
            self._is_enabled = _run_safely(STOPPED, lambda: self._alert(step, event)) is not None

    def show(self, what: Showable) -> None:
        """Log new checkpoints as artifacts; add histograms or documents of tasks to the row of their step."""
        if isinstance(what, Histograms):
            if self.to_wandb_step(what.step) == self._pending_step and self._pending_row:
                self._pending_row["histograms"] = what
        elif isinstance(what, TaskTable):
            if self.to_wandb_step(what.step) == self._pending_step and self._pending_row:
                self._pending_row["tasks"] = what
        elif self._is_enabled:
            if self._artifacts is None:
                name = "W&B's list of checkpoints"
                self._artifacts = TrackerThread(lambda: CheckpointArtifacts(self._run), name)
            self._artifacts.show(what)

    def close(self, exit_code: int) -> None:
        """Finish the run. Waits at most FINISH_TIMEOUT_SECONDS for artifacts, and as long again for rows.

        If a signal stopped the run, the pending row is not sent: W&B accepts nothing more for a step that it
        has, and the evaluation of that step may follow after the resume, which sends both.
        """
        is_stopped = exit_code > 128
        if not is_stopped:
            self._send()
        if self._artifacts is not None:
            self._artifacts.close(exit_code)
            wait_for_trackers([self._artifacts], FINISH_TIMEOUT_SECONDS)
        if self._is_enabled:
            self._is_enabled = False
            what = "did not finish; metrics.jsonl has every row"
            _run_safely(what, lambda: self._finish(exit_code, is_stopped=is_stopped))

    def _send(self) -> None:
        row = self._pending_row
        self._pending_row = {}
        if not (row and self._is_enabled and self._has_room):
            return
        if (lacking := explain_lack_of_space(Path(self._run.dir))) is not None:
            self._has_room = False
            logger.warning(
                "W&B gets no more rows from step %d on: %s; metrics.jsonl has them all; free some space, and "
                "the run sends them to W&B when it resumes",
                row["global_step"],
                lacking,
            )
            return
        self._is_enabled = _run_safely(STOPPED, lambda: self._log(row)) is not None

    def _log(self, row: dict[str, Any]) -> bool:
        """Send the pending row. Return True, since `_run_safely` returns `None` after a failure."""
        import wandb

        tables: dict[str, tuple[list[str], list[Any]]] = {}
        if (samples := row.pop("samples", None)) is not None:
            tables["samples"] = (["global_step", "rewinds", "prompt", "text"], samples)
        if (tasks := row.pop("tasks", None)) is not None:
            rows = [list(each) for each in tasks.rows[:MAX_TASK_ROWS]]
            tables["tasks"] = (["task", "document", "prompt", "target", "answer", "score"], rows)
        for key, (columns, rows) in tables.items():
            table = wandb.Table(columns=columns, data=rows)
            # Without this, `log` makes an artifact of the table too, and waits for the server.
            table.bind_to_run(self._run, key, self._pending_step)
            row[key] = table
        histograms: Histograms | None = row.pop("histograms", None)
        if histograms is not None:
            edges = histograms.edges.tolist()
            groups = {"parameters": histograms.weights, "gradients": histograms.gradients}
            for group, counts_of in groups.items():
                for name, counts in counts_of.items():
                    row[f"{group}/{name}"] = wandb.Histogram(np_histogram=(counts.tolist(), edges))
        self._run.log(row, step=self._pending_step, commit=True)
        return True

    def _alert(self, step: int, event: Event) -> bool:
        """Send an alert. Return True, since `_run_safely` returns `None` after a failure."""
        level = "ERROR" if event.level == "error" else "WARN"
        self._run.alert(title=event.name, text=f"step {step}: {event.line}", level=level, wait_duration=60)
        if event.name == RUN_FAILED:
            self._run.summary[FAILURE] = str(event.fields.get("traceback", event.message))
        return True

    def _finish(self, exit_code: int, *, is_stopped: bool) -> None:
        try:
            self._run.summary.update(self._summary)
            self._run.finish(exit_code=0 if is_stopped else exit_code)
        except ConnectionError:
            if not is_stopped:
                raise
            # At a signal, DeepSpeed's launcher ends all processes below it, also wandb's.
            logger.info("W&B ended before the run; a resumed run sends the rows that W&B lacks")
            _forget_dead_process()
        except TimeoutError:
            logger.warning(
                "W&B did not accept the last rows within %.0f s; metrics.jsonl has them all; to upload them: "
                "%s",
                FINISH_TIMEOUT_SECONDS,
                build_upload_command("--include-online", Path(self._run.dir).parent),
            )


def build_upload_command(*words: str | Path) -> str:
    """Return the command of wandb's client that uploads files."""
    return format_shell_line(find_installed_program("wandb") or "wandb", "sync", *words)


def _run_safely(what: str, action: Callable[[], T]) -> T | None:
    """Run the action and return its result. After a failure of W&B, log one line and return `None`.

    Args:
        what: Words that follow "W&B" in the log line, such as STOPPED.
        action: Function that calls W&B.
    """
    try:
        return action()
    # Any error: wandb communicates with another process and over the network, and raises many types
    # (ConnectionResetError, errors of pydantic, assertions). None of them may end a training run.
    except Exception as error:
        logger.warning(
            "W&B %s (%s: %s)",
            what,
            type(error).__name__,
            summarize_error(error),
        )
        if isinstance(error, ConnectionError):
            _forget_dead_process()
        return None


def _forget_dead_process() -> None:
    """Remove wandb's dead process from the exit handlers, which would otherwise end in a traceback."""
    import wandb

    with contextlib.suppress(ConnectionError):
        wandb.teardown()


def explain_lack_of_space(folder: Path) -> str | None:
    """Return why W&B gets no more rows; `None` if its disk has enough space.

    On a full disk wandb 0.31 silently drops rows that it cannot write to its own file, also in online runs,
    and exits with code 0. In a test, 12 of 2,010 rows were missing in the middle, which no resume detects. So
    no more rows are sent to W&B before the disk is full: then rows are missing only at the end.
    """
    free = shutil.disk_usage(folder).free
    if free >= MIN_FREE_BYTES:
        return None
    return f"{folder} has {free / 2**20:.1f} MiB left, and W&B loses rows on a full disk"


def remove_empty_variables() -> None:
    """Remove W&B's empty environment variables: W&B uses the empty string as a value, or refuses it."""
    for name, value in list(os.environ.items()):
        if name.startswith("WANDB_") and not value.strip():
            del os.environ[name]


def build_run_arguments(
    config: WandbConfig, run_name: str, run_dir: Path, run_config: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `wandb.init`, and create the folder that WANDB_DIR names.

    One log line names the environment variables that the recipe overrides.

    Args:
        config: The section `wandb` of the recipe; W&B's variables replace the keys it omits.
        run_name: Default group of the run, if neither the recipe nor W&B's variable names one.
        run_dir: Directory of the run.
        run_config: Configuration to show.
    """
    arguments: dict[str, Any] = {"project": PROJECT, "group": run_name}
    overridden = []
    from_variable: Any = os.environ.get("WANDB_MODE")
    if config.mode != "auto" and from_variable not in (None, config.mode):
        overridden.append(f"mode {config.mode} from the recipe, not {from_variable} from WANDB_MODE")
    for key, variable in ENVIRONMENT_VARIABLES.items():
        from_recipe = getattr(config, key)
        from_variable = os.environ.get(variable)
        if from_variable is not None and key == "tags":
            from_variable = from_variable.split(",")
        if from_recipe and from_variable not in (None, from_recipe):
            overridden.append(f"{key} {from_recipe} from the recipe, not {from_variable} from {variable}")
        if from_recipe or from_variable:
            arguments[key] = from_recipe or from_variable
    if overridden:
        logger.info("W&B: %s", "; ".join(overridden))
    name = os.environ.get("WANDB_NAME", run_dir.resolve().name)
    folder = os.environ.get("WANDB_DIR", str(run_dir))
    Path(folder).mkdir(parents=True, exist_ok=True)
    redacted = redact(arguments | {"name": name, "config": run_config})
    return redacted | {"dir": folder}  # a path that wandb must find, so it is not redacted


def choose_mode(config: WandbConfig) -> tuple[str, str]:
    """Return `online`, `offline` or `disabled`, and the reason for it; an empty reason if it is online."""
    require_package("wandb", f"wandb.mode: {config.mode}", "set wandb.mode=disabled")
    import wandb

    chosen: dict[str, Any] = {} if config.mode == "auto" else {"mode": config.mode}
    # Without a mode, wandb's settings contain WANDB_MODE or the mode that `wandb offline` saved.
    settings = wandb.setup(settings=wandb.Settings(silent=True, **chosen)).settings
    mode = _MODES.get(settings.mode, settings.mode)
    if mode != "online":
        return mode, f"mode {settings.mode}"
    try:
        has_key = wandb.login(prompt=False, verify=False)  # searches for a key where wandb does
    except wandb.Error as error:
        return "offline", summarize_error(error)
    return ("online", "") if has_key else ("offline", f"no API key for {settings.base_url}")


def open_run(
    mode: str, reason: str, arguments: dict[str, Any], run_dir: Path, *, is_resume: bool
) -> tuple[Any, int]:
    """Start a wandb run: online if that is the mode and the server responds, else offline.

    Args:
        mode: `online` or `offline`.
        reason: Reason for offline.
        arguments: Arguments of `wandb.init`.
        run_dir: Directory of the run.
        is_resume: Whether the run resumes from a checkpoint.

    Returns:
        The run, and the W&B step up to which it has rows; -1 if it has none.
    """
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_TIMEOUT_SECONDS,
        finish_timeout=FINISH_TIMEOUT_SECONDS,
        finish_timeout_raises=True,
        disable_git=True,  # wandb would upload the diff unredacted; the run's git.diff has no secrets
        x_transaction_log_flush_interval=1.0,  # 15 by default; a killed run loses rows that were not flushed
    )
    # create_new: another wandb run in this process is not affected.
    common = {"reinit": "create_new", "settings": settings, **arguments}
    folder = run_dir / "wandb"
    id_file = run_dir / RUN_ID_FILE
    uses_variable = not is_resume and "WANDB_RESUME" in os.environ
    # `None` lets wandb read WANDB_RESUME.
    resume: Literal["allow"] | None = None if uses_variable else "allow"
    if mode == "online":
        try:
            run_id = _choose_run_id(id_file, is_resume=is_resume, reuse=is_resume)
            run = _init("online", folder, id=run_id, resume=resume, **common)
            _move_aside(folder.glob("offline-run-*"))  # the server gets their rows from metrics.jsonl
            logger.info("W&B run: %s", run.url)
            return run, run.starting_step - 1
        except (wandb.Error, TimeoutError) as error:
            reason = summarize_error(error)
    # `wandb sync` uploads the offline files of one id together, in the order in which they were started. A
    # run that was online before gets a new id: the server cannot be asked now which rows it has, so the new
    # file repeats all rows.
    newest = _find_newest_offline_step(folder, id_file) if is_resume else None
    if newest is None:
        _move_aside(folder.glob("offline-run-*"))
    run_id = _choose_run_id(id_file, is_resume=is_resume, reuse=newest is not None)
    run = _init("offline", folder, id=run_id, resume=resume, **common)
    paths = sorted(folder.glob(f"offline-run-*-{run.id}"))
    logger.warning("W&B is offline (%s); to upload: %s", reason, build_upload_command(*paths))
    return run, -1 if newest is None else newest


def _init(mode: Literal["online", "offline"], folder: Path, **arguments: Any) -> Any:
    """Start a run; if its files are elsewhere (WANDB_DIR), create a link to them in `folder`."""
    import wandb

    # wandb uploads sys.argv, which contains overrides of the recipe.
    original = sys.argv
    sys.argv = redact(original)
    try:
        run = wandb.init(mode=mode, **arguments)
    finally:
        sys.argv = original
    files = Path(run.dir).resolve().parent
    if files.parent != folder.resolve():
        (folder / files.name).symlink_to(files)
    return run


def _find_newest_offline_step(folder: Path, id_file: Path) -> int | None:
    """Return the newest step in the offline files of the run whose id is saved; `None` if there is none.

    Files without a row, which a kill can leave, are moved aside: `wandb sync` would stop at them.
    """
    if not id_file.exists():
        return None
    folders = sorted(folder.glob(f"offline-run-*-{id_file.read_text().strip()}"), reverse=True)
    for offline_folder in folders:
        # wandb's reader prints one record per line. The file of each start has only the rows of that start.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
        command += map(str, offline_folder.glob("run-*.wandb"))
        steps = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reader:
            for line in reader.stdout or ():
                if b'"type":"history"' in line:
                    with contextlib.suppress(ValueError):  # the file may end in the middle of a record
                        steps.append(int(json.loads(line)["history"]["step"]["num"]))
        if steps:
            return max(steps)
        _move_aside([offline_folder])
    return None


def _choose_run_id(path: Path, *, is_resume: bool, reuse: bool) -> str:
    """Return the id saved in the run directory, or choose a new one and save it.

    Args:
        path: File of the id.
        is_resume: Whether the run resumes from a checkpoint.
        reuse: Whether to return the saved id if there is one.
    """
    wanted = os.environ.get("WANDB_RUN_ID")
    if reuse and path.exists():
        run_id = path.read_text().strip()
        if wanted not in (None, run_id):
            logger.info("W&B: this run continues under its own id %s, not under WANDB_RUN_ID", run_id)
        return run_id
    # A resume that gets here needs a new id, so it ignores WANDB_RUN_ID, except in a sweep, whose agent knows
    # its trial only by that id.
    uses_variable = not is_resume or "WANDB_SWEEP_ID" in os.environ
    run_id = (wanted if uses_variable else None) or secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id


def _move_aside(runs: Iterable[Path]) -> None:
    """Move offline files to `superseded/`, since `wandb sync` would upload their rows a second time."""
    paths = {path for old in runs for path in (old, old.resolve())}  # of a link its target, too
    for path in sorted(paths):
        if path.is_symlink() or path.exists():  # the target of a link may have been moved before
            (path.parent / "superseded").mkdir(exist_ok=True)
            path.rename(path.parent / "superseded" / path.name)


class CheckpointArtifacts:
    """Logs each checkpoint as an artifact that refers to its files. Runs on a separate thread.

    The client queries the server before it accepts an artifact. A checkpoint is logged once more when it
    becomes the newest or the best again: the server recognises it by its files and moves the alias.
    """

    def __init__(self, run: Any) -> None:
        """Create the tracker, given a started run of wandb, whose id names the artifacts."""
        self._run = run
        self._aliases: dict[SavedCheckpoint, set[str]] = {}

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Do nothing."""

    def tell(self, step: int, event: Event) -> None:
        """Do nothing."""

    def show(self, what: Showable) -> None:
        """Log the checkpoints that are new or have a new alias. Waits for the server."""
        if isinstance(what, Histograms | TaskTable):
            return
        logged = self._aliases
        self._aliases = {}
        for each in what.saved:
            aliases = {f"step-{each.step}"}
            if each is what.saved[-1]:
                aliases.add("latest")
            if each is what.best:
                aliases.add("best")
            self._aliases[each] = aliases
            if not aliases <= logged.get(each, set()):
                try:
                    self._run.log_artifact(self._build_artifact(each), aliases=sorted(aliases))
                except (OSError, ValueError):  # wandb raises ValueError for a missing file
                    if each.folder.exists():  # else the checkpoint was deleted in the meantime
                        raise

    def close(self, exit_code: int) -> None:
        """Do nothing."""

    def _build_artifact(self, checkpoint: SavedCheckpoint) -> Any:
        import wandb

        folder = checkpoint.folder.resolve()
        metadata = {
            "step": checkpoint.step,
            "eval_loss": checkpoint.eval_loss,
            "folder": str(folder),
            "host": platform.node(),
        }
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", "model", metadata=metadata)
        for path in sorted(folder.iterdir()):
            # Only small JSON files are hashed, among them the manifest. It has the checksums of all files, so
            # a step that is saved again becomes another version. Other files are known by name.
            is_hashed = path.suffix == ".json" and path.stat().st_size < MAX_HASHED_BYTES
            artifact.add_reference(path.as_uri(), name=path.name, checksum=is_hashed)
        return artifact
