"""Lists, verifies, compares and prunes the checkpoints of a run, and finds the one to resume from."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from pipeline.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from pipeline.checkpoint.peers import MARKER_PREFIX, Peers, find_first_problem
from pipeline.checkpoint.reader import (
    CheckpointReader,
    Damage,
    check_content,
    check_file_sizes,
    inspect_files,
)
from pipeline.checkpoint.shards import Region
from pipeline.errors import CheckpointError
from pipeline.files import format_bytes

PARTIAL = ".partial"  # suffix of a folder that is no checkpoint: it is being written or removed
REPLACED = f".replaced{PARTIAL}"  # suffix of a checkpoint while a new save of its step takes its place
LOGGED_BYTES = 2_000_000_000  # from this size on, reads of a checkpoint are logged: they take seconds
COMPARED_VALUES = 1 << 22  # number of values that are compared at a time: 32 MiB in fp64
LINK_PROBLEM = "a symbolic link, and links are not followed: they may lead out of the run directory"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run can resume from."""

    step: int
    folder: Path
    eval_loss: float | None
    """Evaluation loss of these weights; `None` if it was not measured or is not finite."""
    sort_key: float | None
    """Value of `eval.best_metric`, with its sign changed if the highest is the best.

    So the lowest key is the best. `None` if the metric was not measured or is not finite.
    """


@dataclass(frozen=True)
class SavedCheckpoints:
    """All checkpoints of a run that count: those that are complete and not known to be damaged."""

    saved: tuple[SavedCheckpoint, ...]
    """Checkpoints, oldest first."""

    @property
    def best(self) -> SavedCheckpoint | None:
        """Checkpoint with the lowest `sort_key`, the newest among equals; `None` if none has a key."""
        evaluated = [each for each in self.saved if each.sort_key is not None]
        return min(evaluated, key=lambda each: (each.sort_key, -each.step), default=None)


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def list_step_folders(folder: Path) -> dict[int, Path]:
    """Return all paths with a checkpoint's name, by step, newest first.

    Some of them may be incomplete checkpoints, links or plain files.
    """
    folders = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d{8,12})", path.name)
        if match is not None and path.name == folder_name(int(match[1])):
            folders[int(match[1])] = path
    return dict(sorted(folders.items(), reverse=True))


def list_published_folders(folder: Path) -> dict[int, Path]:
    """Return the checkpoint folders with a manifest, by step, newest first. Links are excluded."""
    return {
        step: path
        for step, path in list_step_folders(folder).items()
        if not path.is_symlink() and os.path.lexists(path / MANIFEST)
    }


def read_complete_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint after checking the sizes of its files. Contents are not read.

    Raises:
        CheckpointError: There is no valid manifest of this step, or a file is missing or has another size.
            The message names one file, and the machine that wrote it if that is known.
    """
    manifest = read_named_manifest(path)
    damages = check_file_sizes(manifest)
    if damages:
        raise CheckpointError(f"{path}/{damages[0]}")
    return manifest


def read_named_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint after comparing its step with the folder's name.

    Raises:
        CheckpointError: There is no manifest, or it is damaged or of another step.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is {LINK_PROBLEM}")
    manifest = read_manifest(path)
    if folder_name(manifest.global_step) != path.name:
        raise CheckpointError(
            f"{path} contains the checkpoint of step {manifest.global_step}; rename the folder to "
            f"{folder_name(manifest.global_step)}"
        )
    return manifest


def find_newest_complete(folder: Path) -> tuple[Manifest | None, list[str]]:
    """Return the newest complete checkpoint in a folder, and a line for each newer one that was skipped.

    Only manifests and sizes are read. Contents are verified before they are loaded.

    Returns:
        The manifest is `None` if no checkpoint is complete. If there is not even a folder with a manifest,
        there are no lines either.
    """
    skipped = list[str]()
    for path in list_step_folders(folder).values():
        try:
            return read_complete_manifest(path), skipped
        except CheckpointError as error:
            skipped.append(f"{path.name} is skipped: {error}")
    if not list_published_folders(folder):
        return None, []
    return None, skipped


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint.

    If the process is killed meanwhile, the checkpoint no longer counts, and the next save removes the rest.
    """
    aside = path.with_name(f"{path.name}.removed{PARTIAL}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def mark_suspect(path: Path) -> None:
    """Rename a checkpoint to `suspect-step-...`, so that it no longer counts."""
    path.rename(path.with_name(f"suspect-{path.name}"))


def discard_after(folder: Path, step: int, discard: Callable[[Path], None]) -> None:
    """Call `discard` with the path of each checkpoint of a later step. Links are excluded.

    Only call this while no save is running.
    """
    for later, path in list_step_folders(folder).items():
        if later > step and not path.is_symlink():
            discard(path)


def restore_replaced(folder: Path) -> None:
    """Restore the name of a checkpoint whose replacement was killed between its two renames.

    Only call this while no save is running.
    """
    for path in folder.glob(f"step-*{REPLACED}"):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if not path.is_symlink() and not os.path.lexists(final):
            path.rename(final)


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left: partial checkpoints, and marker files of `find_peers`.

    Only call this while no save is running.
    """
    for path in folder.glob(f"step-*{PARTIAL}"):
        if path.is_symlink():  # rmtree would leave the link, which blocks every save of this step
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{MARKER_PREFIX}*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints that stay."""

    keep_last: int
    """Number of newest checkpoints that stay; at least 1."""
    keep_every: int = 0
    """Interval of steps whose checkpoints stay forever; 0 for none."""
    keep_best: bool = False
    """Whether the best checkpoint stays."""

    def steps_to_keep(self, checkpoints: SavedCheckpoints) -> set[int]:
        """Return the steps of the checkpoints that stay."""
        steps = [each.step for each in checkpoints.saved]
        steps_to_keep = set(steps[-max(1, self.keep_last) :])
        if self.keep_every > 0:
            steps_to_keep |= {step for step in steps if step % self.keep_every == 0}
        if self.keep_best and checkpoints.best is not None:
            steps_to_keep.add(checkpoints.best.step)
        return steps_to_keep


def _summarize(manifest: Manifest) -> SavedCheckpoint:
    best_by = manifest.best_by
    sort_key = None if best_by is None else best_by.sort_key
    return SavedCheckpoint(manifest.global_step, manifest.folder, manifest.eval_loss, sort_key)


class Pruner:
    """Removes checkpoints that the retention rule does not keep, once a newer one is complete.

    An incomplete checkpoint, or one of another format, neither counts nor is removed: it may be all that is
    left of a run. Checkpoints of later steps than the newest save are not removed either. They exist if a run
    resumed from an earlier step.
    """

    def __init__(self, folder: Path, retention: Retention):
        self._folder = folder
        self._retention = retention
        self.damaged_steps: set[int] = set()
        """Steps whose checkpoints are known to be damaged. They do not count until they are saved again."""
        self._summaries: dict[int, SavedCheckpoint] = {}  # by step; a manifest of many files is slow to read

    def prune(self, manifest: Manifest) -> None:
        """Remove checkpoints that the rule does not keep. Failures are logged.

        Args:
            manifest: Manifest of the checkpoint that was just saved.
        """
        newest = manifest.global_step
        self.damaged_steps.discard(newest)
        try:
            if not (manifest.folder / MANIFEST).is_file() or check_file_sizes(manifest):
                raise CheckpointError(f"{manifest.folder.name} is not complete")
            self._summaries[newest] = _summarize(manifest)
            checkpoints = self.list_saved(newest)
            steps = {each.step for each in checkpoints.saved}
            for step in steps - self._retention.steps_to_keep(checkpoints):
                remove_checkpoint(self._folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            log.warning("old checkpoints are not removed: %s", error)

    def list_saved(self, until: float = math.inf) -> SavedCheckpoints:
        """Return the checkpoints that count, up to and including the step `until`."""
        counted = []
        for step, path in reversed(list_published_folders(self._folder).items()):
            if step > until or step in self.damaged_steps:
                continue
            try:
                if step not in self._summaries:
                    self._summaries[step] = _summarize(read_complete_manifest(path))
                counted.append(self._summaries[step])
            except CheckpointError as error:
                log.info("%s is ignored and not removed: %s", path.name, error)
        return SavedCheckpoints(tuple(counted))


def find_newest_verified(
    folder: Path, peers: Peers, until: int | None = None
) -> tuple[Manifest | None, set[int]]:
    """Return the newest checkpoint that is verified on all machines, and the skipped steps. Collective.

    Each skipped checkpoint is logged with the reason. A checkpoint whose replacement was killed gets its name
    back first.

    Args:
        folder: Folder of the checkpoints.
        peers: Ranks that save together.
        until: Last step to consider; `None` for all.

    Returns:
        The manifest, and the steps of the newer checkpoints that were skipped. `None` and no steps if there
        is no checkpoint, or with `until` no intact one. A link or a folder without a manifest is no
        checkpoint.

    Raises:
        CheckpointError: `until` is `None`, and all checkpoints are damaged or incomplete.
    """
    # If this fails, there is one checkpoint less to choose from.
    peers.attempt(lambda: restore_replaced(folder))
    steps = peers.gather(list(list_step_folders(folder)) if peers.is_leader else [])
    reasons: dict[int, str] = {}  # by skipped step
    for step in sorted(set(itertools.chain(*steps)), reverse=True):
        if until is not None and step > until:
            continue
        path = folder / folder_name(step)
        manifest, problem = _verify_on_all_machines(path, peers)
        if manifest is not None:
            return manifest, set(reasons)
        reasons[step] = f"{path.name} is skipped: {problem}"
        log.warning("%s", reasons[step])
    if until is None and any(peers.gather(bool(list_published_folders(folder)))):
        raise CheckpointError(
            f"{folder} has no intact checkpoint; the newest: {next(iter(reasons.values()))}; restore the "
            "missing or damaged files, or start a new run with checkpoint.resume=never"
        )
    return None, set()


def _verify_on_all_machines(path: Path, peers: Peers) -> tuple[Manifest | None, str]:
    """Verify every byte of a checkpoint, some files on each rank. Collective.

    Returns:
        The manifest and an empty text; or, on every rank, `None` and the first problem.
    """
    manifest = None
    problem = None
    checksum = ""
    present = list[str]()
    try:
        manifest = read_named_manifest(path)
        _ = manifest.table  # reads and checks the table
        checksum = xxhash.xxh3_128_hexdigest((path / MANIFEST).read_bytes())
        # Only one rank of each file system: else a thousand ranks would look up a thousand files each.
        if peers.is_leader:
            damages, absent = inspect_files(manifest)
            problem = f"on {peers.host}: {damages[0]}" if damages else None
            present = [file.name for file in manifest.files if file.name not in absent]
    except (CheckpointError, OSError) as error:
        problem = f"on {peers.host}: {error}"
    problems, checksums, present_by_rank = zip(*peers.gather((problem, checksum, present)), strict=True)
    problem = find_first_problem(problems)
    if problem is not None or manifest is None:
        return None, str(problem)
    if len(set(checksums)) > 1:
        return None, "it is not the same checkpoint on all machines"
    present_anywhere = set(itertools.chain(*present_by_rank))
    for file in manifest.files:
        if file.name not in present_anywhere:
            return None, f"no machine has {file.name}, written on {file.host}"
    if manifest.num_bytes > LOGGED_BYTES:
        log.info("verifying %s, %s", path.name, format_bytes(manifest.num_bytes))
    neighbours = peers.neighbours
    own_files = present_by_rank[peers.leader][neighbours.index(peers.rank) :: len(neighbours)]
    began = time.perf_counter()
    damages_by_rank = peers.gather([str(damage) for damage in check_content(manifest, own_files)])
    all_damages = list(itertools.chain(*damages_by_rank))
    if all_damages:
        return None, all_damages[0]
    level = logging.INFO if manifest.num_bytes > LOGGED_BYTES else logging.DEBUG
    log.log(level, "%s: every byte read and compared in %.1f s", path.name, time.perf_counter() - began)
    return manifest, ""


@dataclass(frozen=True)
class CheckpointStatus:
    """State of one checkpoint for the command `checkpoints`."""

    step: int
    path: Path
    problem: str | None
    """Reason why the checkpoint does not count; `None` if it counts.

    It names the damaged file, and the damaged tensors if they are known.
    """
    manifest: Manifest | None = None
    """Manifest of the checkpoint; `None` if it cannot be read."""
    num_files_here: int = 0
    """Number of the checkpoint's files in this folder; other machines may have the rest."""
    num_bytes: int = 0
    """Bytes of the files in this folder."""


def list_checkpoints(run: Path) -> list[CheckpointStatus]:
    """Return the checkpoints of a run directory, oldest first. Only manifests and sizes are read."""
    return [
        _build_status(step, path) for step, path in reversed(list_step_folders(run / "checkpoints").items())
    ]


def _build_status(step: int, path: Path) -> CheckpointStatus:
    if path.is_symlink():
        return CheckpointStatus(step, path, f"it is {LINK_PROBLEM}")
    if not os.path.lexists(path / MANIFEST):
        return CheckpointStatus(step, path, f"it has no {MANIFEST}")
    try:
        manifest = read_named_manifest(path)
    except CheckpointError as error:
        return CheckpointStatus(step, path, str(error))
    _, absent = inspect_files(manifest)
    here = [file for file in manifest.files if file.name not in absent]
    return CheckpointStatus(
        step=step,
        path=path,
        problem=_format_damages(check_file_sizes(manifest)),
        manifest=manifest,
        num_files_here=len(here),
        num_bytes=sum(file.bytes for file in here),
    )


def verify_checkpoint(status: CheckpointStatus, advance: Callable[[int], object]) -> CheckpointStatus:
    """Return the status after comparing every byte in this folder with the checksums.

    A status with a problem is returned unchanged.

    Args:
        status: Status from `list_checkpoints`.
        advance: Called on several threads with the number of bytes read since the last call.
    """
    if status.problem is not None or status.manifest is None:
        return status
    return replace(status, problem=_format_damages(check_content(status.manifest, advance=advance)))


def _format_damages(damages: Sequence[Damage]) -> str | None:
    if not damages:
        return None
    if len(damages) == 1:
        return str(damages[0])
    others = len(damages) - 1
    return f"{damages[0]}; and {others} more file{'s' * (others > 1)}"


@dataclass(frozen=True)
class TensorChange:
    """Difference of one tensor between two checkpoints."""

    name: str
    kind: str
    remark: str | None = None
    """Reason why the tensors cannot be compared (only one exists, or shapes differ); else `None`.

    With a remark, the numbers below mean nothing.
    """
    share: float = 1.0
    """Fraction of the values that changed, from 0 to 1."""
    max_difference: float = math.nan
    """Largest absolute difference; infinite if a value changed from or to NaN."""
    relative: float = math.nan
    """Norm of the difference over the norm of the first tensor; infinite if the latter is 0."""


def diff_checkpoints(
    first: Manifest, second: Manifest, advance: Callable[[int], object]
) -> Iterator[TensorChange]:
    """Yield every tensor that differs. The memory for this is some MB for any model size.

    Args:
        first: Manifest of the first checkpoint.
        second: Manifest of the second checkpoint.
        advance: Called with the number of values of the first checkpoint compared since the last call.

    Raises:
        CheckpointError: One of the checkpoints cannot be read.
    """
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        shapes_a = a.get_shapes()
        shapes_b = b.get_shapes()
        for name, kind in {**shapes_a, **shapes_b}:
            shape_a = shapes_a.get((name, kind))
            shape_b = shapes_b.get((name, kind))
            if shape_a is None:
                yield TensorChange(name, kind, f"only in {second.folder.name}")
                continue
            if shape_b is None:
                yield TensorChange(name, kind, f"only in {first.folder.name}")
            elif shape_a != shape_b:
                yield TensorChange(name, kind, f"{list(shape_a)} became {list(shape_b)}")
            else:
                change = _compare(a, b, name, kind, shape_a)
                if change.share > 0:
                    yield change
            advance(math.prod(shape_a))


def _compare(
    a: CheckpointReader, b: CheckpointReader, name: str, kind: str, shape: tuple[int, ...]
) -> TensorChange:
    size = math.prod(shape)
    changed = 0
    largest = 0.0
    squares_of_difference = 0.0
    squares = 0.0
    for start in range(0, size, COMPARED_VALUES):
        region = Region(shape, None, start, min(COMPARED_VALUES, size - start))
        one = torch.empty(region.length, dtype=torch.float64)
        other = torch.empty(region.length, dtype=torch.float64)
        a.read(name, kind, region, one)
        b.read(name, kind, region, other)
        differs = ~((one == other) | (one.isnan() & other.isnan()))
        changed += int(differs.sum())
        # Equal infinities and two NaNs count as no difference.
        difference = torch.where(differs, (other - one).abs(), 0.0)
        # A difference from or to NaN counts as infinite.
        largest = max(largest, float(difference.nan_to_num(math.inf, math.inf).max()))
        squares_of_difference += float(difference.square().sum())
        squares += float(one.square().sum())
    return TensorChange(
        name=name,
        kind=kind,
        share=changed / max(1, size),
        max_difference=largest,
        relative=math.sqrt(squares_of_difference / squares) if squares else math.inf,
    )
