"""Table of the reference model's log-probabilities of answers, by a hash of the answers' tokens.

An answer and its prompt are a segment of a row. The key of an answer is the xxh3 hash of the token ids and
labels of this segment. So the row and the batch do not matter, a custom data set needs no sample ids, and
packing may change between runs. The collate function looks up the log-probabilities. A run saves the table in
its directory, because the cache may be deleted.

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
"""Hashes of answers, as `compute_answer_keys` returns them; 0 stands for no answer."""


def compute_answer_keys(batch: Batch) -> AnswerKeys:
    """Return hashes (B, S) of the token ids and labels of each segment; 0 if there is no segment.

    Args:
        batch: Batch in host memory, with `input_ids`, `segments` and `shift_labels` or `labels`, all (B, T),
            and `segment_kinds` (B, S).
    """
    ids, segments, kinds = (batch[name].numpy() for name in ("input_ids", "segments", "segment_kinds"))
    labels = batch["shift_labels" if "shift_labels" in batch else "labels"].numpy()
    keys = np.zeros(kinds.shape, dtype=np.uint64)
    for row, segment in zip(*np.nonzero(kinds), strict=True):
        is_in_segment = segments[row] == segment
        content = np.stack([ids[row][is_in_segment], labels[row][is_in_segment]])
        digest = xxhash.xxh3_64_intdigest(content.astype(np.int64).tobytes())
        keys[row, segment] = digest or 1  # 0 stands for no segment
    return keys


class ReferenceTable:
    """Log-probabilities of answers under the reference model.

    Args:
        keys: (N,) hashes of the answers, sorted and without duplicates.
        logps: (N,) log-probability of each answer, fp32.
    """

    def __init__(self, keys: AnswerKeys, logps: NDArray[np.float32]) -> None:
        self.keys = keys
        self.logps = logps

    @staticmethod
    def from_answers(keys: AnswerKeys, logps: NDArray[np.float32]) -> ReferenceTable:
        """Return the table of some answers.

        Args:
            keys: (M,) hashes of the answers, in any order; duplicates and 0 are left out.
            logps: (M,) log-probabilities, fp32.
        """
        unique_keys, indices = np.unique(keys, return_index=True)
        is_answer = unique_keys != 0
        return ReferenceTable(unique_keys[is_answer], logps[indices][is_answer])

    def look_up(self, keys: AnswerKeys) -> NDArray[np.float32]:
        """Return the answers' log-probabilities: 0 for the key 0, NaN for a key that is not in the table."""
        # searchsorted returns N for a key above all others: one further entry makes that a valid index.
        padded_keys = np.append(self.keys, np.uint64(0))
        padded_logps = np.append(self.logps, np.float32(np.nan))
        indices = self.keys.searchsorted(keys)
        logps = np.where(padded_keys[indices] == keys, padded_logps[indices], np.nan)
        return np.where(keys == 0, 0.0, logps).astype(np.float32)


class ZeroReferenceTable(ReferenceTable):
    """Table that returns 0 for every answer, for measurements in which only the shapes of batches matter."""

    def __init__(self) -> None:
        super().__init__(np.zeros(0, np.uint64), np.zeros(0, np.float32))

    def look_up(self, keys: AnswerKeys) -> NDArray[np.float32]:
        """Return zeros of the shape of the keys."""
        return np.zeros(keys.shape, np.float32)


class ReferenceCollate:
    """Collate function that adds `reference_logps` (B, S), fp32, to the batches of another function."""

    def __init__(self, collate: Collate, table: ReferenceTable) -> None:
        self._collate = collate
        self._table = table

    def __call__(self, items: Any) -> Batch:
        """Return a batch with the log-probabilities of its answers.

        Raises:
            DataError: An answer is not in the table.
        """
        batch: Batch = as_batch(self._collate(items))
        values = self._table.look_up(compute_answer_keys(batch))
        is_missing = np.isnan(values)
        if is_missing.any():
            row, segment = np.argwhere(is_missing)[0].tolist()
            raise DataError(
                f"there is no reference log-probability of an answer (segment {segment} of row {row} of a "
                "batch): it was not in the data when the run began, or its tokens have changed; use the data "
                "that the run began with, or start a new run"
            )
        logps: Tensor = torch.from_numpy(values)
        batch["reference_logps"] = logps
        return batch


def add_reference_logps(data: DataBundle, table: ReferenceTable) -> DataBundle:
    """Return data whose batches have `reference_logps` from the table."""
    return replace(data, collate=ReferenceCollate(data.collate, table))


def restore_reference_logps(data: DataBundle, directory: Path, job: Job) -> DataBundle:
    """Return data whose batches have `reference_logps` from the directory of a resumed run. Collective.

    The main rank reads the table, and the others receive it.

    Raises:
        CheckpointError: The table in the run's directory is missing or damaged; raised on every rank.
    """

    def read() -> ReferenceTable:
        table = read_reference_table(directory / REFERENCE_FILE)
        if table is None:
            raise CheckpointError(
                f"{directory / REFERENCE_FILE} is missing or damaged, and cannot be computed again, because "
                "the weights have been trained since; restore the file, or start a new run"
            )
        return table

    return add_reference_logps(data, job.run_on_main_rank(read))


def read_reference_table(file: Path) -> ReferenceTable | None:
    """Return the table in a file; `None` if the file is missing or damaged."""
    try:
        tensors = load(file.read_bytes())
        keys = tensors["keys"]
        logps = tensors["logps"]
    except (OSError, SafetensorError, KeyError):
        return None
    has_right_types = keys.dtype == np.uint64 and logps.dtype == np.float32
    has_right_shapes = keys.ndim == 1 and keys.shape == logps.shape
    return ReferenceTable(keys, logps) if has_right_types and has_right_shapes else None


def write_reference_table(file: Path, table: ReferenceTable) -> None:
    """Write the table to a file and create its folder; an older file is replaced atomically.

    Raises:
        CheckpointError: The file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, save({"keys": table.keys, "logps": table.logps}))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written: {error.strerror or error}; free disk space, or use another folder"
        ) from None
