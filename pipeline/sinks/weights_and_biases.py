"""Weights & Biases: one run, logged by one process, which can never stop or hold up training.

Rows are exactly once on the server also after a kill: W&B itself loses what it had not sent yet, so a resumed
run is filled up from metrics.jsonl. Not here: the metrics themselves, and secrets (wandb finds its own key).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.schema import WandbConfig
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
    earlier_rows: Sequence[Mapping[str, float]],
) -> WandbSink | None:
    """Open the run, or open it offline where there is no key or no server, and say which in one line.

    Args:
        config: Mode, project, entity, group, tags.
        run_name: Group of the run where the recipe names none.
        run_dir: Directory of the run; its name is the run's name, and W&B's files go to `wandb/` in it.
        start_step: 0 makes a new W&B run; otherwise an online run goes on under the id it had.
        run_config: Shown as the run's configuration.
        earlier_rows: Rows up to `start_step`; those W&B has not got are sent again.

    Returns:
        The sink, or None where W&B is disabled or cannot be started at all.
    """

    def start() -> WandbSink | None:
        # wandb posts its own telemetry to the same server. With a server that hangs, that kept the process
        # 20 s at its exit. The variable is wandb's own switch and is read when its service starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode, reason = _choose_mode(config)
        if mode == "disabled":
            return None
        _set_aside_offline_runs(run_dir / "wandb")
        arguments = {
            "project": config.project,
            "entity": config.entity,
            "group": config.group or run_name,
            "tags": config.tags or None,
            "name": run_dir.resolve().name,
            "dir": str(run_dir),
            "config": run_config,
        }
        run = _open_run(mode, reason, arguments, id_file=run_dir / RUN_ID_FILE, is_resume=start_step > 0)
        sink = WandbSink(run)
        for row in earlier_rows:
            if row["step"] >= run.starting_step:
                sink.write(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
        if run.starting_step > start_step + 1:
            logger.info("W&B has steps up to %d of this run already and keeps them", run.starting_step - 1)
        return sink

    def start_in_scratch() -> WandbSink | None:
        with temporary_files_in_scratch():
            return start()

    return _never_crash("cannot start", start_in_scratch)


class WandbSink:
    """Hands rows to wandb's own process, which sends them on; `write` does not wait for the network."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._is_on = True
        self._newest: list[tuple[int, Mapping[str, float]]] = []  # rows of the newest step

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Log one row at its global step. Rows of one step are one there, sent when the next comes."""
        if self._newest and self._newest[-1][0] != step:
            self._send()
        self._newest.append((step, dict(row)))

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
        rows, self._newest = self._newest, []
        if self._is_on:
            self._is_on = _never_crash("stopped", lambda: self._log(rows)) is not None

    def _log(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> bool:
        for number, (step, row) in enumerate(rows, 1):
            self._run.log(dict(row), step=step, commit=number == len(rows))
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
        return "offline", _one_line(error)
    return ("online", "") if has_key else ("offline", f"no API key for {settings.base_url}")


def _open_run(mode: str, reason: str, arguments: dict[str, Any], *, id_file: Path, is_resume: bool) -> Any:
    """A started wandb run: online if that is the mode and the server answers, offline otherwise."""
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
    if mode == "online":
        try:
            run = wandb.init(mode="online", id=_run_id(id_file, reuse=is_resume), resume="allow", **shared)
            logger.info("W&B run: %s", run.url)
            return run
        except (wandb.Error, TimeoutError) as error:
            reason = _one_line(error)
    # Always a new id: the server may hold rows under the old one, and `wandb sync` would number the same
    # rows on from there. The file is whole by itself, since it begins with every earlier row.
    run = wandb.init(mode="offline", id=_run_id(id_file, reuse=False), **shared)
    logger.warning(
        "W&B is offline (%s); to upload: wandb sync %s", reason, shlex.quote(str(Path(run.dir).parent))
    )
    return run


def _run_id(path: Path, *, reuse: bool) -> str:
    """The id kept in the run directory, or a new one, kept there from now on."""
    if reuse and path.exists():
        return path.read_text().strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id


def _set_aside_offline_runs(folder: Path) -> None:
    """Move earlier offline files out of the way of `wandb sync`, which would double their rows."""
    for old in sorted(folder.glob("offline-run-*")):
        (folder / "superseded").mkdir(exist_ok=True)
        old.rename(folder / "superseded" / old.name)


def _never_crash(what: str, action: Callable[[], T]) -> T | None:
    """The action's result, or None, said in one line, where W&B failed: the record is metrics.jsonl."""
    try:
        return action()
    # Everything: wandb talks to another process and over the network, and raises whatever those raise
    # (ConnectionResetError, pydantic's errors, assertions). None of it is a reason to lose a training run.
    except Exception as error:
        logger.warning(
            "W&B %s (%s: %s); training goes on without it", what, type(error).__name__, _one_line(error)
        )
        if isinstance(error, ConnectionError):
            _forget_service()
        return None


def _forget_service() -> None:
    """Unhook wandb's dead process from the interpreter's exit, which would end in a traceback."""
    import wandb

    with contextlib.suppress(ConnectionError):
        wandb.teardown()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:200] or type(error).__name__
