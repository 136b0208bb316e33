"""Computes the reference log-probabilities of preference losses, once before step 1.

The run's own engine computes them under its own split, for all training and held-out rows, so memory holds
no second model. They are stored in the run's directory, and in the data cache for further runs that start
from the same weights. The run has its own copy because the cache may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint.shards import WEIGHT
from pipeline.data.bundle import DataBundle
from pipeline.data.loader import EvalLoader
from pipeline.data.reference import (
    REFERENCE_FILE,
    AnswerKeys,
    ReferenceTable,
    ZeroReferenceTable,
    add_reference_logps,
    compute_answer_keys,
    read_reference_table,
    write_reference_table,
)
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.objectives import LogprobRecorder, Objective, SegmentObjective

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_SECONDS = 10.0
# Largest difference between cached and recomputed log-probabilities, divided by the largest recomputed one.
MAX_RELATIVE_DIFFERENCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class ReferenceRows:
    """All training and held-out rows of a run, and the settings of the loader that reads them."""

    data: DataBundle
    micro_batch_size: int
    num_workers: int


def compute_reference(
    rows: ReferenceRows,
    *,
    job: Job,
    engine: Engine,
    objective: SegmentObjective,
    directory: Path,
    cache: Path | None,
    key: Any,
) -> DataBundle:
    """Return the data of a new run with `reference_logps` in its batches. Collective.

    A cached table is used if its name is the digest of the engine's weights, the data and the precision, and
    if recomputing the first batch gives the same values. The second check is needed because the digest leaves
    out the frozen base weights under an adapter.

    Args:
        rows: Rows whose reference log-probabilities are wanted.
        job: Ranks of the job.
        engine: Engine with the weights that the run starts from.
        objective: Preference objective of the run.
        directory: Run directory, in which the table is stored.
        cache: Folder with the tables of all runs; `None` to use none.
        key: Further JSON values on which the numbers depend; they are part of the cache key.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    cached_file = (
        None if cache is None else cache / f"{_digest_inputs(engine, rows.data, job, key)}.safetensors"
    )
    table = job.run_on_main_rank(lambda: None if cached_file is None else read_reference_table(cached_file))
    if table is not None and not _matches_model(table, rows, engine, objective, job):
        table = None
    is_new = table is None
    table = table or _compute_table(rows, engine, objective, job)

    def write() -> None:
        write_reference_table(directory / REFERENCE_FILE, table)
        if is_new and cached_file is not None:
            write_reference_table(cached_file, table)

    job.run_on_main_rank(write)
    if not is_new and job.ranks.is_main_process:
        log.info("reference: log-probabilities of %d answers are from %s", len(table.keys), cached_file)
    return add_reference_logps(rows.data, table)


def add_zero_reference(data: DataBundle, objective: Objective) -> DataBundle:
    """Return the data with zero reference log-probabilities; unchanged if the objective uses no reference.

    So batches of a memory measurement are as large as those of training.
    """
    needs_reference = isinstance(objective, SegmentObjective) and objective.has_reference
    return add_reference_logps(data, ZeroReferenceTable()) if needs_reference else data


def _build_row_loader(rows: ReferenceRows, engine: Engine) -> EvalLoader:
    """Return a loader of this rank's part of all rows, the training rows first."""
    data = rows.data
    return EvalLoader(
        {"training rows": data.train, **data.eval, **data.eval_sets},
        data.collate,
        names_in_mean=(),
        micro_batch_size=rows.micro_batch_size,
        dp_rank=engine.dp_rank,
        dp_world_size=engine.dp_world_size,
        max_samples=None,
        num_workers=rows.num_workers,
        pin_memory=engine.device.type == "cuda",
    )


def _compute_answers(
    batches: Iterable[Any], engine: Engine, objective: SegmentObjective, job: Job
) -> Iterator[tuple[AnswerKeys, np.ndarray[Any, Any]]]:
    """Yield (keys, log-probabilities) of each batch. Collective.

    Both are empty for padding batches, and on ranks that do not compute the log-probabilities.
    """
    recorded = LogprobRecorder(objective)
    for _, batch, is_real in batches:
        job.progress.start_activity("evaluation")
        recorded.logps_BS = None  # only ranks that compute the loss set it
        engine.eval_step(batch, recorded)
        if is_real and recorded.logps_BS is not None:
            yield compute_answer_keys(batch).ravel(), recorded.logps_BS.float().cpu().numpy().ravel()
        else:
            yield np.zeros(0, np.uint64), np.zeros(0, np.float32)


def _compute_table(
    rows: ReferenceRows, engine: Engine, objective: SegmentObjective, job: Job
) -> ReferenceTable:
    """Compute the log-probabilities of all rows and gather them on all ranks. Collective."""
    batches = _build_row_loader(rows, engine)
    data = rows.data
    started = time.monotonic()
    last_line = started
    sets: list[Any] = [data.train, *data.eval.values(), *data.eval_sets.values()]
    rows_per_batch = rows.micro_batch_size * engine.dp_world_size
    total = sum(math.ceil(len(each) / rows_per_batch) for each in sets)
    found = []
    for number, answers in enumerate(_compute_answers(batches, engine, objective, job), start=1):
        found.append(answers)
        if job.ranks.is_main_process and time.monotonic() - last_line > PROGRESS_INTERVAL_SECONDS:
            last_line = time.monotonic()
            seconds_left = (last_line - started) / number * (total - number)
            log.info("reference: %d of %d batches, %.0f s left", number, total, seconds_left)
    own = tuple(np.concatenate(each) for each in zip(*found, strict=True))
    keys, logps = (np.concatenate(each) for each in zip(*job.gather_object(own), strict=True))
    table = ReferenceTable.from_answers(keys, logps)
    if job.ranks.is_main_process:
        seconds = time.monotonic() - started
        log.info("reference: log-probabilities of %d answers in %.1f s", len(table.keys), seconds)
    return table


def _matches_model(
    table: ReferenceTable, rows: ReferenceRows, engine: Engine, objective: SegmentObjective, job: Job
) -> bool:
    """Return whether the table agrees with the model on the first batch. Collective.

    Frozen base weights are in no digest, so the table's name alone does not prove this.
    """
    relative_difference = 0.0
    for keys, logps in _compute_answers(islice(_build_row_loader(rows, engine), 1), engine, objective, job):
        cached_logps = table.look_up(keys)
        is_answer = keys != 0  # 0 is padding
        if is_answer.any():
            largest = float(np.abs(logps[is_answer]).max())
            relative_difference = float(np.abs(cached_logps - logps)[is_answer].max()) / largest
    allowed = MAX_RELATIVE_DIFFERENCE[engine.precision]
    return all(each <= allowed for each in job.gather_object(relative_difference))


def _digest_inputs(engine: Engine, data: DataBundle, job: Job, key: Any) -> str:
    """Return the digest of the engine's weights, the data and `key`, the same for every split. Collective."""
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    own: dict[str, int] = {}
    for shard in engine.shards():
        if shard.kind == WEIGHT and shard.values is not None:
            # A sum of the raw bits depends neither on the order nor on the split.
            words = shard.values.detach().view(views[shard.values.element_size()])
            own[shard.name] = own.get(shard.name, 0) + int(words.sum(dtype=torch.int64))
    sums: dict[str, int] = {}
    for each in job.gather_object(own):
        for name, value in each.items():
            sums[name] = (sums.get(name, 0) + value) % 2**64
    sets = {**data.eval, **data.eval_sets}
    sizes = {name: len(each) for name, each in sets.items()}  # type: ignore[arg-type]
    digest_inputs = [sorted(sums.items()), data.fingerprint, sizes, engine.precision, key]
    return hashlib.sha256(json.dumps(digest_inputs, sort_keys=True).encode()).hexdigest()[:32]
