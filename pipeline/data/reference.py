"""Table of the reference model's log-probabilities of answers, by a hash of the answers' tokens.

An answer is identified by xxh3 of its ids and labels. So its row, order and batch do not matter, a custom
data set needs no sample ids, and packing may change between runs. The collate function looks the values up. A
run saves the table in its directory, since the cache may be deleted.

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
    """Return hashes (B, S) of the tokens and labels of each segment; 0 if there is no segment."""
    ids, segments, kinds = (batch[name].numpy() for name in ("input_ids", "segments", "segment_kinds"))
    labels = batch["shift_labels" if "shift_labels" in batch else "labels"].numpy()
    keys = np.zeros(kinds.shape, dtype=np.uint64)
    for row, segment in zip(*np.nonzero(kinds), strict=True):
        own = segments[row] == segment
        content = np.stack([ids[row][own], labels[row][own]]).astype(np.int64).tobytes()
        keys[row, segment] = xxhash.xxh3_64_intdigest(content) or 1
    return keys


class ReferenceTable:
    """Log-probabilities of answers under the reference model.

    Args:
        keys: (N,) hashes of the answers, sorted.
        logps: (N,) log-probabilities, fp32.
    """

    def __init__(self, keys: AnswerKeys, logps: NDArray[np.float32]) -> None:
        self.keys = keys
        self.logps = logps

    @staticmethod
    def from_answers(keys: AnswerKeys, logps: NDArray[np.float32]) -> ReferenceTable:
        """Return the table of answers that are in any order and may occur several times."""
        unique, places = np.unique(keys, return_index=True)
        is_answer = unique != 0
        return ReferenceTable(unique[is_answer], logps[places][is_answer])

    def look_up(self, keys: AnswerKeys) -> NDArray[np.float32]:
        """Return log-probabilities (B, S): 0 for no segment, NaN for an answer that is not in the table."""
        known = np.append(self.keys, np.uint64(0))
        logps = np.append(self.logps, np.float32(np.nan))
        places = self.keys.searchsorted(keys)
        found = np.where(known[places] == keys, logps[places], np.nan)
        return np.where(keys == 0, 0.0, found).astype(np.float32)


class ZeroReferenceTable(ReferenceTable):
    """Table of zeros, for measurements in which only the shapes of batches matter."""

    def __init__(self) -> None:
        super().__init__(np.zeros(0, np.uint64), np.zeros(0, np.float32))

    def look_up(self, keys: AnswerKeys) -> NDArray[np.float32]:
        """Return zeros of the shape of the keys."""
        return np.zeros(keys.shape, np.float32)


class ReferenceCollate:
    """Collate function that adds `reference_logps` (B, S), fp32, to the batches of another one."""

    def __init__(self, collate: Collate, table: ReferenceTable) -> None:
        self._collate = collate
        self._table = table

    def __call__(self, items: Any) -> Batch:
        """Return a batch with the log-probabilities of its answers.

        Raises:
            DataError: An answer is not in the table.
        """
        batch: Batch = as_batch(self._collate(items))
        found = self._table.look_up(compute_answer_keys(batch))
        if np.isnan(found).any():
            row, segment = np.argwhere(np.isnan(found))[0].tolist()
            raise DataError(
                f"there is no reference log-probability of an answer (segment {segment} of row {row} of a "
                "batch): it was not in the data when the run began, or its tokens have changed; use that "
                "data, or start a new run"
            )
        logps: Tensor = torch.from_numpy(found)
        batch["reference_logps"] = logps
        return batch


def add_reference_logps(data: DataBundle, table: ReferenceTable) -> DataBundle:
    """Return data whose batches have `reference_logps` from the table."""
    return replace(data, collate=ReferenceCollate(data.collate, table))


def restore_reference_logps(data: DataBundle, directory: Path, job: Job) -> DataBundle:
    """Return data whose batches have `reference_logps` from the directory of a resumed run. Collective.

    Raises:
        CheckpointError: The table in the run's directory is missing or damaged.
    """

    def read() -> ReferenceTable:
        table = read_reference_table(directory / REFERENCE_FILE)
        if table is None:
            raise CheckpointError(
                f"{directory / REFERENCE_FILE} is missing or damaged, and cannot be computed from weights "
                "that were trained since; restore the file, or start a new run"
            )
        return table

    return add_reference_logps(data, job.run_on_main_rank(read))


def read_reference_table(file: Path) -> ReferenceTable | None:
    """Return the table in a file; `None` if the file is missing or damaged."""
    try:
        found = load(file.read_bytes())
        keys = found["keys"]
        logps = found["logps"]
    except (OSError, SafetensorError, KeyError):
        return None
    is_table = keys.dtype == np.uint64 and logps.dtype == np.float32 and keys.shape == logps.shape
    return ReferenceTable(keys, logps) if is_table and keys.ndim == 1 else None


def write_reference_table(file: Path, table: ReferenceTable) -> None:
    """Write the table to a file, which replaces an older one atomically.

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
