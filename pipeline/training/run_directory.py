"""Finds, creates and locks run directories `runs/<name>-<time>/`.

The same command finds its newest unfinished run by recipe, data and global batch size; the split may differ.
`run_dir` names a run directly, so such a run may also resume with other steps, learning rates and schedules.
Only one process can use a run at a time. The git commit and diff at the start are recorded.
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

log = logging.getLogger(__name__)

MAX_DIFF_CHARACTERS = 2**20
GIT_SECONDS = 20.0  # on a slow file system, a run starts without the output of git


def read_git_commit() -> str | None:
    """Return the git commit of the working directory; `None` outside a repository or without git."""
    return (_run_git("rev-parse", "HEAD") or "").strip() or None


def read_git_diff() -> str | None:
    """Return the diff of tracked files to the current commit, without secrets and cut if it is long.

    Returns:
        `None` if nothing differs, outside a repository, or without git.
    """
    diff = _run_git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if not diff:
        return None
    text = redact_text(diff[:MAX_DIFF_CHARACTERS])
    if len(diff) <= MAX_DIFF_CHARACTERS:
        return text
    return f"{text}\n... cut; the whole diff has {len(diff):,} characters\n"


def _run_git(*arguments: str) -> str | None:
    """Return the output of a git command; `None` if git is missing, fails or takes too long."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        completed = subprocess.run(
            [git, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return completed.stdout if completed.returncode == 0 else None


# Keys of the recipe that do not change what is trained. A run resumes even if they differ. The section
# `batch` is compared by the resulting global batch size.
IGNORED_KEYS = {
    *("checkpoint", "wandb", "sample", "runs_dir", "run_dir", "callbacks"),
    *("engine", "batch", "loader", "distributed", "watch", "notify", "profile"),
}
# Keys of `log` that change no training metric.
IGNORED_LOG_KEYS = ("tensorboard", "trackers", "console", "price_per_device_hour")
# Keys of `eval` that change neither the training nor the metrics of held-out data.
IGNORED_EVAL_KEYS = ("tasks", "tasks_every", "tasks_limit", "tasks_chat_template")
# Keys of split.json that are compared, with their names among the recipe's keys.
COMPARED_SPLIT_KEYS = {"data": "split.data", "global_batch_size": "batch.global_batch_size"}
FINGERPRINT_KEY = COMPARED_SPLIT_KEYS["data"]
# Keys that may change when `run_dir` names the run.
MAY_CHANGE = ("max_steps", "max_epochs", "early_stopping", "optimizer", "schedule")
MAY_NOT_CHANGE = ("optimizer.kind",)  # the checkpoint has this optimizer's state
# Paths of an adapter's base. They may change, because digests of the base's weights, of the data and of the
# tokenizer are compared.
BASE_PATHS = ("model.pretrained", "model.weights", "data.tokenizer.pretrained")


def _select_identity(recipe: Tree, split: Tree) -> Tree:
    """Return the values that identify a run: with equal values, two runs train the same.

    Args:
        recipe: Recipe of the run, with all defaults.
        split: Content of split.json.
    """
    identity = {key: value for key, value in recipe.items() if key not in IGNORED_KEYS}
    if isinstance(identity.get("log"), dict):
        identity["log"] = identity["log"] | dict.fromkeys(IGNORED_LOG_KEYS)
    if isinstance(identity.get("eval"), dict):
        identity["eval"] = identity["eval"] | dict.fromkeys(IGNORED_EVAL_KEYS)
    if isinstance(identity.get("model"), dict):
        # These keys choose how the same model is computed.
        identity["model"] = identity["model"] | {"attention": None, "fp8": None}
    if isinstance(identity.get("objective"), dict):
        reduction = identity["objective"].get("reduction") or "sum"
        identity["objective"] = identity["objective"] | {"reduction": reduction}
    return identity | {name: split.get(key) for key, name in COMPARED_SPLIT_KEYS.items()}


class RunDifference(NamedTuple):
    """Difference of two runs in one key."""

    key: str
    """Key of the recipe, dotted as on the command line, or FINGERPRINT_KEY."""
    then: Any
    """Value of the earlier run."""
    now: Any
    """Value of these settings."""
    is_base_path: bool = False
    """Whether the key is a path of an adapter's base."""

    def __str__(self) -> str:
        if self.key == FINGERPRINT_KEY:
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
        raise CheckpointError(
            f"recipe.yaml or split.json in {path} cannot be read, so this run cannot be resumed; restore the "
            "file, or start another run"
        ) from None
    now = _select_identity(
        yaml.load(format_recipe_yaml(config), Loader=YamlLoader), json.loads(json.dumps(split))
    )
    differences = [
        difference._replace(is_base_path=config.adapter is not None and difference.key in BASE_PATHS)
        for difference in _compare(then, now)
    ]
    if any(difference.key.startswith("data.") and not difference.is_base_path for difference in differences):
        # A changed key of `data` already explains the changed fingerprint.
        return [difference for difference in differences if difference.key != FINGERPRINT_KEY]
    return differences


def _with_defaults(recipe: Tree) -> Tree:
    """Return the recipe with defaults for keys that did not exist when it was written.

    A recipe that is no longer valid is returned as it is.
    """
    try:
        completed = yaml.load(format_recipe_yaml(RunConfig.model_validate(recipe)), Loader=YamlLoader)
    except ValueError:
        return recipe
    return completed if isinstance(completed, dict) else recipe


def _compare(then: Any, now: Any, prefix: str = "") -> Iterator[RunDifference]:
    """Yield the differences of two trees.

    Args:
        then: Value of the earlier run.
        now: Value of these settings.
        prefix: Dotted key of the two values; empty at the top.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _compare(then.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif not _is_same(then, now):
        yield RunDifference(prefix, then, now)


def _is_same(then: Any, now: Any) -> bool:
    """Return whether two values are equal. A redacted secret in `then` equals any value."""
    if then == now:
        return True
    pattern = re.escape(json.dumps(then, default=str)).replace(re.escape(REDACTED), ".*")
    return ".*" in pattern and re.fullmatch(pattern, json.dumps(now, default=str), re.DOTALL) is not None


def may_change(difference: RunDifference) -> bool:
    """Return whether a run named by `run_dir` may resume with the new value."""
    is_free = difference.key.partition(".")[0] in MAY_CHANGE and difference.key not in MAY_NOT_CHANGE
    return is_free or difference.is_base_path


MAX_HINT_DIFFERENCES = 3  # with more differences, a run is another experiment and not worth a hint
RESTART_SECONDS = 120.0
"""Seconds for which a restarted job waits for the end of its predecessor."""
EARLIER_RECIPE = "recipe-before-resume.yaml"
"""Name of the replaced recipe's copy until the run has chosen the checkpoint to resume from."""
ENVIRONMENT = "environment.json"
"""Name of the file with versions, machine and commit."""


def open_run_directory(config: RunConfig, split: Tree) -> tuple[Path, FileLock]:
    """Choose or create the run's directory by `checkpoint.resume`, and lock it. For rank 0 only.

    Args:
        config: Recipe of the run.
        split: Content of split.json. The data's fingerprint and the global batch size identify the run;
            DeepSpeed configuration and world size may change on a resume.

    Raises:
        ConfigError: The directory cannot be written, `run_dir` has a run and `resume` is `never`, or the run
            is already past `max_steps`.
        CheckpointError: `resume` is `required` and there is nothing to resume, another process uses the
            directory, or the run in `run_dir` differs in more than what may change.
    """
    try:
        return _choose_and_lock(config, split)
    except OSError as error:
        path = error.filename or config.run_dir or config.runs_dir
        raise ConfigError(f"the run directory {path} cannot be written: {error.strerror or error}") from None


class OpenedDirectory(NamedTuple):
    """Directory of a run, on rank 0 with its lock."""

    path: Path
    lock: FileLock | None = None
    """Lock of the directory; `None` on ranks other than 0."""
    created: tuple[Path, ...] = ()
    """Folders that rank 0 created, innermost first; empty on other ranks, or if `path` existed before."""


def agree_on_run_directory(config: RunConfig, split: Tree, job: Job) -> OpenedDirectory:
    """Open the run directory on rank 0 and return it on all ranks. Collective.

    Raises:
        ConfigError, CheckpointError: On all ranks, if open_run_directory raised one on rank 0.
    """
    opened: list[OpenedDirectory] = []

    def open_on_main_rank() -> Path:
        runs = Path(config.runs_dir)
        candidates = {Path(config.run_dir)} if config.run_dir else {*runs.glob(f"{config.name}-*")}
        existing = {path for path in candidates if path.exists()}
        missing = _list_missing_folders(Path(config.run_dir).parent if config.run_dir else runs)
        path, lock = open_run_directory(config, split)
        created = () if path in existing else (path, *missing)
        opened.append(OpenedDirectory(path, lock, created))
        return path

    path = job.run_on_main_rank(open_on_main_rank)
    return opened[0] if opened else OpenedDirectory(path)


def _list_missing_folders(folder: Path) -> list[Path]:
    """Return those of this folder and its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_created_folders(created: Sequence[Path]) -> None:
    """Remove the directory of a run that was refused before its first step, and empty folders above it.

    Args:
        created: Created folders, innermost first, see `OpenedDirectory`.
    """
    if not created:
        return
    directory, *parents = created
    # If WANDB_DIR names another folder, W&B's files are there, and the run has links to them.
    for link in filter(Path.is_symlink, directory.glob("wandb/*")):
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    for path in parents:
        with suppress(OSError):  # another process may have written into it by now
            path.rmdir()


def _choose_and_lock(config: RunConfig, split: Tree) -> tuple[Path, FileLock]:
    """Return the directory of the run to resume, or a new one, with its lock."""
    resume = config.checkpoint.resume
    earlier: Path | None
    if config.run_dir is not None:
        earlier = Path(config.run_dir)
        if resume == "never" and (earlier / METRICS_FILE).exists():
            raise ConfigError(
                f"run_dir {earlier} already has a run; set another run_dir, or checkpoint.resume=auto"
            )
    else:
        earlier = None if resume == "never" else _find_newest_unfinished(config, split)
    lock = _lock(earlier, _get_lock_timeout()) if earlier is not None else None
    if earlier is not None and lock is not None:
        _prepare_resume(earlier, config, split)
        return earlier, lock
    if config.run_dir is not None:
        raise CheckpointError(
            f"run_dir {earlier} is in use by another process; end that process, or set another run_dir"
        )
    if resume == "required" and earlier is None:
        raise CheckpointError(
            f"checkpoint.resume is required, but {config.runs_dir} has no unfinished run of this recipe with "
            f"the name {config.name!r}; to start a new run, set checkpoint.resume=auto"
        )
    if resume == "required":
        raise CheckpointError(
            f"checkpoint.resume is required, but {earlier} is in use by another process; end that process"
        )
    if earlier is not None and _get_lock_timeout():
        raise CheckpointError(
            f"{earlier} is still in use by another process after {RESTART_SECONDS:.0f} s; end that process, "
            "or start a new run with checkpoint.resume=never"
        )
    if earlier is not None:
        log.info("another process is training %s; this is a new run", earlier)
    path, lock = _create_directory(config)
    _write_description(path, config, split)
    return path, lock


def _prepare_resume(path: Path, config: RunConfig, split: Tree) -> None:
    """Check that the locked run in `path` may resume with these settings, and write them to its files.

    Raises:
        ConfigError: The run is already past `max_steps`.
        CheckpointError: `resume` is `required` and the run has no checkpoint, or a key differs that may not
            change.
    """
    restore_replaced(path / "checkpoints")
    checkpoint, skipped_checkpoints = find_newest_complete(path / "checkpoints")
    if config.checkpoint.resume == "required" and checkpoint is None:
        reason = f": {skipped_checkpoints[0]}" if skipped_checkpoints else ""
        raise CheckpointError(f"checkpoint.resume is required, but {path} has no complete checkpoint{reason}")
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
        _keep_earlier_recipe(path, differences)
    elif not list_published_folders(path / "checkpoints") and (path / METRICS_FILE).exists():
        log.info("%s has no checkpoint, so the run starts from the beginning", path)
    (path / "summary.json").unlink(missing_ok=True)  # the file marks a finished run
    _write_description(path, config, split)


def _create_directory(config: RunConfig) -> tuple[Path, FileLock]:
    """Create and lock the directory of a new run, with a name that no other run has."""
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path(config.runs_dir) / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists() and (lock := _lock(path)) is not None:
            return path, lock
    raise AssertionError("unreachable")


def _get_lock_timeout() -> float:
    """Return the seconds to wait for the lock: RESTART_SECONDS in a restarted job, otherwise 0."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    return RESTART_SECONDS if restarts or "SLURM_RESTART_COUNT" in os.environ else 0.0


def _lock(path: Path, timeout: float = 0.0) -> FileLock | None:
    """Create the directory if it does not exist, and lock it.

    Args:
        path: Directory of a run.
        timeout: Seconds to wait for the lock.

    Returns:
        `None` if another process has the lock.
    """
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FILE)
        lock.acquire(timeout=timeout)
        return lock
    except Timeout:
        return None


def _find_newest_unfinished(config: RunConfig, split: Tree) -> Path | None:
    """Return the newest unfinished run that these settings would continue; `None` if there is none.

    If there is none, log how to continue the run that is nearest to these settings.
    """
    others: list[tuple[Path, list[RunDifference]]] = []
    finished_runs: list[Path] = []
    for path in sorted(Path(config.runs_dir).glob(f"{config.name}-*"), reverse=True):
        if not (path / "recipe.yaml").exists():
            continue
        is_finished = (path / "summary.json").exists()
        try:
            differences = find_differences(path, config, split)
        except CheckpointError as error:
            log.info("%s", error)
            continue
        if not differences and not is_finished:
            return path
        if not differences:
            finished_runs.append(path)
        elif not is_finished or all(map(may_change, differences)):
            others.append((path, differences))
    if finished_runs:
        log.warning(
            "this is a new run; %s is finished; to continue that one: run_dir=%s and a higher max_steps or "
            "max_epochs",
            finished_runs[0],
            shlex.quote(str(finished_runs[0])),
        )
    else:
        _log_nearest_run(others)
    return None


def _log_nearest_run(others: list[tuple[Path, list[RunDifference]]]) -> None:
    """Log one line about the run with a checkpoint and the fewest differences, and how to resume it.

    Args:
        others: Runs of other settings, each with its differences.
    """
    for path, differences in sorted(others, key=lambda other: len(other[1])):
        steps = list_published_folders(path / "checkpoints")
        if len(differences) > MAX_HINT_DIFFERENCES or not steps:
            continue
        if all(map(may_change, differences)):
            remedy = f"run_dir={shlex.quote(str(path))}"
        elif all(difference.key != FINGERPRINT_KEY for difference in differences):
            remedy = " ".join(difference.override for difference in differences)
        else:
            remedy = "restore the files it was trained on"
        log.warning(
            "this is a new run; %s, at step %d, differs: %s; to resume that one: %s",
            path,
            max(steps),
            "; ".join(map(str, differences)),
            remedy,
        )
        return


def _keep_earlier_recipe(path: Path, differences: list[RunDifference]) -> None:
    """Copy recipe.yaml before it is replaced, for `record_changes`.

    Args:
        path: Directory of the run.
        differences: Keys in which the run differs from these settings.

    Raises:
        CheckpointError: A key differs that may not change, so the run in `run_dir` is another one.
    """
    for difference in differences:
        if not may_change(difference):
            raise CheckpointError(
                f"run_dir {path} has a checkpoint of another run: {difference}; restore the earlier value, "
                "or set another run_dir"
            )
    # A copy that exists is of a start that ended before its checkpoint was chosen.
    if differences and not (path / EARLIER_RECIPE).exists():
        shutil.copy(path / "recipe.yaml", path / EARLIER_RECIPE)


def record_changes(path: Path, checkpoint: str) -> None:
    """Log which settings change from a checkpoint on, and name the earlier recipe after it. For rank 0.

    Args:
        path: Directory of the run.
        checkpoint: Name of the folder of the checkpoint that the run resumes from.
    """
    earlier = path / EARLIER_RECIPE
    if not earlier.exists():
        return
    then, now = (
        _select_identity(_with_defaults(read_yaml(file).tree), {}) for file in (earlier, path / "recipe.yaml")
    )
    differences = list(_compare(then, now))
    if not differences:  # the settings changed in a start that failed, and then back
        earlier.unlink()
        return
    log.warning("from %s on: %s", checkpoint, "; ".join(map(str, differences)))
    earlier.rename(path / f"recipe-until-{checkpoint}.yaml")


def _write_description(path: Path, config: RunConfig, split: Tree) -> None:
    """Write recipe.yaml, environment.json, git.diff, split.json and ds_config.json of a run."""
    files = {
        "recipe.yaml": format_recipe_yaml(config),
        ENVIRONMENT: json.dumps(_describe_environment(), indent=2),
    }
    diff = read_git_diff()
    if diff is not None:
        files[GIT_DIFF] = diff
    else:
        (path / GIT_DIFF).unlink(missing_ok=True)  # the diff of an earlier start
    for name, text in files.items():
        replace_file(path / name, text)
    write_split(path, split)


def write_split(path: Path, split: Tree) -> None:
    """Write split.json, and ds_config.json if the run uses DeepSpeed, without secrets. For rank 0."""
    split = redact(split)
    replace_file(path / "split.json", json.dumps(split, indent=2))
    if split["deepspeed"] is not None:
        replace_file(path / "ds_config.json", json.dumps(split["deepspeed"], indent=2))


def _describe_environment() -> Tree:
    """Return versions, machine and commit, which are needed to repeat the run.

    Environment variables are left out, because they may have secrets.
    """
    versions: dict[str, str | None] = {}
    for name in ("torch", "deepspeed", "transformers", "wandb", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cpu_cores": os.cpu_count(),
        "host": platform.node(),
        "git_commit": read_git_commit(),
    }
