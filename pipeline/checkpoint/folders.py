"""The folders of a run's checkpoints: which count, which go, what a killed run left behind."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from pipeline.checkpoint.verify import check_sizes
from pipeline.errors import CheckpointError

PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"
MEETING = ".meeting-"
log = logging.getLogger(__name__)


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
    damages = check_sizes(path, manifest)
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


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint in this folder, if any, and why newer ones were passed over.

    Cheap: manifests and sizes. Contents are checked before they are loaded.
    """
    passed_over = []
    for path in named_in(folder).values():
        try:
            check(path)
        except CheckpointError as error:
            passed_over.append(f"{path.name} is passed over: {error}")
            continue
        return path, passed_over
    return None, passed_over if steps_in(folder) else []


def complete_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints that are complete by `check`, oldest first."""
    complete = []
    for path in reversed(steps_in(folder).values()):
        try:
            check(path)
        except CheckpointError:
            continue
        complete.append(path)
    return complete


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    keep_last: int
    """The newest ones; at least 1."""
    keep_every: int = 0
    """Steps that are a multiple of it stay for ever; 0: none."""
    keep_best: bool = False
    """The one with the lowest evaluation loss stays."""

    def stays(self, losses: Mapping[int, float | None]) -> set[int]:
        """The steps that stay, of these: step -> evaluation loss (None: not known)."""
        steps = sorted(losses)
        stays = set(steps[-max(1, self.keep_last) :])
        if self.keep_every > 0:
            stays |= {step for step in steps if step % self.keep_every == 0}
        known = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
        if self.keep_best and known:
            stays.add(min(known, key=lambda step: (known[step], -step)))
        return stays


def remove(path: Path) -> None:
    """Removes a checkpoint. Killed in between, it counts no more, and the next save clears it away."""
    aside = path.with_name(f"{path.name}.removed{PARTIAL}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


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
    for path in folder.glob(f"{MEETING}*"):
        path.unlink(missing_ok=True)


class Pruner:
    """Removes checkpoints beyond the policy, once their successor is seen to be complete.

    What is not complete, or of another format, neither counts nor goes: it may be all that is left of a run.
    Nor do later steps: a run went on from before them.
    """

    def __init__(self, folder: Path, retention: Retention):
        self._folder = folder
        self._retention = retention
        self._losses: dict[int, float | None] = {}  # a manifest of many fragments takes long to read

    def prune(self, manifest: Manifest, bad: Collection[int]) -> None:
        """Removes what the policy does not keep.

        Args:
            manifest: Of the checkpoint just saved.
            bad: Steps known to be damaged.
        """
        newest = manifest.global_step
        path = self._folder / folder_name(newest)
        try:
            if not (path / MANIFEST).is_file() or check_sizes(path, manifest):
                raise CheckpointError(f"{path.name} is not complete")
            self._losses[newest] = _loss(manifest)
            counted = {}
            for step, path in steps_in(self._folder).items():
                if step > newest or step in bad:
                    continue
                try:
                    if step not in self._losses:
                        self._losses[step] = _loss(check(path))
                    counted[step] = self._losses[step]
                except CheckpointError as error:
                    log.info("%s stays and does not count: %s", path.name, error)
            for step in counted.keys() - self._retention.stays(counted):
                remove(self._folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            log.warning("old checkpoints stay: %s", error)


def _loss(manifest: Manifest) -> float | None:
    loss = manifest.state.get("eval_loss")
    return float(loss) if isinstance(loss, (int, float)) else None
