"""The lowest and the highest of a batch's whole numbers: found where it is read, by workers if there are any.

What a model or a loss looks up by them is held to that on the host: on a GPU a wrong one ends the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX, Extent, LoadedBatch, Reading, on_host

WHOLE = (torch.int64, torch.int32, torch.int16)  # uint8 is pixels, which nothing looks up
UNREAD = (
    "position_ids",
    "attention_mask",
    "segments",
    "segment_kinds",
)  # made by the data pipeline itself, or no indices


class Wrong(NamedTuple):
    """A number that is out of range."""

    value: int
    sample: str
    """` (sample 7 of wiki)`, or empty: not known."""


def note_extents(batch: LoadedBatch, indices: Sequence[int], sources: Sequence[tuple[str, int]]) -> None:
    """Has the batch remember its extents and samples.

    Args:
        indices: Of the samples, in their data set.
        sources: (name, samples) of what the data set consists of, one behind the other.
    """
    extents = {
        name: extent
        for name, value in batch.items()
        if name not in UNREAD and (extent := _extent(value)) is not None
    }
    batch.reading = Reading(extents, indices, sources)


def _extent(value: Any) -> Extent | None:
    if not _is_looked_at(value):
        return None
    values = value.numpy()  # torch would wake all its threads for a few kB
    lowest = counted = int(values.min())
    if lowest < 0:
        below = values[values < 0]
        counted = int(below[below != IGNORE_INDEX].min(initial=0))
    return Extent(lowest, counted, int(values.max()))


def _is_looked_at(value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and value.dtype in WHOLE
    return is_whole and value.device.type == "cpu" and value.numel() > 0


def first_wrong(
    batch: Mapping[str, Any], name: str, below: int, ignored: int | None = IGNORE_INDEX
) -> Wrong | None:
    """The first number of an entry that is not in [0, below), where there is one.

    Looks at the host's alone: never waits for a device. At nothing else where the extents are known, and fit.

    Args:
        ignored: One that may stand there besides; None: none.
    """
    host = on_host(batch)
    reading = getattr(host, "reading", None)
    extent = reading.extents.get(name) if reading is not None else None
    if extent is not None:
        lowest = extent.lowest_counted if ignored == IGNORE_INDEX else extent.lowest
        if lowest >= 0 and extent.highest < below:
            return None
    value = host.get(name)
    if not isinstance(value, Tensor) or not _is_looked_at(value):
        return None
    values = value.numpy()
    wrong = (values < 0) | (values >= below)
    if ignored is not None:
        wrong &= values != ignored
    if not wrong.any():
        return None
    place = np.argwhere(wrong)[0].tolist()
    return Wrong(int(values[tuple(place)]), _sample(reading, place, len(values) if values.ndim else 1))


def _sample(reading: Reading | None, place: Sequence[int], rows: int) -> str:
    if reading is None or rows != len(reading.indices):  # a collate made other rows
        return ""
    source, own = place_of(reading.indices[place[0] if place else 0], reading.sources)
    return f" (sample {own} of {source})" if source else f" (sample {own})"


def place_of(index: int, sources: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Source of a sample, and its index there; an empty name: not known.

    Args:
        index: In the data set of all sources.
        sources: (name, samples) of what it consists of, one behind the other.
    """
    own = index
    for name, samples in sources:
        if own < samples:
            return name, own
        own -= samples
    return "", index
