"""Opens a checkpoint as initial weights for another run: a given one, or the newest of a run directory."""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline.checkpoint import adapters
from pipeline.checkpoint.adapters import MergedWeights
from pipeline.checkpoint.catalog import LINK_PROBLEM, list_published_folders, list_step_folders
from pipeline.checkpoint.manifest import MANIFEST, read_manifest
from pipeline.checkpoint.reader import CheckpointWeights, check_content, check_file_sizes, inspect_files
from pipeline.errors import CheckpointError, ModelError
from pipeline.models.weights import WeightFile, build_weights_error

log = logging.getLogger(__name__)


def open_checkpoint(folder: Path) -> WeightFile | None:
    """Open the weights of a checkpoint after verifying every byte of it.

    In a run directory, this is the newest checkpoint that is intact. Each one that is skipped is logged.

    Args:
        folder: A checkpoint, a run directory, or its folder `checkpoints`.

    Returns:
        `None` if the folder is none of these.

    Raises:
        ModelError: The checkpoint is damaged or incomplete; of a run directory, all of them are.
    """
    if (folder / MANIFEST).is_file():
        return _verify_and_open(folder)
    for parent in (folder / "checkpoints", folder):
        if list_published_folders(parent):
            return _open_newest(folder, list(list_step_folders(parent).values()))
    return None


def _open_newest(folder: Path, newest_first: list[Path]) -> WeightFile:
    """Open the newest intact checkpoint among several paths; `folder` is for the message."""
    problems = []
    for path in newest_first:
        try:
            if path.is_symlink():
                raise build_weights_error(path, f"is {LINK_PROBLEM}")
            return _verify_and_open(path)
        except ModelError as error:
            log.warning("%s; trying an older checkpoint", error)
            problems.append(error)
    raise build_weights_error(folder, f"has no intact checkpoint; the newest: {problems[0]}")


def _verify_and_open(folder: Path) -> WeightFile:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise ModelError(f"model.weights: {error}") from None
    damages = check_file_sizes(manifest) or check_content(manifest)
    if damages:
        raise build_weights_error(folder, f"is damaged: {damages[0]}")
    _, absent = inspect_files(manifest)
    for file in manifest.files:
        if file.name in absent:
            raise build_weights_error(
                folder, f"lacks {file.name}, which was written on {file.host}; copy it here"
            )
    if adapters.STATE_KEY in manifest.state:
        return MergedWeights(manifest, open_checkpoint)
    return CheckpointWeights(manifest)
