"""Weights & Biases: one run, logged by one process, which can never stop or hold up training.

Rows are exactly once on the server also after a kill: W&B itself loses what it had not sent yet, so a resumed
run is filled up from metrics.jsonl. W&B's own step never falls: a rollback puts it ahead of `global_step`.
Not here: the metrics themselves, and secrets (wandb finds its own key).
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from pipeline.config.command_lines import installed_program, own_command, shell_line
from pipeline.config.optional_packages import require
from pipeline.config.schema import WandbConfig
from pipeline.errors import PipelineError, one_line
from pipeline.monitoring.events import ROLLBACK, RUN_FAILED, SAMPLE, Event, Histograms, Shown
from pipeline.monitoring.trackers.interface import GIT_DIFF, TrackerThread, wait_for
from pipeline.monitoring.trackers.jsonl import is_rollback
from pipeline.redaction import redact

if TYPE_CHECKING:  # the trackers load no torch
    from pipeline.checkpoint.catalog import SavedCheckpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE = "failure"
SAMPLES = 100
"""Lines of the table of samples: each evaluation sends it whole."""

AXES = {"global_step": "global_step", "tokens_seen": "train/tokens_seen"}
BEST = {"loss": "min", "perplexity": "min", "accuracy": "max", "per_second": "max", "mfu": "max"}
"""How the name of a metric ends -> which of its values is the best; the summary has that and the last."""
RUN_ID_FILE = "wandb_run_id"
PROJECT = "deepspeed-pipeline"
INIT_TIMEOUT_SECONDS = 10.0
FINISH_TIMEOUT_SECONDS = 8.0
ROOM = 8 * 2**20
"""Bytes that the disk with W&B's files has left at the least, where it is to log."""
VARIABLES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
    "job_type": "WANDB_JOB_TYPE",
}
"""Key of the section `wandb` and argument of `wandb.init` -> W&B's own variable for it."""
_MODES = {"dryrun": "offline", "run": "online", "shared": "online"}  # wandb's other words
SCRATCH_PREFIX = "pipeline-wandb-"
SCRATCH_LOCK = "lock"
LONGEST_SCRATCH_PATH = 60  # wandb puts sockets there, whose paths Linux limits to 107 bytes
MOST_HASHED_BYTES = 2**20
SERVER_SECONDS = 10.0
NOT_UPLOADED = "not_uploaded"
"""Beside the file of an online run that ended before the server had taken all of it."""


def open_wandb(
    config: WandbConfig,
    *,
    run_name: str,
    run_dir: Path,
    start_step: int,
    run_config: dict[str, Any],
    earlier: Callable[[], Iterable[Mapping[str, Any]]],
) -> WandbTracker | None:
    """Open the run, or open it offline where there is no key or no server, and say which in one line.

    Args:
        config: The section `wandb` of the recipe.
        run_name: Group of the run where neither the recipe nor W&B's variable names one.
        run_dir: Directory of the run; its folder `wandb` has W&B's files, or links to them.
        start_step: 0 makes a new W&B run; otherwise the run goes on under the id it had.
        run_config: Shown as the run's configuration.
        earlier: Reads rows and rollbacks up to `start_step`; rows that W&B has not got are sent again.

    Returns:
        The tracker, or None where W&B is disabled or cannot be started at all.
    """

    @temporary_files_in_scratch()
    def start() -> WandbTracker | None:
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
        tracker = WandbTracker(run, newest, AXES[config.x_axis])
        if start_step == 0 and newest >= 0:
            logger.warning(
                "W&B: run %s has steps up to %d already and keeps them; this run's rows up to there are in "
                "metrics.jsonl alone (another WANDB_RUN_ID, or none, begins anew)",
                run.id,
                newest,
            )
        if start_step > 0:
            for record in earlier():
                tracker.repeat(record)
            if newest > tracker.wandb_step(start_step):
                logger.info("W&B has steps of this run beyond step %d already and keeps them", start_step)
        return tracker

    return _never_crash("cannot start", start)


class WandbTracker:
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
        self._artifacts: TrackerThread | None = None
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
                self._artifacts = TrackerThread(lambda: CheckpointArtifacts(self._run), name)
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


def lack_of_room(folder: Path) -> str | None:
    """On a full disk W&B's process drops rows without a word, of an online run too; None: there is room."""
    free = shutil.disk_usage(folder).free
    return (
        f"{folder} has {free / 2**20:.1f} MiB left, and W&B loses rows on a full disk"
        if free < ROOM
        else None
    )


def forget_empty_variables() -> None:
    """Remove W&B's variables that are set to nothing: W&B takes the empty text for a value, or refuses it."""
    for name, value in list(os.environ.items()):
        if name.startswith("WANDB_") and not value.strip():
            del os.environ[name]


def run_arguments(
    config: WandbConfig, run_name: str, run_dir: Path, run_config: dict[str, Any]
) -> dict[str, Any]:
    """Return where and under which name `wandb.init` files the run; one line says what the recipe overrides.

    Args:
        config: The section `wandb` of the recipe; W&B's variables stand for what it leaves out.
        run_name: Group of the run where neither names one.
        run_dir: Directory of the run.
        run_config: Shown as the run's configuration.
    """
    arguments: dict[str, Any] = {"project": PROJECT, "group": run_name}
    overridden = []
    theirs: Any = os.environ.get("WANDB_MODE")
    if config.mode != "auto" and theirs not in (None, config.mode):
        overridden.append(f"mode {config.mode} from the recipe, not {theirs} from WANDB_MODE")
    for key, variable in VARIABLES.items():
        given = getattr(config, key)
        theirs = os.environ.get(variable)
        if theirs is not None and key == "tags":
            theirs = theirs.split(",")
        if given and theirs not in (None, given):
            overridden.append(f"{key} {given} from the recipe, not {theirs} from {variable}")
        if given or theirs:
            arguments[key] = given or theirs
    if overridden:
        logger.info("W&B: %s", "; ".join(overridden))
    name = os.environ.get("WANDB_NAME", run_dir.resolve().name)
    folder = os.environ.get("WANDB_DIR", str(run_dir))
    Path(folder).mkdir(parents=True, exist_ok=True)
    return redact(arguments | {"name": name, "config": run_config}) | {"dir": folder}


def choose_mode(config: WandbConfig) -> tuple[str, str]:
    """`online`, `offline` or `disabled`, and why, where the answer is offline."""
    require("wandb", f"wandb.mode: {config.mode}", "set wandb.mode=disabled")
    import wandb

    chosen: dict[str, Any] = {} if config.mode == "auto" else {"mode": config.mode}
    # With nothing chosen here, wandb's settings hold WANDB_MODE, or what `wandb offline` wrote down.
    settings = wandb.setup(settings=wandb.Settings(silent=True, **chosen)).settings
    mode = _MODES.get(settings.mode, settings.mode)
    if settings.mode == "shared":
        logger.warning(
            "W&B's shared mode is not used: it cannot keep each row once over a kill; the run is online, "
            "with the system metrics of the main process's node (docs/how-to.md)"
        )
    if mode != "online":
        return mode, f"mode {settings.mode}"
    try:
        has_key = wandb.login(prompt=False, verify=False)  # looks for a key where wandb itself does
    except wandb.Error as error:
        return "offline", one_line(error)
    return ("online", "") if has_key else ("offline", f"no API key for {settings.base_url}")


def open_run(
    mode: str, reason: str, arguments: dict[str, Any], run_dir: Path, *, is_resume: bool
) -> tuple[Any, int]:
    """A started wandb run: online if that is the mode and the server answers, offline otherwise.

    Returns:
        The run, and the step up to which W&B has its rows; -1: none.
    """
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_TIMEOUT_SECONDS,
        finish_timeout=FINISH_TIMEOUT_SECONDS,
        finish_timeout_raises=True,
        disable_git=True,  # it would upload the diff as it is; the run's git.diff has no secrets
        x_transaction_log_flush_interval=1.0,  # 15 by default, and a killed run loses what was not flushed
    )
    # create_new: a run of the user's own in this process stays what it is.
    shared = {"reinit": "create_new", "settings": settings, **arguments}
    folder, id_file = run_dir / "wandb", run_dir / RUN_ID_FILE
    is_left = not is_resume and "WANDB_RESUME" in os.environ
    resume: Literal["allow"] | None = None if is_left else "allow"  # None: as the variable says
    if mode == "online":
        try:
            run_id = _run_id(id_file, is_resume=is_resume, reuse=is_resume)
            run = _init("online", folder, id=run_id, resume=resume, **shared)
            _forget_unfinished(folder)
            _set_aside(folder.glob("offline-run-*"))  # the server gets their rows from metrics.jsonl
            logger.info("W&B run: %s", run.url)
            return run, run.starting_step - 1
        except (wandb.Error, TimeoutError) as error:
            reason = one_line(error)
    # Rows that were written offline under this id are uploaded together with those to come: `wandb sync`
    # sends the files of one run in the order of their starts. A run that the server may know gets a new id:
    # how many of its rows are there cannot be asked now, so the file begins with all of them.
    newest = _newest_offline_step(folder, id_file) if is_resume else None
    if newest is None:
        _forget_unfinished(folder)
        _set_aside(folder.glob("offline-run-*"))
    run_id = _run_id(id_file, is_resume=is_resume, reuse=newest is not None)
    run = _init("offline", folder, id=run_id, resume=resume, **shared)
    paths = sorted(folder.glob(f"offline-run-*-{run.id}"))
    upload = shell_line(installed_program("wandb") or "wandb", "sync", *paths)
    logger.warning("W&B is offline (%s); to upload: %s", reason, upload)
    return run, -1 if newest is None else newest


def _init(mode: Literal["online", "offline"], folder: Path, **arguments: Any) -> Any:
    """Start a run; where its files lie elsewhere (WANDB_DIR), `folder` has a link to them."""
    import wandb

    # wandb sends sys.argv on, where overrides of the recipe stand.
    kept, sys.argv = sys.argv, redact(sys.argv)
    try:
        run = wandb.init(mode=mode, **arguments)
    finally:
        sys.argv = kept
    files = Path(run.dir).resolve().parent
    if files.parent != folder.resolve():
        (folder / files.name).symlink_to(files)
    return run


def _newest_offline_step(folder: Path, id_file: Path) -> int | None:
    """The newest step in the offline files of the run whose id is kept; None: there is none.

    Files without a row, as a kill leaves them, are set aside: `wandb sync` would stop at them.
    """
    if not id_file.exists():
        return None
    for run in sorted(folder.glob(f"offline-run-*-{id_file.read_text().strip()}"), reverse=True):
        step = max((row["step"] for row in rows_of(run)), default=None)
        if step is not None:
            return step
        _set_aside([run])
    return None


def _run_id(path: Path, *, is_resume: bool, reuse: bool) -> str:
    """The id kept in the run directory, or a new one, kept there from now on."""
    wanted = os.environ.get("WANDB_RUN_ID")
    if reuse and path.exists():
        run_id = path.read_text().strip()
        if wanted not in (None, run_id):
            logger.info("W&B: this run goes on under its own id %s, not under WANDB_RUN_ID", run_id)
        return run_id
    # A resume asks for another id than the one before; an agent of a sweep knows its trial by no other.
    is_given = not is_resume or "WANDB_SWEEP_ID" in os.environ
    run_id = (wanted if is_given else None) or secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id


def _forget_unfinished(folder: Path) -> None:
    """What the server had not taken of an earlier start comes from metrics.jsonl now."""
    for mark in folder.glob(f"run-*/{NOT_UPLOADED}"):
        mark.unlink()


def _set_aside(runs: Iterable[Path]) -> None:
    """Move offline files out of the way of `wandb sync`, which would double their rows."""
    for old in sorted(runs):
        for each in {old, old.resolve()}:  # a link, and what it leads to
            (each.parent / "superseded").mkdir(exist_ok=True)
            each.rename(each.parent / "superseded" / each.name)


@contextmanager
def temporary_files_in_scratch() -> Iterator[None]:
    """What this process, and those it starts, put into temporary folders goes to this process's own."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    folder = str(scratch())
    tempfile.tempdir = folder
    if len(folder) <= LONGEST_SCRATCH_PATH:
        os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        if before[1] is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before[1]


@functools.cache
def scratch() -> Path:
    """Return the folder that wandb keeps temporary files in; it goes with the process, or at the next start.

    A killed run cannot remove its folder. It is locked for as long as its process lives, so that a free lock
    says that the run is dead, whatever has become of its process id.
    """
    above = Path(tempfile.gettempdir())
    remove_dead(above)
    # Under its own name only once it is locked: nobody can take it for a dead run's.
    new = Path(tempfile.mkdtemp(prefix=f"new-{SCRATCH_PREFIX}"))
    lock = os.open(new / SCRATCH_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = new.rename(above / new.name.removeprefix("new-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_dead(above: Path) -> None:
    """Removes the folders of runs that are dead: ours by their name, by their owner, and by a free lock."""
    for folder in above.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):  # of another user, or being removed by another run
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / SCRATCH_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class CheckpointArtifacts:
    """Logs each checkpoint once, and once more where it becomes the newest or the best again: the server
    knows it by its files, and moves the alias. An artifact refers to the files where they lie.

    Called on a thread of its own: the client asks the server before it takes one, and rows do not wait for
    that.

    Args:
        run: Of wandb, started. Artifacts are named by its id.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: dict[SavedCheckpoint, set[str]] = {}  # with the aliases that it has

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Nothing."""

    def tell(self, step: int, event: Event) -> None:
        """Nothing."""

    def show(self, what: Shown) -> None:
        """Log the checkpoints that are new. Waits for the server."""
        if isinstance(what, Histograms):
            return
        known, self._known = self._known, {}
        for each in what.saved:
            aliases = {f"step-{each.step}"}
            aliases |= {"latest"} if each is what.saved[-1] else set()
            aliases |= {"best"} if each is what.best else set()
            self._known[each] = aliases
            if not aliases <= known.get(each, set()):
                try:
                    self._run.log_artifact(self._artifact(each), aliases=sorted(aliases))
                except (OSError, ValueError):  # wandb raises ValueError for a file that is not there
                    if each.folder.exists():  # else it was deleted before its turn came
                        raise

    def close(self, exit_code: int) -> None:
        """Nothing."""

    def _artifact(self, checkpoint: SavedCheckpoint) -> Any:
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
            # By their names, but for the manifest: it has the others' checksums, so that a step which is
            # saved anew is another version.
            is_hashed = path.suffix == ".json" and path.stat().st_size < MOST_HASHED_BYTES
            artifact.add_reference(path.as_uri(), name=path.name, checksum=is_hashed)
        return artifact


@dataclass(frozen=True)
class WandbFile:
    """A folder that W&B wrote in one start of a run."""

    folder: Path
    num_rows: int
    steps: tuple[int, int] | None
    """The first and the last global step; None: it has no row, and nothing to upload."""
    is_uploaded: bool


def files_to_upload(run_dir: Path) -> list[WandbFile]:
    """In the order of their starts. Those that a later start stands for are not among them."""
    folders = list(run_dir.glob("wandb/offline-run-*"))
    folders += [path.parent for path in run_dir.glob(f"wandb/run-*/{NOT_UPLOADED}")]
    return [_read_file(folder) for folder in sorted(folders, key=lambda path: path.name.partition("run-")[2])]


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """What W&B's file in a folder has of the history: `step` is W&B's own, `item` has the metrics."""
    # wandb's own reader, a line a record; each start's file has its own rows alone.
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    command += [str(path) for path in folder.glob("run-*.wandb")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reader:
        for line in reader.stdout or ():
            if b'"type":"history"' in line:
                with contextlib.suppress(ValueError):  # of a file that ends in the middle of a record
                    row = json.loads(line)["history"]
                    yield {"step": int(row["step"]["num"]), "item": row.get("item", {})}


def check_server() -> str:
    """The server's address, once it has taken the key.

    Raises:
        PipelineError: there is no key, no server, or it does not take the key.
    """
    import wandb

    server = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
    try:
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise PipelineError(f"{server} cannot be used: {one_line(error)}") from None
    if not has_key:
        raise PipelineError(f"no API key for {server}: run `wandb login`, or set WANDB_API_KEY")
    # Asked here, in one call: wandb itself tries again for minutes, and says nothing meanwhile.
    key = base64.b64encode(f"api:{wandb.setup().settings.api_key}".encode()).decode()
    headers = {"Authorization": f"Basic {key}", "Content-Type": "application/json"}
    question = json.dumps({"query": "query Viewer { viewer { id } }", "variables": {}}).encode()
    try:
        request = urllib.request.Request(f"{server}/graphql", question, headers)
        with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as answer:
            is_known = json.load(answer)["data"]["viewer"] is not None
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise PipelineError(f"{server} does not answer as W&B does: {one_line(error)}") from None
        is_known = False
    except OSError as error:
        raise PipelineError(
            f"{server} is not there ({one_line(error)}); the files stay as they are"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{server} does not answer as W&B does: {one_line(error)}") from None
    if not is_known:
        raise PipelineError(f"{server} does not take the API key: run `wandb login --relogin`")
    return str(server)


def upload(files: Sequence[WandbFile]) -> None:
    """Send the files of one run, in order, and remember that they were sent.

    Raises:
        PipelineError: some of it was not taken; what was stays there, and a second call sends the rest.
    """
    folders = [file.folder for file in files]
    command = [sys.executable, "-m", "wandb", "sync", "--yes", "--include-online", *map(str, folders)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    left = [folder for folder in folders if not _is_uploaded(folder)]
    if done.returncode or left:
        said = done.stdout.strip().splitlines() or ["it said nothing"]
        raise PipelineError(f"{left[0] if left else folders[0]} was not uploaded: wandb sync: {said[-1]}")
    for folder in folders:
        (folder / NOT_UPLOADED).unlink(missing_ok=True)


def _read_file(folder: Path) -> WandbFile:
    steps = [int(row["item"].get("global_step", row["step"])) for row in rows_of(folder)]
    bounds = (min(steps), max(steps)) if steps else None
    return WandbFile(folder, len(steps), bounds, _is_uploaded(folder))


def _is_uploaded(folder: Path) -> bool:
    """By the mark of wandb itself."""
    return any(folder.glob("run-*.wandb.synced"))
