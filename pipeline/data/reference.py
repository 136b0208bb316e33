"""What the reference says of answers, known by their tokens: the same in any row, order and batch.

Shapes: B rows, T tokens, S segments of a row, N answers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data.batches import Batch, as_batch
from pipeline.data.bundle import Collate
from pipeline.errors import DataError

Keys = NDArray[np.uint64]


def keys_of(batch: Batch) -> Keys:
    """(B, S): digests of the tokens and labels of each segment; 0 where there is none."""
    ids, segments, kinds = (batch[name].numpy() for name in ("input_ids", "segments", "segment_kinds"))
    labels = batch["shift_labels" if "shift_labels" in batch else "labels"].numpy()
    keys = np.zeros(kinds.shape, dtype=np.uint64)
    for row, segment in zip(*np.nonzero(kinds), strict=True):
        own = segments[row] == segment
        content = np.stack([ids[row][own], labels[row][own]]).astype(np.int64).tobytes()
        keys[row, segment] = xxhash.xxh3_64_intdigest(content) or 1
    return keys


class ReferenceTable:
    """Log-probabilities under the reference.

    Args:
        keys: (N,), in order.
        logps: (N,), fp32.
    """

    def __init__(self, keys: Keys, logps: NDArray[np.float32]) -> None:
        self.keys, self.logps = keys, logps

    @staticmethod
    def of(keys: Keys, logps: NDArray[np.float32]) -> ReferenceTable:
        """Of answers in any order, of which some may be there several times."""
        unique, places = np.unique(keys, return_index=True)
        is_answer = unique != 0
        return ReferenceTable(unique[is_answer], logps[places][is_answer])

    def look_up(self, keys: Keys) -> NDArray[np.float32]:
        """Of keys (B, S), 0 where there is no segment; NaN of an answer that is not there."""
        places = np.minimum(self.keys.searchsorted(keys), max(0, len(self.keys) - 1))
        if not len(self.keys):
            return np.where(keys == 0, 0.0, np.nan).astype(np.float32)
        found = np.where(self.keys[places] == keys, self.logps[places], np.nan)
        return np.where(keys == 0, 0.0, found).astype(np.float32)


class OfZeros(ReferenceTable):
    """What stands in for the reference where only its size counts."""

    def __init__(self) -> None:
        super().__init__(np.zeros(0, np.uint64), np.zeros(0, np.float32))

    def look_up(self, keys: Keys) -> NDArray[np.float32]:
        """Of keys (B, S): zeros."""
        return np.zeros(keys.shape, np.float32)


class WithReference:
    """A collate whose batches have `reference_logps` (B, S), fp32, besides."""

    def __init__(self, collate: Collate, table: ReferenceTable) -> None:
        self._collate = collate
        self._table = table

    def __call__(self, items: Any) -> Batch:
        """As the collate.

        Raises:
            DataError: an answer is in no table.
        """
        batch: Batch = as_batch(self._collate(items))
        found = self._table.look_up(keys_of(batch))
        if np.isnan(found).any():
            row, segment = np.argwhere(np.isnan(found))[0].tolist()
            raise DataError(
                f"the reference says nothing of an answer (segment {segment} of row {row} of a batch): it was"
                " not in the data when the run began, or its tokens were others; use that data, or start a "
                "new run"
            )
        logps: Tensor = torch.from_numpy(found)
        batch["reference_logps"] = logps
        return batch
