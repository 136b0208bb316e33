"""The checkpoints of a run: their names, which count, which one a run goes on from, and which stay.

For a person: what there is, whether it verifies, and what changed between two.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from pipeline.checkpoint.manifest import MANIFEST, BestBy, Manifest, read_manifest
from pipeline.checkpoint.peers import MARKER, Peers, first
from pipeline.checkpoint.reader import (
    THREADS,
    CheckpointReader,
    Damage,
    check_content,
    check_sizes,
    look,
    stretches,
)
from pipeline.checkpoint.shards import Region
from pipeline.errors import CheckpointError
from pipeline.files import format_bytes

PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"
LONG = 2e9  # bytes that take some seconds to read
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run can resume from."""

    step: int
    folder: Path
    eval_loss: float | None
    """Finite loss of these very weights; `None` if it was not measured."""
    rank: float | None
    """Order by the metric that chooses the best, `eval.best_metric`; the lowest is the best."""


@dataclass(frozen=True)
class SavedCheckpoints:
    """All checkpoints of a run, oldest first."""

    saved: tuple[SavedCheckpoint, ...]

    @property
    def best(self) -> SavedCheckpoint | None:
        """The one of the lowest rank, the newest of several; `None`: none is measured."""
        known = [each for each in self.saved if each.rank is not None]
        return min(known, key=lambda each: (each.rank, -each.step), default=None)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def named_in(folder: Path) -> dict[int, Path]:
    """step -> whatever bears a checkpoint's name, newest first."""
    found = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d{8,12})", path.name)
        if match is not None and path.name == folder_name(int(match[1])):
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def steps_in(folder: Path) -> dict[int, Path]:
    """step -> folder with a manifest, newest first. Not yet: whether it verifies."""
    # A link may lead anywhere: what lies outside the run is not read.
    return {
        step: path
        for step, path in named_in(folder).items()
        if not path.is_symlink() and os.path.lexists(path / MANIFEST)
    }


def check(path: Path) -> Manifest:
    """The manifest of a checkpoint of which all files are there, in their sizes. Contents are not read.

    Raises:
        CheckpointError: it is not complete; the line says which file, and which node wrote it.
    """
    manifest = manifest_of(path)
    damages = check_sizes(manifest)
    if damages:
        raise CheckpointError(f"{path}/{damages[0]}")
    return manifest


def manifest_of(path: Path) -> Manifest:
    """The manifest of the checkpoint of the step that the folder is named for.

    Raises:
        CheckpointError: there is none, or not a good one.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, and what lies outside the run is not read")
    manifest = read_manifest(path)
    if folder_name(manifest.global_step) != path.name:
        raise CheckpointError(f"{path} holds step {manifest.global_step}; give it its name back")
    return manifest


def newest_good(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The newest complete checkpoint in this folder, if any, and why newer ones were passed over.

    Cheap: manifests and sizes. Contents are checked before they are loaded.
    """
    passed_over = list[str]()
    for path in named_in(folder).values():
        try:
            return check(path), passed_over
        except CheckpointError as error:
            passed_over.append(f"{path.name} is passed over: {error}")
    return None, passed_over if steps_in(folder) else []


def remove(path: Path) -> None:
    """Removes a checkpoint. Killed in between, it counts no more, and the next save clears it away."""
    aside = path.with_name(f"{path.name}.removed{PARTIAL}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def set_aside_after(folder: Path, step: int) -> None:
    """Has the checkpoints of later steps not count any more: `suspect-step-...`. Only while no save is under
    way."""
    for later, path in named_in(folder).items():
        if later > step and not path.is_symlink():
            path.rename(path.with_name(f"suspect-{path.name}"))


def remove_after(folder: Path, step: int) -> None:
    """Removes the checkpoints of later steps. Only while no save is under way."""
    for later, path in named_in(folder).items():
        if later > step and not path.is_symlink():
            remove(path)


def bring_back(folder: Path) -> None:
    """Gives a checkpoint that was being saved anew its name back, where a kill came between the two renames.

    Only while no save is under way.
    """
    for path in folder.glob(f"step-*{REPLACED}"):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if not path.is_symlink() and not os.path.lexists(final):
            path.rename(final)


def clear_partial(folder: Path) -> None:
    """Removes what killed saves left. Only while no save is under way."""
    for path in folder.glob(f"step-*{PARTIAL}"):
        if path.is_symlink():  # which rmtree leaves, in the way of every save of this step
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{MARKER}*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    keep_last: int
    """The newest ones; at least 1."""
    keep_every: int = 0
    """Steps that are a multiple of it stay for ever; 0: none."""
    keep_best: bool = False
    """The one of the lowest rank stays."""

    def stays(self, ranks: Mapping[int, float | None]) -> set[int]:
        """Return the steps that stay, of these: step -> rank (see BestBy), `None` where it is not known."""
        steps = sorted(ranks)
        stays = set(steps[-max(1, self.keep_last) :])
        if self.keep_every > 0:
            stays |= {step for step in steps if step % self.keep_every == 0}
        known = {step: rank for step, rank in ranks.items() if rank is not None}
        if self.keep_best and known:
            stays.add(min(known, key=lambda step: (known[step], -step)))
        return stays


def _saved(manifest: Manifest) -> SavedCheckpoint:
    best_by = manifest.best_by
    rank = None if best_by is None else best_by.rank
    return SavedCheckpoint(manifest.global_step, manifest.folder, manifest.eval_loss, rank)


class Pruner:
    """Removes checkpoints beyond the policy, once their successor is seen to be complete.

    What is not complete, or of another format, neither counts nor goes: it may be all that is left of a run.
    Nor do later steps: a run went on from before them.
    """

    def __init__(self, folder: Path, retention: Retention):
        self._folder = folder
        self._retention = retention
        self.bad: set[int] = set()
        """Steps known to be damaged."""
        self._known: dict[int, SavedCheckpoint] = {}  # a manifest of many fragments takes long to read

    def prune(self, manifest: Manifest) -> None:
        """Removes what the policy does not keep; `manifest` is that of the checkpoint just saved."""
        newest = manifest.global_step
        self.bad.discard(newest)
        try:
            if not (manifest.folder / MANIFEST).is_file() or check_sizes(manifest):
                raise CheckpointError(f"{manifest.folder.name} is not complete")
            self._known[newest] = _saved(manifest)
            ranks = {step: each.rank for step, each in self._counted(newest).items()}
            for step in ranks.keys() - self._retention.stays(ranks):
                remove(self._folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            log.warning("old checkpoints stay: %s", error)

    def saved(self) -> SavedCheckpoints:
        """Those that count."""
        counted = self._counted()
        return SavedCheckpoints(tuple(counted[step] for step in sorted(counted)))

    def _counted(self, newest: float = math.inf) -> dict[int, SavedCheckpoint]:
        """Return those that count, by their step."""
        counted = {}
        for step, path in steps_in(self._folder).items():
            if step > newest or step in self.bad:
                continue
            try:
                if step not in self._known:
                    self._known[step] = _saved(check(path))
                counted[step] = self._known[step]
            except CheckpointError as error:
                log.info("%s stays and does not count: %s", path.name, error)
        return counted


def newest_whole(folder: Path, peers: Peers, until: int | None = None) -> tuple[Manifest | None, set[int]]:
    """The newest checkpoint that verifies on all machines, and the steps passed over. Collective.

    Each that is passed over is one line that says why.

    Args:
        until: The last step that is looked at; None: all are.

    Returns:
        No manifest: there is no checkpoint, but maybe a link or a folder without a manifest.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    peers.attempt(lambda: bring_back(folder))  # where it cannot, that is one checkpoint less
    steps = peers.gather(list(named_in(folder)) if peers.is_leader else [])
    passed_over: dict[int, str] = {}
    for step in sorted(set(itertools.chain(*steps)), reverse=True):
        if until is not None and step > until:
            continue
        answer = _examine(folder / folder_name(step), peers)
        if isinstance(answer, Manifest):
            return answer, set(passed_over)
        log.warning("%s", answer)
        passed_over[step] = answer
    if until is None and any(peers.gather(bool(steps_in(folder)))):
        raise CheckpointError(
            f"{folder} holds no whole checkpoint; the newest: {next(iter(passed_over.values()))}; "
            "bring back what is missing, or start a new run with checkpoint.resume=never"
        )
    return None, set()


def _examine(path: Path, peers: Peers) -> Manifest | str:
    """A checkpoint's manifest once every byte of it is verified, by all ranks together; else why not."""
    manifest = None
    problem, checksum, here = None, "", list[str]()
    try:
        manifest = manifest_of(path)
        _ = manifest.table
        checksum = xxhash.xxh3_128_hexdigest((path / MANIFEST).read_bytes())
        if peers.is_leader:  # one on each file system: a thousand ranks would look for a thousand files each
            damages, absent = look(manifest)
            problem = f"on {peers.host}: {damages[0]}" if damages else None
            here = [file.name for file in manifest.files if file.name not in absent]
    except (CheckpointError, OSError) as error:
        problem = f"on {peers.host}: {error}"
    said = peers.gather((problem, checksum, here))
    here = said[peers.leader][2]
    problem = first(wrong for wrong, _, _ in said)
    if problem is not None or manifest is None:
        return f"{path.name} is passed over: {problem}"
    if len({checksum for _, checksum, _ in said}) > 1:
        return f"{path.name} is passed over: it is not the same checkpoint on all machines"
    there = set(itertools.chain(*(names for _, _, names in said)))
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
class CheckpointRow:
    """One checkpoint of a run. Of one whose manifest cannot be read, only step and path are known."""

    step: int
    path: Path
    problem: str | None
    """Why it does not count, in one line: the file, and where it is known the tensor; None: it counts."""
    num_files: int = 0
    num_here: int = 0
    """Fewer than num_files: other machines have the rest."""
    num_bytes: int = 0
    """Of the files here."""
    tokens: int | None = None
    """Seen until then; None: not known."""
    split: str | None = None
    eval_loss: float | None = None
    best_by: BestBy | None = None


def list_checkpoints(run: Path) -> list[CheckpointRow]:
    """The checkpoints of a run directory, oldest first. Only manifests and sizes are looked at."""
    folder = run / "checkpoints"
    counted = steps_in(folder)
    rows = [_row(step, path) for step, path in counted.items()]
    for step, path in named_in(folder).items():
        if step not in counted:
            why = "it is a link, and what lies outside the run is not read"
            rows.append(CheckpointRow(step, path, why if path.is_symlink() else f"it has no {MANIFEST}"))
    return sorted(rows, key=lambda row: row.step)


def _row(step: int, path: Path) -> CheckpointRow:
    try:
        manifest = manifest_of(path)
    except CheckpointError as error:
        return CheckpointRow(step, path, str(error))
    damages = check_sizes(manifest)
    _, absent = look(manifest)
    here = [file for file in manifest.files if file.name not in absent]
    tokens = manifest.state.get("tokens_seen")
    return CheckpointRow(
        step=step,
        path=path,
        problem=_problem(damages),
        num_files=len(manifest.files),
        num_here=len(here),
        num_bytes=sum(file.bytes for file in here),
        tokens=int(tokens) if isinstance(tokens, (int, float)) else None,
        split=f"{manifest.split}, {manifest.world_size} rank{'s' * (manifest.world_size > 1)}",
        eval_loss=manifest.eval_loss,
        best_by=manifest.best_by,
    )


def read_through(row: CheckpointRow, advance: Callable[[int], object]) -> CheckpointRow:
    """The row once every byte here has been compared with its checksum.

    Args:
        advance: Called with the number of bytes read, a few files at a time.
    """
    if row.problem is not None:
        return row
    try:
        manifest = manifest_of(row.path)
    except CheckpointError as error:
        return replace(row, problem=str(error))
    damages: list[Damage] = []
    for start in range(0, len(manifest.files), THREADS):
        few = manifest.files[start : start + THREADS]
        damages += check_content(manifest, [file.name for file in few])
        advance(sum(file.bytes for file in few))
    return replace(row, problem=_problem(damages))


def _problem(damages: Sequence[Damage]) -> str | None:
    if not damages:
        return None
    others = len(damages) - 1
    return f"{damages[0]}; and {others} more file{'s' * (others > 1)}" if others else str(damages[0])


@dataclass(frozen=True)
class TensorChange:
    """How one tensor of two checkpoints differs."""

    name: str
    kind: str
    num_values: int
    num_changed: int
    max_difference: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference over the norm of the first."""
    remark: str | None
    """Where the two cannot be compared: only in one, or other shapes."""


def diff(first: Manifest, second: Manifest, advance: Callable[[int], object]) -> Iterator[TensorChange]:
    """Every tensor that differs, in the first checkpoint's order. Memory: some MB, however large they are.

    Args:
        advance: Called with the number of values of the first that are done.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        shapes_a, shapes_b = a.names(), b.names()
        for name, kind in {**shapes_a, **shapes_b}:
            shape_a, shape_b = shapes_a.get((name, kind)), shapes_b.get((name, kind))
            if shape_a is None or shape_b is None or shape_a != shape_b:
                size = math.prod((shape_b or ()) if shape_a is None else shape_a)
                if shape_a is None or shape_b is None:
                    remark = f"only in {(first if shape_b is None else second).folder.name}"
                else:
                    remark = f"{list(shape_a)} became {list(shape_b)}"
                yield TensorChange(
                    name=name,
                    kind=kind,
                    num_values=size,
                    num_changed=size,
                    max_difference=math.nan,
                    relative=math.nan,
                    remark=remark,
                )
            else:
                change = _compare(a, b, name, kind, shape_a)
                if change.num_changed:
                    yield change
            advance(0 if shape_a is None else math.prod(shape_a))


def _compare(
    a: CheckpointReader, b: CheckpointReader, name: str, kind: str, shape: tuple[int, ...]
) -> TensorChange:
    size, changed, largest = math.prod(shape), 0, 0.0
    squares_of_difference = squares = 0.0
    for region in stretches(shape):
        one, other = (_values(reader, name, kind, region) for reader in (a, b))
        differs = ~((one == other) | (one.isnan() & other.isnan()))
        changed += int(differs.sum())
        # Where both are infinite alike, or both NaN, the difference is none.
        difference = torch.where(differs, (other - one).abs(), 0.0)
        # What cannot be measured, from or to NaN, is infinitely far.
        largest = max(largest, float(difference.nan_to_num(math.inf, math.inf).max()))
        squares_of_difference += float(difference.square().sum())
        squares += float(one.square().sum())
    relative = math.sqrt(squares_of_difference / squares) if squares else math.inf
    return TensorChange(
        name=name,
        kind=kind,
        num_values=size,
        num_changed=changed,
        max_difference=largest,
        relative=relative,
        remark=None,
    )


def _values(reader: CheckpointReader, name: str, kind: str, region: Region) -> Tensor:
    values = torch.empty(region.length, dtype=torch.float64)
    reader.read(name, kind, region, values)
    return values
