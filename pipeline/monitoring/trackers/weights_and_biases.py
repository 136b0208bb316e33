"""Weights & Biases: one run, logged by one process, which can never stop or hold up training.

Each row is on the server exactly once, also after a kill: W&B loses rows that it had not sent yet, so a
resumed run is filled up from metrics.jsonl. W&B's own step never falls: a rollback puts it ahead of
`global_step`.
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
from pipeline.monitoring.events import ROLLBACK, RUN_FAILED, SAMPLE, Event, Histograms, Showable
from pipeline.monitoring.trackers.interface import GIT_DIFF, TrackerThread, best_direction, wait_for_trackers
from pipeline.monitoring.trackers.jsonl import is_rollback
from pipeline.redaction import redact

if TYPE_CHECKING:  # the trackers load no torch
    from pipeline.checkpoint.catalog import SavedCheckpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE = "failure"
SAMPLES = 100
"""Lines of the table of samples: each evaluation sends all of them."""
AXES = {"global_step": "global_step", "tokens_seen": "train/tokens_seen"}
RUN_ID_FILE = "wandb_run_id"
PROJECT = "deepspeed-pipeline"
INIT_TIMEOUT_SECONDS = 10.0
FINISH_TIMEOUT_SECONDS = 8.0
ROOM = 8 * 2**20
"""Free bytes that the disk with W&B's files needs for another row."""
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
MOST_HASHED_BYTES = 2**20


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
        start_step: 0 makes a new W&B run; otherwise the run continues under its id.
        run_config: Shown as the run's configuration.
        earlier: Reads rows and rollbacks up to `start_step`; rows that W&B lacks are sent again.

    Returns:
        The tracker; `None` if W&B is disabled or cannot be started at all.
    """

    def start() -> WandbTracker | None:
        # wandb posts its own telemetry to the same server. With a server that hangs, that kept the process
        # 20 s at its exit. The variable is wandb's own switch and is read when its service starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        remove_empty_variables()
        mode, reason = choose_mode(config)
        if mode == "disabled":
            return None
        (run_dir / "wandb").mkdir(exist_ok=True)
        if (lacking := explain_lack_of_space(run_dir / "wandb")) is not None:
            logger.warning("W&B is left out: %s; metrics.jsonl has every row", lacking)
            return None
        arguments = build_run_arguments(config, run_name, run_dir, run_config)
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
    """Hands rows to wandb's own process, which sends them; `write` does not wait for the network."""

    def __init__(self, run: Any, newest: int, axis: str = "global_step") -> None:
        """Define the axes of the curves.

        Args:
            run: Started run of wandb.
            newest: W&B's own step up to which it has the rows; it keeps them.
            axis: Metric that curves are drawn over.
        """
        self._run = run
        self._newest_there = newest
        self._is_on = True
        self._has_room = True
        self._artifacts: TrackerThread | None = None
        self._samples = list[list[Any]]()
        # The newest row, which is still to be sent, and its step.
        self._row = dict[str, Any]()
        self._step = 0
        self._offset = 0
        self._rewinds = 0
        self._summary = dict[str, dict[str, float]]()
        for name in {axis, "global_step", "rewinds"}:
            run.define_metric(name, hidden=True)
        run.define_metric("*", step_metric=axis)
        if FAILURE in run.summary.keys():  # noqa: SIM118 (it is no dict)
            del run.summary[FAILURE]  # of the start before

    def wandb_step(self, step: int) -> int:
        """Return W&B's own step, which has to rise, of a global step."""
        return step + self._offset

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Log one row with its global step. Rows of one step are one row of W&B, sent when the next comes."""
        for name, value in row.items():
            if (best := best_direction(name)) is not None:
                better = np.fmin if best == "min" else np.fmax  # ignores a NaN
                so_far = self._summary.get(name, {}).get(best, math.nan)
                self._summary[name] = {best: float(better(value, so_far)), "last": float(value)}
        at = self.wandb_step(step)
        if at <= self._newest_there:
            return
        if at != self._step:
            self._send()
        self._step = at
        self._row |= {**row, "global_step": step}
        if self._rewinds:
            self._row["rewinds"] = self._rewinds

    def repeat(self, record: Mapping[str, Any]) -> None:
        """Take a row or event that the record has from before."""
        if is_rollback(record):
            self._send()
            self._rewinds = int(record["rewinds"])
            self._offset = int(record["steps_given_up"]) + self._rewinds
        elif record.get("event") == SAMPLE:
            self._add_sample(record["step"], record)
        elif "event" not in record:
            self.write(record["step"], {key: value for key, value in record.items() if key != "step"})

    def _add_sample(self, step: int, fields: Mapping[str, Any]) -> None:
        """Add a line to the table, which is sent with the row of its step."""
        self._samples.append([step, self._rewinds, fields["prompt"], fields["text"]])
        if self.wandb_step(step) == self._step and self._row:
            self._row["samples"] = self._samples[-SAMPLES:]

    def tell(self, step: int, event: Event) -> None:
        """Send an alert; W&B holds back repeated ones. A failure is in the summary too, as `failure`."""
        if event.name == ROLLBACK:
            self._send()
            self._rewinds += 1
            # The steps after `step` come again, and so may the evaluation of `step`.
            self._offset += int(event.fields["from_step"]) - step + 1
        if event.name == SAMPLE:
            self._add_sample(step, event.fields)
        if self._is_on and event.level != "info":
            self._is_on = _never_crash("stopped", lambda: self._alert(step, event)) is not None

    def show(self, what: Showable) -> None:
        """Log new checkpoints, or add histograms to the row of their step."""
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

        A run that a signal stopped keeps its newest step back, since W&B takes nothing more for a step that
        it has: an evaluation of it may still come. The resumed run sends both.
        """
        is_stopped = exit_code > 128
        if not is_stopped:
            self._send()
        if self._artifacts is not None:
            self._artifacts.close(exit_code)
            wait_for_trackers([self._artifacts], FINISH_TIMEOUT_SECONDS)
        if self._is_on:
            self._is_on = False
            _never_crash("did not finish", lambda: self._finish(0 if is_stopped else exit_code))

    def _send(self) -> None:
        row, self._row = self._row, {}
        if not (row and self._is_on and self._has_room):
            return
        if (lacking := explain_lack_of_space(Path(self._run.dir))) is not None:
            self._has_room = False
            logger.warning(
                "W&B gets no more rows from step %d on: %s; metrics.jsonl has them all, and once there is "
                "room, the run fills W&B up when it goes on",
                self._step,
                lacking,
            )
            return
        self._is_on = _never_crash("stopped", lambda: self._log(row)) is not None

    def _log(self, row: dict[str, Any]) -> bool:
        import wandb

        if (samples := row.pop("samples", None)) is not None:
            table = wandb.Table(columns=["global_step", "rewinds", "prompt", "text"], data=samples)
            # Without this, `log` makes an artifact of the table too, and waits for the server.
            table.bind_to_run(self._run, "samples", self._step)
            row["samples"] = table
        histograms: Histograms | None = row.pop("histograms", None)
        if histograms is not None:
            edges = histograms.edges.tolist()
            groups = {"parameters": histograms.weights, "gradients": histograms.gradients}
            for group, counts_of in groups.items():
                for name, counts in counts_of.items():
                    row[f"{group}/{name}"] = wandb.Histogram(np_histogram=(counts.tolist(), edges))
        self._run.log(row, step=self._step, commit=True)
        return True

    def _alert(self, step: int, event: Event) -> bool:
        level = "ERROR" if event.level == "error" else "WARN"
        self._run.alert(title=event.name, text=f"step {step}: {event.line}", level=level, wait_duration=60)
        if event.name == RUN_FAILED:
            self._run.summary[FAILURE] = str(event.fields.get("traceback", event.message))
        return True

    def _finish(self, exit_code: int) -> None:
        self._run.summary.update(self._summary)
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            logger.warning(
                "W&B did not take the last rows within %.0f s; metrics.jsonl has them all; to upload them: "
                "%s",
                FINISH_TIMEOUT_SECONDS,
                upload_command("--include-online", Path(self._run.dir).parent),
            )


def upload_command(*words: str | Path) -> str:
    """Return the command of wandb's own client that uploads files."""
    return format_shell_line(find_installed_program("wandb") or "wandb", "sync", *words)


def _never_crash(what: str, action: Callable[[], T]) -> T | None:
    """Return the action's result; `None` after a failure of W&B, which one line says."""
    try:
        return action()
    # Everything: wandb talks to another process and over the network, and raises whatever those raise
    # (ConnectionResetError, pydantic's errors, assertions). None of it is a reason to lose a training run.
    except Exception as error:
        logger.warning(
            "W&B %s (%s: %s); training goes on without it", what, type(error).__name__, summarize_error(error)
        )
        if isinstance(error, ConnectionError):
            import wandb

            # Unhooks its dead process from the interpreter's exit, which would end in a traceback.
            with contextlib.suppress(ConnectionError):
                wandb.teardown()
        return None


def explain_lack_of_space(folder: Path) -> str | None:
    """Return why W&B gets no rows; `None` if its disk has room.

    W&B's process drops rows on a full disk without a word, also those of an online run.
    """
    free = shutil.disk_usage(folder).free
    if free >= ROOM:
        return None
    return f"{folder} has {free / 2**20:.1f} MiB left, and W&B loses rows on a full disk"


def remove_empty_variables() -> None:
    """Remove W&B's variables that are empty: W&B takes the empty text for a value, or refuses it."""
    for name, value in list(os.environ.items()):
        if name.startswith("WANDB_") and not value.strip():
            del os.environ[name]


def build_run_arguments(
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
    """Return `online`, `offline` or `disabled`, and the reason for offline."""
    require_package("wandb", f"wandb.mode: {config.mode}", "set wandb.mode=disabled")
    import wandb

    chosen: dict[str, Any] = {} if config.mode == "auto" else {"mode": config.mode}
    # With nothing chosen here, wandb's settings hold WANDB_MODE, or what `wandb offline` wrote down.
    settings = wandb.setup(settings=wandb.Settings(silent=True, **chosen)).settings
    mode = _MODES.get(settings.mode, settings.mode)
    if mode != "online":
        return mode, f"mode {settings.mode}"
    try:
        has_key = wandb.login(prompt=False, verify=False)  # looks for a key where wandb itself does
    except wandb.Error as error:
        return "offline", summarize_error(error)
    return ("online", "") if has_key else ("offline", f"no API key for {settings.base_url}")


def open_run(
    mode: str, reason: str, arguments: dict[str, Any], run_dir: Path, *, is_resume: bool
) -> tuple[Any, int]:
    """Start a wandb run: online if that is the mode and the server answers, offline otherwise.

    Returns:
        The run, and W&B's step up to which it has the rows; -1 if it has none.
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
            _set_aside(folder.glob("offline-run-*"))  # the server gets their rows from metrics.jsonl
            logger.info("W&B run: %s", run.url)
            return run, run.starting_step - 1
        except (wandb.Error, TimeoutError) as error:
            reason = summarize_error(error)
    # Offline files of one id are uploaded together, in the order of their starts. A run that the server may
    # know gets a new id: the number of its rows there is not known now, so the file begins with all of them.
    newest = _newest_offline_step(folder, id_file) if is_resume else None
    if newest is None:
        _set_aside(folder.glob("offline-run-*"))
    run_id = _run_id(id_file, is_resume=is_resume, reuse=newest is not None)
    run = _init("offline", folder, id=run_id, resume=resume, **shared)
    paths = sorted(folder.glob(f"offline-run-*-{run.id}"))
    logger.warning("W&B is offline (%s); to upload: %s", reason, upload_command(*paths))
    return run, -1 if newest is None else newest


def _init(mode: Literal["online", "offline"], folder: Path, **arguments: Any) -> Any:
    """Start a run; if its files are elsewhere (WANDB_DIR), `folder` gets a link to them."""
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
    """Return the newest step in the offline files of the run with the kept id; `None` if there is none.

    Files without a row, as a kill leaves them, are set aside: `wandb sync` would stop at them.
    """
    if not id_file.exists():
        return None
    for run in sorted(folder.glob(f"offline-run-*-{id_file.read_text().strip()}"), reverse=True):
        # wandb's own reader prints a record a line; each start's file has only its own rows.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
        command += map(str, run.glob("run-*.wandb"))
        steps = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reader:
            for line in reader.stdout or ():
                if b'"type":"history"' in line:
                    with contextlib.suppress(ValueError):  # the file may end in the middle of a record
                        steps.append(int(json.loads(line)["history"]["step"]["num"]))
        if steps:
            return max(steps)
        _set_aside([run])
    return None


def _run_id(path: Path, *, is_resume: bool, reuse: bool) -> str:
    """Return the id that the run directory keeps, or a new one, which it keeps from now on."""
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


def _set_aside(runs: Iterable[Path]) -> None:
    """Move offline files out of the way of `wandb sync`, which would double their rows."""
    for old in sorted(runs):
        for each in {old, old.resolve()}:  # a link, and what it leads to
            (each.parent / "superseded").mkdir(exist_ok=True)
            each.rename(each.parent / "superseded" / each.name)


class CheckpointArtifacts:
    """Logs each checkpoint as an artifact that refers to its files, on a thread of its own.

    The client asks the server before it takes an artifact. A checkpoint is logged once more if it becomes the
    newest or the best again: the server knows it by its files, and moves the alias.
    """

    def __init__(self, run: Any) -> None:
        """Take a started run of wandb, whose id names the artifacts."""
        self._run = run
        self._aliases: dict[SavedCheckpoint, set[str]] = {}

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Do nothing."""

    def tell(self, step: int, event: Event) -> None:
        """Do nothing."""

    def show(self, what: Showable) -> None:
        """Log the checkpoints that are new. Waits for the server."""
        if isinstance(what, Histograms):
            return
        known, self._aliases = self._aliases, {}
        for each in what.saved:
            aliases = {f"step-{each.step}"}
            aliases |= {"latest"} if each is what.saved[-1] else set()
            aliases |= {"best"} if each is what.best else set()
            self._aliases[each] = aliases
            if not aliases <= known.get(each, set()):
                try:
                    self._run.log_artifact(self._artifact(each), aliases=sorted(aliases))
                except (OSError, ValueError):  # wandb raises ValueError for a file that is not there
                    if each.folder.exists():  # else it was deleted before its turn came
                        raise

    def close(self, exit_code: int) -> None:
        """Do nothing."""

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
