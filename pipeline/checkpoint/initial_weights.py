"""A checkpoint as weights for another run's model: the newest of a run directory, or one that was named."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint import adapters
from pipeline.checkpoint.adapters import MergedWeights
from pipeline.checkpoint.catalog import named_in, steps_in
from pipeline.checkpoint.manifest import MANIFEST, read_manifest
from pipeline.checkpoint.reader import CheckpointReader, check_content, check_sizes, look, weights_of
from pipeline.checkpoint.shards import Region
from pipeline.errors import CheckpointError, ModelError
from pipeline.models.weights import Entry, WeightFile, refusal

log = logging.getLogger(__name__)


class CheckpointWeights:
    """See pipeline.models.weights.WeightFile."""

    files: Sequence[Path] = ()

    def __init__(self, reader: CheckpointReader):
        self._reader = reader
        weights = weights_of(reader.manifest)
        self._kinds = {name: kind for name, (kind, _, _) in weights.items()}
        self.entries: Mapping[str, Entry] = {
            name: Entry(shape, dtype) for name, (_, shape, dtype) in weights.items()
        }

    def read(self, name: str) -> Tensor:
        shape, dtype = self.entries[name]
        assert isinstance(dtype, torch.dtype)
        values = torch.empty(math.prod(shape), dtype=dtype)
        self._reader.read(name, self._kinds[name], Region(shape, None, 0, len(values)), values)
        return values.view(shape)

    def close(self) -> None:
        self._reader.close()


def open_checkpoint(folder: Path) -> WeightFile | None:
    """The weights of a checkpoint, or of a run directory's newest one that verifies; None: it is neither.

    Raises:
        ModelError: it is damaged, or not whole.
    """
    if (folder / MANIFEST).is_file():
        return _open(folder)
    for place in (folder / "checkpoints", folder):
        if steps_in(place):
            return _open_newest(folder, list(named_in(place).values()))
    return None


def _open_newest(folder: Path, newest_first: list[Path]) -> WeightFile:
    problems = []
    for path in newest_first:
        try:
            if path.is_symlink():
                raise refusal(path, "is a link, and what lies outside the run is not read")
            return _open(path)
        except ModelError as error:
            log.warning("%s; an older checkpoint is looked for", error)
            problems.append(error)
    raise refusal(folder, f"holds no whole checkpoint; the newest: {problems[0]}")


def _open(folder: Path) -> WeightFile:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise ModelError(f"model.weights: {error}") from None
    if damages := check_sizes(manifest) or check_content(manifest):
        raise refusal(folder, f"is damaged: {damages[0]}")
    if absent := look(manifest)[1]:
        elsewhere = next(file for file in manifest.files if file.name in absent)
        raise refusal(folder, f"lacks {elsewhere.name}, which was written on {elsewhere.host}; bring it here")
    if adapters.KEY in manifest.state:
        return MergedWeights(manifest, open_checkpoint)
    return CheckpointWeights(CheckpointReader(manifest))
