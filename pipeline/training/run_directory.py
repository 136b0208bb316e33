"""Finds, creates and locks run directories `runs/<name>-<time>/`.

The same command finds its newest unfinished run by recipe, data and global batch size. The split does not
count. `run_dir` names a run directly, so such a run may resume with other steps, rates and schedules.
One process holds a run at a time. The git commit and diff at the start are recorded.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from filelock import FileLock, Timeout

from pipeline.checkpoint.catalog import find_newest_complete, list_published_folders, restore_replaced
from pipeline.config.loading import Tree, YamlLoader, read_yaml
from pipeline.config.schema import RunConfig
from pipeline.config.settings import format_recipe_yaml
from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError, ConfigError
from pipeline.files import LOCK_FILE, MAX_CONFIGURATION_BYTES, read_regular_file, replace_file
from pipeline.monitoring.trackers.interface import GIT_DIFF
from pipeline.monitoring.trackers.jsonl import METRICS_FILE
from pipeline.redaction import REDACTED, redact, redact_text

MOST_CHARACTERS = 2**20
SECONDS = 20.0  # on a slow file system, a run starts without the output of git


def read_git_commit() -> str | None:
    """Return the git commit of the working directory; `None` outside a repository or without git."""
    return (_git("rev-parse", "HEAD") or "").strip() or None


def read_git_diff() -> str | None:
    """Return the diff of tracked files to that commit, without secrets, at most 2**20 characters.

    Returns:
        `None` if nothing differs, outside a repository, or without git.
    """
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if not diff:
        return None
    said = redact_text(diff[:MOST_CHARACTERS])
    return said if len(diff) <= MOST_CHARACTERS else f"{said}\n... cut: it has {len(diff):,} characters\n"


def _git(*words: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, *words]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return answer.stdout if answer.returncode == 0 else None


# Sections that do not change what is trained. A run resumes even if they differ. The section `batch` is
# compared by the resulting global batch size.
BESIDE_THE_POINT = {
    *("checkpoint", "wandb", "sample", "runs_dir", "run_dir", "callbacks"),
    *("engine", "batch", "loader", "distributed", "watch", "notify", "profile"),
}
READERS = ("tensorboard", "sinks", "console")  # keys of `log` that only show the same rows
DECISIVE = {"data": "split.data", "global_batch_size": "batch.global_batch_size"}  # key in split.json -> name
FINGERPRINT = DECISIVE["data"]
# Sections that may change when `run_dir` names the run.
MAY_CHANGE = ("max_steps", "max_epochs", "early_stopping", "optimizer", "schedule")
MAY_NOT_CHANGE = ("optimizer.kind",)  # the checkpoint holds this optimizer's state
# Paths of an adapter's base may change: digests of its weights, the data and the tokenizer are compared.
PLACES = ("model.pretrained", "model.weights", "data.tokenizer.pretrained")


def _select_identity(recipe: Tree, split: Tree) -> Tree:
    kept = {key: value for key, value in recipe.items() if key not in BESIDE_THE_POINT}
    if isinstance(kept.get("log"), dict):
        kept["log"] = kept["log"] | dict.fromkeys((*READERS, "price_per_device_hour"))
    if isinstance(kept.get("model"), dict):
        kept["model"] = kept["model"] | {"attention": None, "fp8": None}  # same model, computed otherwise
    if isinstance(kept.get("objective"), dict):
        kept["objective"] = kept["objective"] | {"reduction": kept["objective"].get("reduction") or "sum"}
    return kept | {name: split.get(key) for key, name in DECISIVE.items()}


class RunDifference(NamedTuple):
    """Difference of two runs in one key, dotted as on the command line."""

    key: str
    then: Any
    now: Any
    is_place: bool = False
    """Whether the key is a path of an adapter's base."""

    def __str__(self) -> str:
        if self.key == FINGERPRINT:
            return "its data was different"
        return f"{self.key} was {self.then}, is {self.now}"

    @property
    def override(self) -> str:
        """Command-line argument that restores the value of the earlier run."""
        return shlex.quote(f"{self.key}={json.dumps(self.then, ensure_ascii=False)}")


def find_differences(path: Path, config: RunConfig, split: Tree) -> list[RunDifference]:
    """Return the keys in which the run in `path` differs from these settings.

    Raises:
        CheckpointError: The recipe or split.json of the run cannot be read.
    """
    try:
        then = _select_identity(
            _with_defaults(read_yaml(path / "recipe.yaml").tree),
            json.loads(read_regular_file(path / "split.json", MAX_CONFIGURATION_BYTES)),
        )
    except (ConfigError, OSError, ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"recipe.yaml or split.json in {path} cannot be read") from None
    now = _select_identity(
        yaml.load(format_recipe_yaml(config), Loader=YamlLoader), json.loads(json.dumps(split))
    )
    found = [
        difference._replace(is_place=config.adapter is not None and difference.key in PLACES)
        for difference in _compare(then, now)
    ]
    if any(difference.key.startswith("data.") and not difference.is_place for difference in found):
        # A changed key of `data` already explains the changed fingerprint.
        return [difference for difference in found if difference.key != FINGERPRINT]
    return found


def _with_defaults(recipe: Tree) -> Tree:
    """Return the recipe with defaults for keys that did not exist when it was written."""
    try:
        filled = yaml.load(format_recipe_yaml(RunConfig.model_validate(recipe)), Loader=YamlLoader)
    except ValueError:  # a value that is no longer valid is compared as written
        return recipe
    return filled if isinstance(filled, dict) else recipe


def _compare(then: Any, now: Any, prefix: str = "") -> Iterator[RunDifference]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _compare(then.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif not _is_same(then, now):
        yield RunDifference(prefix, then, now)


def _is_same(then: Any, now: Any) -> bool:
    """Return whether two values are equal. A redacted secret in `then` equals any value."""
    if then == now:
        return True
    written = re.escape(json.dumps(then, default=str)).replace(re.escape(REDACTED), ".*")
    return ".*" in written and re.fullmatch(written, json.dumps(now, default=str), re.DOTALL) is not None


def may_change(difference: RunDifference) -> bool:
    """Return whether a run named by `run_dir` may resume with the new value."""
    is_free = difference.key.partition(".")[0] in MAY_CHANGE and difference.key not in MAY_NOT_CHANGE
    return is_free or difference.is_place


log = logging.getLogger(__name__)

FEW = 3  # with more differences, a run is another experiment and not worth a hint
RESTART_SECONDS = 120.0
ENVIRONMENT = "environment.json"


def open_run_directory(config: RunConfig, split: Tree) -> tuple[Path, FileLock]:
    """Choose or create the run's directory by `checkpoint.resume`, and lock it. For rank 0 only.

    Args:
        config: Recipe of the run.
        split: Content of split.json. The data's fingerprint and the global batch size identify the run;
            DeepSpeed configuration and world size may change on a resume.

    Raises:
        ConfigError: The directory cannot be written, or `run_dir` holds a run and `resume` is `never`.
        CheckpointError: `resume` is `required` and there is nothing to resume, or another process holds the
            directory.
    """
    try:
        return _open(config, split)
    except OSError as error:
        path = error.filename or config.run_dir or config.runs_dir
        raise ConfigError(f"the run directory {path} cannot be written: {error.strerror or error}") from None


class OpenedDirectory(NamedTuple):
    """Directory of a run, on rank 0 with its lock."""

    path: Path
    lock: FileLock | None = None
    made: tuple[Path, ...] = ()
    """Folders that were created, innermost first; empty if `path` existed before."""


def agree_on_run_directory(config: RunConfig, split: Tree, job: Job) -> OpenedDirectory:
    """Open the run directory on rank 0 and return it on all ranks, or raise rank 0's error on all ranks.

    See open_run_directory. Only rank 0 holds the lock.
    """
    opened: list[OpenedDirectory] = []

    def open_and_keep() -> Path:
        runs = Path(config.runs_dir)
        there = {Path(config.run_dir)} if config.run_dir else {*runs.glob(f"{config.name}-*")}
        there = {path for path in there if path.exists()}
        missing = _list_missing(Path(config.run_dir).parent if config.run_dir else runs)
        path, lock = open_run_directory(config, split)
        opened.append(OpenedDirectory(path, lock, () if path in there else (path, *missing)))
        return path

    path = job.run_on_main_rank(open_and_keep)
    return opened[0] if opened else OpenedDirectory(path)


def _list_missing(folder: Path) -> list[Path]:
    """Return this folder and its parents that do not exist."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_created_folders(made: Sequence[Path]) -> None:
    """Remove the directory of a run that was refused before its first step.

    Args:
        made: Created folders, see `OpenedDirectory`.
    """
    for path in made[:1]:
        # WANDB_DIR may have its files elsewhere, with a link to them here.
        for link in filter(Path.is_symlink, path.glob("wandb/*")):
            shutil.rmtree(link.resolve(), ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
    for path in made[1:]:
        with suppress(OSError):  # another process may have written into it by now
            path.rmdir()


def _open(config: RunConfig, split: Tree) -> tuple[Path, FileLock]:
    resume = config.checkpoint.resume
    found: Path | None
    if config.run_dir is not None:
        found = Path(config.run_dir)
        if resume == "never" and (found / METRICS_FILE).exists():
            raise ConfigError(
                f"run_dir {found} already holds a run; choose another, or checkpoint.resume=auto"
            )
    else:
        found = None if resume == "never" else _newest_unfinished(config, split)
    lock = _lock(found, _get_lock_timeout()) if found is not None else None
    if found is not None and lock is not None:
        _prepare_resume(found, config, split)
        return found, lock
    if config.run_dir is not None:
        raise CheckpointError(f"run_dir {found} is in use by another process")
    if resume == "required":
        busy = f"{found} is in use by another process" if found else "there is no unfinished run"
        raise CheckpointError(
            f"checkpoint.resume is required, but in {config.runs_dir} {busy} of this recipe "
            f"named {config.name!r}"
        )
    if found is not None and _get_lock_timeout():
        raise CheckpointError(
            f"{found} is still in use by another process after {RESTART_SECONDS:.0f} s; end that process, or "
            "start a new run with checkpoint.resume=never"
        )
    if found is not None:
        log.info("%s is being trained by another process; this is a new run", found)
    path, lock = _create_directory(config)
    _write_description(path, config, split)
    return path, lock


def _prepare_resume(path: Path, config: RunConfig, split: Tree) -> None:
    restore_replaced(path / "checkpoints")
    checkpoint, passed_over = find_newest_complete(path / "checkpoints")
    if config.checkpoint.resume == "required" and checkpoint is None:
        why = f": {passed_over[0]}" if passed_over else ""
        raise CheckpointError(f"checkpoint.resume is required, but {path} holds no complete checkpoint{why}")
    if checkpoint is not None:
        differences = find_differences(path, config, split)
        step = checkpoint.global_step
        if config.max_steps is not None and step > config.max_steps:  # before anything of the run is touched
            raise ConfigError(
                f"{path} is at step {step} already, and max_steps is {config.max_steps}; give a higher "
                "max_steps, or another run_dir"
            )
        if not differences and (path / "summary.json").exists():
            log.warning("%s is already finished; to continue it, give a higher max_steps", path)
        _record_changes(path, checkpoint.folder.name, differences)
    elif not list_published_folders(path / "checkpoints") and (path / METRICS_FILE).exists():
        log.info("%s holds no checkpoint: it starts again", path)
    (path / "summary.json").unlink(missing_ok=True)  # unfinished again
    _write_description(path, config, split)


def _create_directory(config: RunConfig) -> tuple[Path, FileLock]:
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path(config.runs_dir) / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists() and (lock := _lock(path)) is not None:
            return path, lock
    raise AssertionError("unreachable")


def _get_lock_timeout() -> float:
    """Return the seconds to wait for the lock: a restarted job's predecessor may still be ending."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    return RESTART_SECONDS if restarts or "SLURM_RESTART_COUNT" in os.environ else 0.0


def _lock(path: Path, patience: float = 0.0) -> FileLock | None:
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FILE)
        lock.acquire(timeout=patience)
        return lock
    except Timeout:
        return None


def _newest_unfinished(config: RunConfig, split: Tree) -> Path | None:
    others: list[tuple[Path, list[RunDifference]]] = []
    done: list[Path] = []
    for path in sorted(Path(config.runs_dir).glob(f"{config.name}-*"), reverse=True):
        if not (path / "recipe.yaml").exists():
            continue
        finished = (path / "summary.json").exists()
        try:
            differences = find_differences(path, config, split)
        except CheckpointError as error:
            log.info("%s", error)
            continue
        if not differences and not finished:
            return path
        done += [path] * (not differences)
        if differences and all(not finished or may_change(difference) for difference in differences):
            others.append((path, differences))
    if done:
        log.warning(
            "this is a new run; %s is finished; to continue that one: run_dir=%s and a higher max_steps or "
            "max_epochs",
            done[0],
            shlex.quote(str(done[0])),
        )
    else:
        _log_nearest_run(others)
    return None


def _log_nearest_run(others: list[tuple[Path, list[RunDifference]]]) -> None:
    """Log one line about the unfinished run with the fewest differences, and how to resume it."""
    for path, differences in sorted(others, key=lambda other: len(other[1])):
        steps = list_published_folders(path / "checkpoints")
        if len(differences) > FEW or not steps:
            continue
        why = "; ".join(map(str, differences))
        if all(map(may_change, differences)):
            cure = f"run_dir={shlex.quote(str(path))}"
        elif all(difference.key != FINGERPRINT for difference in differences):
            cure = " ".join(difference.override for difference in differences)
        else:
            cure = "restore the files it was trained on"
        log.warning(
            "this is a new run; %s, at step %d, differs: %s; to resume that one: %s",
            path,
            max(steps),
            why,
            cure,
        )
        return


def _record_changes(path: Path, checkpoint: str, differences: list[RunDifference]) -> None:
    """Log what changes from here on, and keep a copy of the recipe so far.

    Raises:
        CheckpointError: A key differs that may not change, so `run_dir` holds another run.
    """
    for difference in differences:
        if not may_change(difference):
            raise CheckpointError(
                f"run_dir {path} holds a checkpoint of another run: {difference}; use that value, or another "
                "run_dir"
            )
    if differences:
        log.warning("from %s on: %s", checkpoint, "; ".join(map(str, differences)))
        shutil.copy(path / "recipe.yaml", path / f"recipe-until-{checkpoint}.yaml")


def _write_description(path: Path, config: RunConfig, split: Tree) -> None:
    files = {
        "recipe.yaml": format_recipe_yaml(config),
        ENVIRONMENT: json.dumps(_describe_environment(), indent=2),
    }
    if (diff := read_git_diff()) is not None:
        files[GIT_DIFF] = diff
    else:
        (path / GIT_DIFF).unlink(missing_ok=True)  # the diff of an earlier start
    for name, text in files.items():
        replace_file(path / name, text)
    write_split(path, split)


def write_split(path: Path, split: Tree) -> None:
    """Write split.json and ds_config.json, without secrets. For rank 0."""
    split = redact(split)
    replace_file(path / "split.json", json.dumps(split, indent=2))
    if split["deepspeed"] is not None:
        replace_file(path / "ds_config.json", json.dumps(split["deepspeed"], indent=2))


def _describe_environment() -> Tree:
    """Return versions, machine and commit, which are needed to repeat the run.

    Environment variables are not among them, so no secrets are.
    """
    versions: dict[str, str | None] = {}
    for name in ("torch", "deepspeed", "transformers", "wandb", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else ["cpu"],
        "cpu_cores": os.cpu_count(),
        "host": platform.node(),
        "git_commit": read_git_commit(),
    }
