"""Opens a checkpoint as initial weights for another run: the newest of a run directory, or a given one."""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline.checkpoint import adapters
from pipeline.checkpoint.adapters import MergedWeights
from pipeline.checkpoint.catalog import LINK_PROBLEM, list_published_folders, list_step_folders
from pipeline.checkpoint.manifest import MANIFEST, read_manifest
from pipeline.checkpoint.reader import CheckpointWeights, check_content, check_file_sizes, inspect_files
from pipeline.errors import CheckpointError, ModelError
from pipeline.models.weights import WeightFile, weights_error

log = logging.getLogger(__name__)


def open_checkpoint(folder: Path) -> WeightFile | None:
    """Open the weights of a checkpoint, or of a run directory's newest one that verifies.

    Returns:
        `None` if the folder is neither a checkpoint nor a run directory.

    Raises:
        ModelError: The checkpoint is damaged or incomplete.
    """
    if (folder / MANIFEST).is_file():
        return _open(folder)
    for place in (folder / "checkpoints", folder):
        if list_published_folders(place):
            return _open_newest(folder, list(list_step_folders(place).values()))
    return None


def _open_newest(folder: Path, newest_first: list[Path]) -> WeightFile:
    problems = []
    for path in newest_first:
        try:
            if path.is_symlink():
                raise weights_error(path, f"is {LINK_PROBLEM}")
            return _open(path)
        except ModelError as error:
            log.warning("%s; trying an older checkpoint", error)
            problems.append(error)
    raise weights_error(folder, f"holds no whole checkpoint; the newest: {problems[0]}")


def _open(folder: Path) -> WeightFile:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise ModelError(f"model.weights: {error}") from None
    if damages := check_file_sizes(manifest) or check_content(manifest):
        raise weights_error(folder, f"is damaged: {damages[0]}")
    if absent := inspect_files(manifest)[1]:
        elsewhere = next(file for file in manifest.files if file.name in absent)
        raise weights_error(
            folder, f"lacks {elsewhere.name}, which was written on {elsewhere.host}; bring it here"
        )
    if adapters.STATE_KEY in manifest.state:
        return MergedWeights(manifest, open_checkpoint)
    return CheckpointWeights(manifest)
