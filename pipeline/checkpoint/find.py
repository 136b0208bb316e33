"""Finds a run directory and one of its checkpoints. Imports torch only if there is something to read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.checkpoint.manifest import Manifest

MODEL_FOLDER = "model"
"""Folder of a run directory with config.json and the tokenizer."""


def find_run_directory(path: Path) -> Path:
    """Return `path` if it is a run directory, that is, if it contains a folder `checkpoints`.

    Raises:
        CheckpointError: The path is not a run directory.
    """
    if (path / "checkpoints").is_dir():
        return path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a run directory, such as runs/NAME-TIME")
    for parent in (path.absolute(), path.absolute().parent):
        if parent.name == "checkpoints" and parent.is_dir():
            raise CheckpointError(
                f"{path} is inside a run directory; give the run directory: {parent.parent}"
            )
    raise CheckpointError(
        f"{path} is no run directory: it has no folder checkpoints/; give a run directory, such as "
        "runs/NAME-TIME"
    )


def find_checkpoint(path: Path, which: str, option: str = "--step") -> tuple[Path, Path, Manifest]:
    """Return the run directory, the checkpoint's folder and its manifest.

    For `last`, each newer checkpoint that is not complete is named on stderr.

    Args:
        path: Run directory, or the folder of one of its checkpoints.
        which: Step of the checkpoint, `last` or `best`. Ignored if `path` is a checkpoint.
        option: Name of the option or argument that gave `which`, for messages.

    Raises:
        CheckpointError: There is no such checkpoint, or it is not complete.
    """
    from pipeline.checkpoint.catalog import (
        Pruner,
        Retention,
        find_newest_complete,
        list_published_folders,
        read_complete_manifest,
    )

    absolute = path.absolute()
    parent = absolute.parent
    if parent.name == "checkpoints" and absolute in list_published_folders(parent).values():
        # A relative path stays relative if it names the run directory.
        directory = path.parent.parent if len(path.parts) > 2 else parent.parent
        return directory, path, read_complete_manifest(path)
    directory = find_run_directory(path)
    if which == "last":
        newest, skipped = find_newest_complete(directory / "checkpoints")
        if newest is None:
            reason = f": {skipped[0]}" if skipped else ""
            raise CheckpointError(f"{directory} has no complete checkpoint{reason}")
        for line in skipped:
            print(line, file=sys.stderr)
        return directory, newest.folder, newest
    if which == "best":
        best = Pruner(directory / "checkpoints", Retention(keep_last=1)).list_saved().best
        if best is None:
            raise CheckpointError(f"{directory}: no checkpoint has been evaluated; use {option} last")
        return directory, best.folder, read_complete_manifest(best.folder)
    if not which.isdecimal():
        raise CheckpointError(f"{option} {which}: expected a step, `last` or `best`")
    step = int(which)
    folders = list_published_folders(directory / "checkpoints")
    if step not in folders:
        steps = ", ".join(map(str, sorted(folders))) or "none"
        raise CheckpointError(f"{directory} has no checkpoint of step {which}; it has {steps}")
    return directory, folders[step], read_complete_manifest(folders[step])
