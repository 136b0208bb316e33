"""Reference log-probabilities of answers, looked up by their tokens: the same in any row, order and batch.

A run keeps the table in a file of its directory.

Shapes: B rows, T tokens, S segments of a row, N answers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from pipeline.data.batches import Batch, as_batch
from pipeline.data.bundle import Collate, DataBundle
from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError, DataError
from pipeline.files import replace_file

REFERENCE_FILE = "reference_logps.safetensors"
AnswerKeys = NDArray[np.uint64]


def compute_answer_keys(batch: Batch) -> AnswerKeys:
    """Return (B, S): digests of the tokens and labels of each segment; 0 where there is none."""
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

    def __init__(self, keys: AnswerKeys, logps: NDArray[np.float32]) -> None:
        self.keys, self.logps = keys, logps

    @staticmethod
    def from_answers(keys: AnswerKeys, logps: NDArray[np.float32]) -> ReferenceTable:
        """Return the table of answers in any order, some of them several times."""
        unique, places = np.unique(keys, return_index=True)
        is_answer = unique != 0
        return ReferenceTable(unique[is_answer], logps[places][is_answer])

    def look_up(self, keys: AnswerKeys) -> NDArray[np.float32]:
        """Return values of keys (B, S), 0 where there is no segment; NaN of an answer that is not there."""
        known, logps = np.append(self.keys, np.uint64(0)), np.append(self.logps, np.float32(np.nan))
        places = self.keys.searchsorted(keys)
        found = np.where(known[places] == keys, logps[places], np.nan)
        return np.where(keys == 0, 0.0, found).astype(np.float32)


class ZeroReferenceTable(ReferenceTable):
    """Table of zeros, for trials in which only the size of a batch matters."""

    def __init__(self) -> None:
        super().__init__(np.zeros(0, np.uint64), np.zeros(0, np.float32))

    def look_up(self, keys: AnswerKeys) -> NDArray[np.float32]:
        """Return zeros of the shape of the keys."""
        return np.zeros(keys.shape, np.float32)


class ReferenceCollate:
    """A collate whose batches have `reference_logps` (B, S), fp32, besides."""

    def __init__(self, collate: Collate, table: ReferenceTable) -> None:
        self._collate = collate
        self._table = table

    def __call__(self, items: Any) -> Batch:
        """Return a batch of the collate with the log-probabilities.

        Raises:
            DataError: an answer is in no table.
        """
        batch: Batch = as_batch(self._collate(items))
        found = self._table.look_up(compute_answer_keys(batch))
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


def add_reference_logps(data: DataBundle, table: ReferenceTable) -> DataBundle:
    """Return data whose batches have what the table says of their answers."""
    return replace(data, collate=ReferenceCollate(data.collate, table))


def restore_reference_logps(data: DataBundle, directory: Path, job: Job) -> DataBundle:
    """Return the data of a run that has begun: its batches have `reference_logps`. Collective.

    Raises:
        CheckpointError: the run's directory does not have them any more.
    """

    def read() -> ReferenceTable:
        table = read_reference_table(directory / REFERENCE_FILE)
        if table is None:
            raise CheckpointError(
                f"{directory / REFERENCE_FILE} is gone or damaged, and the run's first weights cannot be "
                "computed from its later ones; bring the file back, or start a new run"
            )
        return table

    return add_reference_logps(data, job.on_main(read))


def read_reference_table(file: Path) -> ReferenceTable | None:
    """Return the table of a file; `None` if it is missing or damaged."""
    try:
        found = load(file.read_bytes())
        keys, logps = found["keys"], found["logps"]
    except (OSError, SafetensorError, KeyError):
        return None
    is_table = keys.dtype == np.uint64 and logps.dtype == np.float32 and keys.shape == logps.shape
    return ReferenceTable(keys, logps) if is_table and keys.ndim == 1 else None


def write_reference_table(file: Path, table: ReferenceTable) -> None:
    """Write the table to a file, which replaces an older one once it is whole.

    Raises:
        CheckpointError: The file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, save({"keys": table.keys, "logps": table.logps}))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written: {error.strerror or error}; make room, or use another folder"
        ) from None
