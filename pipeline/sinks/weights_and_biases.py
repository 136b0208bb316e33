"""Weights & Biases: one run, logged by one process, which can never stop or hold up training.

Rows are exactly once on the server also after a kill: W&B itself loses what it had not sent yet, so a resumed
run is filled up from metrics.jsonl. Not here: the metrics themselves, and secrets (wandb finds its own key).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.schema import WandbConfig
from pipeline.errors import one_line
from pipeline.events import Event
from pipeline.sinks.scratch import temporary_files_in_scratch

logger = logging.getLogger(__name__)
T = TypeVar("T")

RUN_ID_FILE = "wandb_run_id"
INIT_TIMEOUT_SECONDS = 10.0
FINISH_TIMEOUT_SECONDS = 8.0
_MODES = {"dryrun": "offline", "run": "online", "shared": "online"}  # wandb's other words


def open_wandb(
    config: WandbConfig,
    *,
    run_name: str,
    run_dir: Path,
    start_step: int,
    run_config: dict[str, Any],
    earlier_rows: Callable[[], Iterable[Mapping[str, float]]],
) -> WandbSink | None:
    """Open the run, or open it offline where there is no key or no server, and say which in one line.

    Args:
        config: Mode, project, entity, group, tags.
        run_name: Group of the run where the recipe names none.
        run_dir: Directory of the run; its name is the run's name, and W&B's files go to `wandb/` in it.
        start_step: 0 makes a new W&B run; otherwise the run goes on under the id it had.
        run_config: Shown as the run's configuration.
        earlier_rows: Reads the rows up to `start_step`; those W&B has not got are sent again.

    Returns:
        The sink, or None where W&B is disabled or cannot be started at all.
    """

    @temporary_files_in_scratch()
    def start() -> WandbSink | None:
        # wandb posts its own telemetry to the same server. With a server that hangs, that kept the process
        # 20 s at its exit. The variable is wandb's own switch and is read when its service starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode, reason = _choose_mode(config)
        if mode == "disabled":
            return None
        arguments = {
            "project": config.project,
            "entity": config.entity,
            "group": config.group or run_name,
            "tags": config.tags or None,
            "name": run_dir.resolve().name,
            "dir": str(run_dir),
            "config": run_config,
        }
        run, newest = _open_run(mode, reason, arguments, run_dir, is_resume=start_step > 0)
        sink = WandbSink(run, newest)
        if newest < start_step:
            for row in earlier_rows():
                if row["step"] > newest:
                    sink.write(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
        if newest > start_step:
            logger.info("W&B has steps up to %d of this run already and keeps them", newest)
        return sink

    return _never_crash("cannot start", start)


class WandbSink:
    """Hands rows to wandb's own process, which sends them on; `write` does not wait for the network."""

    def __init__(self, run: Any, newest: int) -> None:
        """Args:
        run: Of wandb, started.
        newest: Step up to which W&B has the rows; it keeps them.
        """
        self._run = run
        self._newest_there = newest
        self._is_on = True
        self._step, self._row = 0, dict[str, float]()  # the newest, which is still to be sent

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Log one row at its global step. Rows of one step are one there, sent when the next comes."""
        if step <= self._newest_there:
            return
        if step != self._step:
            self._send()
        self._step = step
        self._row |= row

    def tell(self, step: int, event: Event) -> None:
        """Send an alert, by mail or chat as the user's settings there say; W&B holds back repeated ones."""
        if self._is_on and event.level != "info":
            self._is_on = _never_crash("stopped", lambda: self._alert(step, event)) is not None

    def close(self, exit_code: int) -> None:
        """Finish the run; waits for the server at most `FINISH_TIMEOUT_SECONDS`.

        Of a run that a signal stopped the newest step is kept back: W&B takes no more for a step that it has,
        and an evaluation of it may still come. When the run goes on it is sent with that.
        """
        is_stopped = exit_code > 128
        if not is_stopped:
            self._send()
        if self._is_on:
            self._is_on = False
            _never_crash("did not finish", lambda: self._finish(0 if is_stopped else exit_code))

    def _send(self) -> None:
        row, self._row = self._row, {}
        if row and self._is_on:
            self._is_on = _never_crash("stopped", lambda: self._log(row)) is not None

    def _log(self, row: dict[str, float]) -> bool:
        self._run.log(row, step=self._step, commit=True)
        return True

    def _alert(self, step: int, event: Event) -> bool:
        level = "ERROR" if event.level == "error" else "WARN"
        self._run.alert(title=event.name, text=f"step {step}: {event.line}", level=level, wait_duration=60)
        return True

    def _finish(self, exit_code: int) -> None:
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            logger.warning(
                "W&B did not take the last rows within %.0f s; metrics.jsonl has them all; to upload them: "
                "wandb sync --include-online %s",
                FINISH_TIMEOUT_SECONDS,
                shlex.quote(str(Path(self._run.dir).parent)),
            )


def _choose_mode(config: WandbConfig) -> tuple[str, str]:
    """`online`, `offline` or `disabled`, and why, where the answer is offline."""
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
        return "offline", one_line(error)
    return ("online", "") if has_key else ("offline", f"no API key for {settings.base_url}")


def _open_run(
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
        x_transaction_log_flush_interval=1.0,  # 15 by default, and a killed run loses what was not flushed
    )
    # create_new: a run of the user's own in this process stays what it is.
    shared = {"reinit": "create_new", "settings": settings, **arguments}
    folder, id_file = run_dir / "wandb", run_dir / RUN_ID_FILE
    if mode == "online":
        try:
            run = wandb.init(mode="online", id=_run_id(id_file, reuse=is_resume), resume="allow", **shared)
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
        _set_aside(folder.glob("offline-run-*"))
    run = wandb.init(mode="offline", id=_run_id(id_file, reuse=newest is not None), resume="allow", **shared)
    paths = sorted(folder.glob(f"offline-run-*-{run.id}"))
    logger.warning(
        "W&B is offline (%s); to upload: wandb sync %s", reason, " ".join(shlex.quote(str(p)) for p in paths)
    )
    return run, -1 if newest is None else newest


def _newest_offline_step(folder: Path, id_file: Path) -> int | None:
    """The newest step in the offline files of the run whose id is kept; None: there is none.

    Files without a row, as a kill leaves them, are set aside: `wandb sync` would stop at them.
    """
    if not id_file.exists():
        return None
    for run in sorted(folder.glob(f"offline-run-*-{id_file.read_text().strip()}"), reverse=True):
        step = None
        # wandb's own reader, a line a record; each session's file has its own rows alone.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
        command += [str(path) for path in run.glob("run-*.wandb")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reader:
            for line in reader.stdout or ():
                if b'"type":"history"' in line:
                    with contextlib.suppress(ValueError):  # of a file that ends in the middle of a record
                        step = json.loads(line)["history"]["step"]["num"]
        if step is not None:
            return int(step)
        _set_aside([run])
    return None


def _run_id(path: Path, *, reuse: bool) -> str:
    """The id kept in the run directory, or a new one, kept there from now on."""
    if reuse and path.exists():
        return path.read_text().strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id


def _set_aside(runs: Iterable[Path]) -> None:
    """Move offline files out of the way of `wandb sync`, which would double their rows."""
    for old in sorted(runs):
        (old.parent / "superseded").mkdir(exist_ok=True)
        old.rename(old.parent / "superseded" / old.name)


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
