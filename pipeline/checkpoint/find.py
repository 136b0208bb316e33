"""Finds a run directory and one of its checkpoints. Imports torch only if there is something to read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.checkpoint.manifest import Manifest


def find_run_directory(path: Path) -> Path:
    """Return the run directory at this path.

    Raises:
        CheckpointError: The path is not a run directory.
    """
    if (path / "checkpoints").is_dir():
        return path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a run directory, as runs/NAME-TIME")
    whole = path.absolute()
    above = whole.parent if whole.name == "checkpoints" else whole.parent.parent
    if "checkpoints" in (whole.name, whole.parent.name) and (above / "checkpoints").is_dir():
        raise CheckpointError(f"{path} is inside a run directory; give the run directory: {above}")
    raise CheckpointError(f"{path} is no run directory: it has no folder checkpoints/")


def find_checkpoint(path: Path, which: str, option: str = "--step") -> tuple[Path, Path, Manifest]:
    """Return the run directory, the checkpoint's folder and its manifest.

    Args:
        path: Run directory, or one of its checkpoints; then `which` is ignored.
        which: Step of the checkpoint, `last` or `best`.
        option: Name of the option that gave `which`, for messages.

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

    whole = path.absolute()
    if whole.parent.name == "checkpoints" and whole in list_published_folders(whole.parent).values():
        directory = path.parent.parent if len(path.parts) > 2 else whole.parent.parent
        return directory, path, read_complete_manifest(path)
    directory = find_run_directory(path)
    steps = list_published_folders(directory / "checkpoints")
    if which == "last":
        newest, passed_over = find_newest_complete(directory / "checkpoints")
        if newest is None:
            why = f": {passed_over[0]}" if passed_over else ""
            raise CheckpointError(f"{directory} holds no complete checkpoint{why}")
        for line in passed_over:
            print(line, file=sys.stderr)
        return directory, newest.folder, newest
    if which == "best":
        best = Pruner(directory / "checkpoints", Retention(keep_last=1)).saved().best
        if best is None:
            raise CheckpointError(f"{directory}: no checkpoint has been evaluated; use {option} last")
        return directory, best.folder, read_complete_manifest(best.folder)
    if not which.isdecimal():
        raise CheckpointError(f"{option} {which}: expected a step, `last` or `best`")
    if int(which) not in steps:
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(f"{directory} has no checkpoint of step {which}; it has {known}")
    return directory, steps[int(which)], read_complete_manifest(steps[int(which)])
