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
from pipeline.checkpoint.peers import MARKER, Peers, first_problem
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

PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"
LONG = 2e9  # bytes from which on verification is announced, as it takes some seconds
VALUES_AT_ONCE = 1 << 22
LINK_PROBLEM = "a link, and what lies outside the run is not read"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run can resume from."""

    step: int
    folder: Path
    eval_loss: float | None
    """Finite evaluation loss of these weights; `None` if it was not measured."""
    rank: float | None
    """Sort key by `eval.best_metric`; the lowest is the best. `None` if it was not measured."""


@dataclass(frozen=True)
class SavedCheckpoints:
    """All checkpoints of a run that count, oldest first."""

    saved: tuple[SavedCheckpoint, ...]

    @property
    def best(self) -> SavedCheckpoint | None:
        """Checkpoint with the lowest `rank`, the newest among equals; `None` if none has a rank."""
        known = [each for each in self.saved if each.rank is not None]
        return min(known, key=lambda each: (each.rank, -each.step), default=None)


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def list_step_folders(folder: Path) -> dict[int, Path]:
    """Return all paths with a checkpoint's name, complete or not, by step, newest first."""
    found = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d{8,12})", path.name)
        if match is not None and path.name == folder_name(int(match[1])):
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


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
        CheckpointError: The checkpoint is incomplete; the message names a file and the node that wrote it.
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
            f"{path} holds step {manifest.global_step}; rename it to {folder_name(manifest.global_step)}"
        )
    return manifest


def find_newest_complete(folder: Path) -> tuple[Manifest | None, list[str]]:
    """Return the newest complete checkpoint in a folder, and a line for each newer one that was skipped.

    Only manifests and sizes are read. Contents are verified before they are loaded.

    Returns:
        The manifest is `None` if no checkpoint is complete.
    """
    passed_over = list[str]()
    for path in list_step_folders(folder).values():
        try:
            return read_complete_manifest(path), passed_over
        except CheckpointError as error:
            passed_over.append(f"{path.name} is passed over: {error}")
    return None, passed_over if list_published_folders(folder) else []


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. If a kill interrupts this, it no longer counts, and the next save removes it."""
    aside = path.with_name(f"{path.name}.removed{PARTIAL}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def mark_suspect(path: Path) -> None:
    """Rename a checkpoint to `suspect-step-...`, so that it no longer counts."""
    path.rename(path.with_name(f"suspect-{path.name}"))


def discard_later(folder: Path, step: int, discard: Callable[[Path], None]) -> None:
    """Call `discard` with each checkpoint of a later step. Only call this while no save is running."""
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
    """Remove the partial checkpoints of killed saves. Only call this while no save is running."""
    for path in folder.glob(f"step-*{PARTIAL}"):
        if path.is_symlink():  # rmtree would leave the link, which blocks every save of this step
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{MARKER}*"):
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
        stays = set(steps[-max(1, self.keep_last) :])
        if self.keep_every > 0:
            stays |= {step for step in steps if step % self.keep_every == 0}
        if self.keep_best and checkpoints.best is not None:
            stays.add(checkpoints.best.step)
        return stays


def _summarize(manifest: Manifest) -> SavedCheckpoint:
    best_by = manifest.best_by
    rank = None if best_by is None else best_by.rank
    return SavedCheckpoint(manifest.global_step, manifest.folder, manifest.eval_loss, rank)


class Pruner:
    """Removes checkpoints that the retention rule does not keep, once their successor is complete.

    An incomplete checkpoint, or one of another format, neither counts nor is removed: it may be all that is
    left of a run. The same holds for checkpoints of later steps than the newest save, which remain if a run
    resumed from an earlier step.
    """

    def __init__(self, folder: Path, retention: Retention):
        self._folder = folder
        self._retention = retention
        self.bad: set[int] = set()
        """Steps known to be damaged."""
        self._known: dict[int, SavedCheckpoint] = {}  # cached, since a manifest of many files is slow to read

    def prune(self, manifest: Manifest) -> None:
        """Remove checkpoints that the rule does not keep; `manifest` belongs to the one just saved."""
        newest = manifest.global_step
        self.bad.discard(newest)
        try:
            if not (manifest.folder / MANIFEST).is_file() or check_file_sizes(manifest):
                raise CheckpointError(f"{manifest.folder.name} is not complete")
            self._known[newest] = _summarize(manifest)
            saved = self.saved(newest)
            for step in {each.step for each in saved.saved} - self._retention.steps_to_keep(saved):
                remove_checkpoint(self._folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            log.warning("old checkpoints stay: %s", error)

    def saved(self, until: float = math.inf) -> SavedCheckpoints:
        """Return the checkpoints that count, up to a step."""
        counted = []
        for step, path in reversed(list_published_folders(self._folder).items()):
            if step > until or step in self.bad:
                continue
            try:
                if step not in self._known:
                    self._known[step] = _summarize(read_complete_manifest(path))
                counted.append(self._known[step])
            except CheckpointError as error:
                log.info("%s stays and does not count: %s", path.name, error)
        return SavedCheckpoints(tuple(counted))


def find_newest_verified(
    folder: Path, peers: Peers, until: int | None = None
) -> tuple[Manifest | None, set[int]]:
    """Return the newest checkpoint that is verified on all machines, and the skipped steps. Collective.

    Each skipped checkpoint is logged with the reason.

    Args:
        folder: Folder of the checkpoints.
        peers: Ranks that save together.
        until: Last step to consider; `None` for all.

    Returns:
        The manifest is `None` if there is no checkpoint; there may be a link or a folder without a manifest.

    Raises:
        CheckpointError: There are checkpoints, but all are damaged or incomplete.
    """
    peers.attempt(
        lambda: restore_replaced(folder)
    )  # if it fails, there is one checkpoint less to choose from
    steps = peers.gather(list(list_step_folders(folder)) if peers.is_leader else [])
    passed_over: dict[int, str] = {}
    for step in sorted(set(itertools.chain(*steps)), reverse=True):
        if until is not None and step > until:
            continue
        answer = _examine(folder / folder_name(step), peers)
        if isinstance(answer, Manifest):
            return answer, set(passed_over)
        log.warning("%s", answer)
        passed_over[step] = answer
    if until is None and any(peers.gather(bool(list_published_folders(folder)))):
        raise CheckpointError(
            f"{folder} holds no whole checkpoint; the newest: {next(iter(passed_over.values()))}; "
            "bring back what is missing, or start a new run with checkpoint.resume=never"
        )
    return None, set()


def _examine(path: Path, peers: Peers) -> Manifest | str:
    """Verify every byte of a checkpoint, a part on each rank; return its manifest, or why it is skipped."""
    manifest = None
    problem = None
    checksum = ""
    here = list[str]()
    try:
        manifest = read_named_manifest(path)
        _ = manifest.table
        checksum = xxhash.xxh3_128_hexdigest((path / MANIFEST).read_bytes())
        if (
            peers.is_leader
        ):  # one rank a file system, else a thousand ranks would look up a thousand files each
            damages, absent = inspect_files(manifest)
            problem = f"on {peers.host}: {damages[0]}" if damages else None
            here = [file.name for file in manifest.files if file.name not in absent]
    except (CheckpointError, OSError) as error:
        problem = f"on {peers.host}: {error}"
    said = peers.gather((problem, checksum, here))
    here = said[peers.leader][2]
    there = set(itertools.chain(*(names for *_, names in said)))
    problem = first_problem(wrong for wrong, *_ in said)
    if problem is not None or manifest is None:
        return f"{path.name} is passed over: {problem}"
    if len({checksum for _, checksum, _ in said}) > 1:
        return f"{path.name} is passed over: it is not the same checkpoint on all machines"
    for file in manifest.files:
        if file.name not in there:
            return f"{path.name} is passed over: no machine has {file.name}, written on {file.host}"
    if manifest.num_bytes > LONG:
        log.info("verifying %s, %s", path.name, format_bytes(manifest.num_bytes))
    neighbours = peers.neighbours
    mine = here[neighbours.index(peers.rank) :: len(neighbours)]
    began = time.perf_counter()
    found = peers.gather([str(damage) for damage in check_content(manifest, mine)])
    if (damage := next(itertools.chain(*found), None)) is not None:
        return f"{path.name} is passed over: {damage}"
    log.info("%s: every byte read and compared in %.1f s", path.name, time.perf_counter() - began)
    return manifest


@dataclass(frozen=True)
class CheckpointStatus:
    """State of one checkpoint for the command `checkpoints`."""

    step: int
    path: Path
    problem: str | None
    """Reason why the checkpoint does not count, with the file and known tensors; `None` if it counts."""
    manifest: Manifest | None = None
    """Manifest of the checkpoint; `None` if it cannot be read."""
    num_here: int = 0
    """Number of files in this folder; other machines may have the rest."""
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
        num_here=len(here),
        num_bytes=sum(file.bytes for file in here),
    )


def verify_checkpoint(row: CheckpointStatus, advance: Callable[[int], object]) -> CheckpointStatus:
    """Return the status after comparing every byte in this folder with the checksums.

    Args:
        row: Status from `list_checkpoints`.
        advance: Called with the number of bytes read since the last call.
    """
    if row.problem is not None or row.manifest is None:
        return row
    return replace(row, problem=_format_damages(check_content(row.manifest, advance=advance)))


def _format_damages(damages: Sequence[Damage]) -> str | None:
    if not damages:
        return None
    others = len(damages) - 1
    return f"{damages[0]}; and {others} more file{'s' * (others > 1)}" if others else str(damages[0])


@dataclass(frozen=True)
class TensorChange:
    """Difference of one tensor between two checkpoints."""

    name: str
    kind: str
    remark: str | None = None
    """Reason why the tensors cannot be compared (only one exists, or shapes differ); else `None`."""
    share: float = 1.0
    """Share of the values that changed."""
    max_difference: float = math.nan
    """Largest absolute difference."""
    relative: float = math.nan
    """Norm of the difference over the norm of the first."""


def diff_checkpoints(
    first: Manifest, second: Manifest, advance: Callable[[int], object]
) -> Iterator[TensorChange]:
    """Yield every tensor that differs, in the first checkpoint's order. Needs some MB for any model size.

    Args:
        first: Manifest of the first checkpoint.
        second: Manifest of the second checkpoint.
        advance: Called with the number of values of the first compared since the last call.

    Raises:
        CheckpointError: One of the checkpoints cannot be read.
    """
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        shapes_a = a.names()
        shapes_b = b.names()
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
            elif (change := _compare(a, b, name, kind, shape_a)).share:
                yield change
            advance(math.prod(shape_a))


def _compare(
    a: CheckpointReader, b: CheckpointReader, name: str, kind: str, shape: tuple[int, ...]
) -> TensorChange:
    size = math.prod(shape)
    changed = 0
    largest = 0.0
    squares_of_difference = squares = 0.0
    for start in range(0, size, VALUES_AT_ONCE):
        region = Region(shape, None, start, min(VALUES_AT_ONCE, size - start))
        one, other = (torch.empty(region.length, dtype=torch.float64) for _ in "ab")
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
