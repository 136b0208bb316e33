"""`runs/<name>-<time>/`: one directory a run, found again by the same command, held by one process."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from pipeline.checkpoint.folders import newest_good
from pipeline.config.loading import Tree, read_yaml
from pipeline.config.schema import RunConfig
from pipeline.config.settings import recipe_yaml
from pipeline.config.yaml_loader import Loader
from pipeline.errors import CheckpointError, ConfigError
from pipeline.foreign import CONFIGURATION, read_plain

log = logging.getLogger(__name__)

# Sections that do not change what is trained: a run goes on though they differ. What they say of the batch is
# compared by what it comes to.
BESIDE_THE_POINT = {
    *("checkpoint", "wandb", "sample", "runs_dir", "run_dir"),
    *("engine", "batch", "loader", "distributed"),
}
DECISIVE = ("data", "global_batch_size")  # of what stands in split.json
RESTART_SECONDS = 120.0


@dataclass(frozen=True)
class RunDirectory:
    """Where a run lives, and the checkpoint it goes on from (None: from the start)."""

    path: Path
    checkpoint: Path | None


def open_run_directory(config: RunConfig, split: Tree) -> tuple[RunDirectory, FileLock]:
    """Chooses or makes the run's directory by `checkpoint.resume`, and locks it. For rank 0 alone.

    Args:
        config: The recipe.
        split: What else is known of a run: the data's fingerprint and the global batch size, which make it
            this run; DeepSpeed configuration and world size, which may change when it goes on.

    Raises:
        ConfigError: it cannot be written, or `run_dir` holds a run and `resume` is `never`.
        CheckpointError: `required` and nothing to go on with, or another process has it.
    """
    resume = config.checkpoint.resume
    found: Path | None
    if config.run_dir is not None:
        found = Path(config.run_dir)
        if resume == "never" and (found / "metrics.jsonl").exists():
            raise ConfigError(
                f"run_dir {found} already holds a run; choose another, or checkpoint.resume=auto"
            )
    else:
        found = None if resume == "never" else _newest_unfinished(config, split)
    lock = _lock(found, _patience()) if found is not None else None
    if found is not None and lock is not None:
        return _go_on(found, config, split), lock
    if config.run_dir is not None:
        raise CheckpointError(f"run_dir {found} is in use by another process")
    if resume == "required":
        busy = f"{found} is in use by another process" if found else "there is no unfinished run"
        raise CheckpointError(
            f"checkpoint.resume is required, but in {config.runs_dir} {busy} of this recipe "
            f"named {config.name!r}"
        )
    if found is not None and _patience():
        raise CheckpointError(
            f"{found} is still in use by another process after {RESTART_SECONDS:.0f} s; end that process, or "
            "start a new run with checkpoint.resume=never"
        )
    if found is not None:
        log.info("%s is being trained by another process; this is a new run", found)
    path, lock = _fresh(config)
    _describe(path, config, split)
    return RunDirectory(path, None), lock


def _go_on(path: Path, config: RunConfig, split: Tree) -> RunDirectory:
    checkpoint, passed_over = newest_good(path / "checkpoints")
    for line in passed_over:
        log.warning("%s", line)
    if config.checkpoint.resume == "required" and checkpoint is None:
        raise CheckpointError(f"checkpoint.resume is required, but {path} holds no complete checkpoint")
    if checkpoint is not None:
        _refuse_other_run(path, config, split)
        log.info("going on with %s from %s", path, checkpoint.name)
    (path / "summary.json").unlink(missing_ok=True)  # unfinished again
    _describe(path, config, split)
    return RunDirectory(path, checkpoint)


def _fresh(config: RunConfig) -> tuple[Path, FileLock]:
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path(config.runs_dir) / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists() and (lock := _lock(path)) is not None:
            return path, lock
    raise AssertionError("unreachable")


def _patience() -> float:
    """Seconds to wait for the lock: where a launcher starts jobs again, the last one may still be ending."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    return RESTART_SECONDS if restarts or "SLURM_RESTART_COUNT" in os.environ else 0.0


def _lock(path: Path, patience: float = 0.0) -> FileLock | None:
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock")
        lock.acquire(timeout=patience)
        return lock
    except Timeout:
        return None
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be written: {error.strerror or error}") from None


def _identity(recipe: Tree, split: Tree) -> Tree:
    kept = {key: value for key, value in recipe.items() if key not in BESIDE_THE_POINT}
    return kept | {"split": {key: split.get(key) for key in DECISIVE}}


def _difference(path: Path, config: RunConfig, split: Tree, allowed: tuple[str, ...] = ()) -> str | None:
    """The first key, but the allowed ones, in which the run in `path` is another one; None: the same."""
    try:
        then = _identity(
            read_yaml(path / "recipe.yaml")[0], json.loads(read_plain(path / "split.json", CONFIGURATION))
        )
    except (ConfigError, OSError, ValueError, AttributeError, RecursionError):
        return "its recipe.yaml or split.json cannot be read"
    now = _identity(yaml.load(recipe_yaml(config), Loader=Loader), json.loads(json.dumps(split)))
    for key in allowed:
        then.pop(key, None)
        now.pop(key, None)
    return next(_differences(then, now), None)


def _differences(then: Any, now: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _differences(then.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif then != now:
        yield f"{prefix} was {then}, is {now}"


def _newest_unfinished(config: RunConfig, split: Tree) -> Path | None:
    for path in sorted(Path(config.runs_dir).glob(f"{config.name}-*"), reverse=True):
        if (path / "summary.json").exists() or not (path / "recipe.yaml").exists():
            continue
        difference = _difference(path, config, split)
        if difference is None:
            return path
        log.info("%s is unfinished but another run: %s", path, difference)
    return None


def _refuse_other_run(path: Path, config: RunConfig, split: Tree) -> None:
    # More steps for the same run are welcome; anything else would not be the run it claims to be.
    difference = _difference(path, config, split, allowed=("max_steps", "max_epochs"))
    if difference is not None:
        raise CheckpointError(
            f"run_dir {path} holds a checkpoint of another run: {difference}; use that value, or another "
            "run_dir"
        )


def _describe(path: Path, config: RunConfig, split: Tree) -> None:
    files = {
        "recipe.yaml": recipe_yaml(config),
        "split.json": json.dumps(split, indent=2),
        "environment.json": json.dumps(environment(), indent=2),
    }
    if split["deepspeed"] is not None:
        files["ds_config.json"] = json.dumps(split["deepspeed"], indent=2)
    try:
        for name, text in files.items():
            (path / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be written: {error.strerror or error}") from None


def environment() -> Tree:
    """Versions, machine and commit: what is needed to run the same again. No variables, so no secrets."""
    import torch

    names = ("torch", "deepspeed", "transformers", "wandb", "numpy")
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in names},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else ["cpu"],
        "cpu_cores": os.cpu_count(),
        "host": platform.node(),
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """The commit of the folder the run is started from; None outside a repository or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    answer = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
