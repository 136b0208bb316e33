"""How a W&B run begins: online or offline, under which id, and what its offline files have already."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pipeline.command_lines import installed_program, shell_line
from pipeline.config.schema import WandbConfig
from pipeline.errors import one_line
from pipeline.optional_packages import require
from pipeline.redaction import redact
from pipeline.sinks.wandb_files import NOT_UPLOADED, rows_of

logger = logging.getLogger(__name__)

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
