"""Computes the reference log-probabilities of preference losses, once before step 1.

The run's own engine computes them under its own split, for all training and held-out rows. So no second
model is in memory. They are stored in the run's directory, and in the data cache for further runs that start
from the same weights. The run has its own copy because the cache may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
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

EVERY_SECONDS = 10.0  # between two lines of progress
# Tolerance of a cached table: largest difference of recomputed answers, relative to the largest value.
SAME = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class ReferenceRows:
    """All training and held-out rows of a run, and how to read them."""

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

    A cached table is used if its key is the digest of the engine's weights, the data and the precision, and
    if the first batch still gives the same values: frozen base weights under an adapter are in no digest.

    Args:
        rows: Rows to compute.
        job: Ranks of the job.
        engine: Engine with the weights that the run starts from.
        objective: Preference objective of the run.
        directory: Run directory, in which the table is stored.
        cache: Folder with the tables of all runs; `None` to use none.
        key: Further JSON values that the numbers depend on.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    kept = None if cache is None else cache / f"{_digest_inputs(engine, rows.data, job, key)}.safetensors"
    table = job.on_main(lambda: None if kept is None else read_reference_table(kept))
    if table is not None and not _matches_model(table, rows, engine, objective, job):
        table = None
    is_new = table is None
    table = table or _compute_table(rows, engine, objective, job)

    def write() -> None:
        for file in [directory / REFERENCE_FILE, *([kept] if is_new and kept is not None else [])]:
            write_reference_table(file, table)

    job.on_main(write)
    if not is_new and job.ranks.is_main_process:
        log.info("reference: log-probabilities of %d answers are from %s", len(table.keys), kept)
    return add_reference_logps(rows.data, table)


def add_zero_reference(data: DataBundle, objective: Objective) -> DataBundle:
    """Return the data with zeros as reference, so that trial batches have their final size."""
    asked = isinstance(objective, SegmentObjective) and objective.has_reference
    return add_reference_logps(data, ZeroReferenceTable()) if asked else data


def _build_row_loader(rows: ReferenceRows, engine: Engine) -> EvalLoader:
    """Return a loader of this rank's part of all rows, the training rows first."""
    data = rows.data
    return EvalLoader(
        {"training rows": data.train, **data.eval, **data.eval_sets},
        data.collate,
        total=(),
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
    """Yield keys and log-probabilities of each batch; both empty if another rank reports it. Collective."""
    recorded = LogprobRecorder(objective)
    for _, batch, is_real in batches:
        job.progress.at("evaluation")
        recorded.logps_BS = None
        engine.eval_step(batch, recorded)
        if is_real and recorded.logps_BS is not None:
            yield compute_answer_keys(batch).ravel(), recorded.logps_BS.float().cpu().numpy().ravel()
        else:
            yield np.zeros(0, np.uint64), np.zeros(0, np.float32)


def _compute_table(
    rows: ReferenceRows, engine: Engine, objective: SegmentObjective, job: Job
) -> ReferenceTable:
    batches = _build_row_loader(rows, engine)
    data = rows.data
    started = time.monotonic()
    told = time.monotonic()
    sets: list[Any] = [data.train, *data.eval.values(), *data.eval_sets.values()]
    step = rows.micro_batch_size * engine.dp_world_size
    total = sum(-(-len(each) // step) for each in sets)
    found = []
    for number, said in enumerate(_compute_answers(batches, engine, objective, job), start=1):
        found.append(said)
        if job.ranks.is_main_process and time.monotonic() - told > EVERY_SECONDS:
            told = time.monotonic()
            left = (told - started) / number * (total - number)
            log.info("reference: %d of %d batches, %.0f s left", number, total, left)
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
    worst = 0.0
    for keys, logps in _compute_answers(islice(_build_row_loader(rows, engine), 1), engine, objective, job):
        known = table.look_up(keys)
        is_answer = keys != 0
        if is_answer.any():
            largest = float(np.abs(logps[is_answer]).max())
            worst = float(np.abs(known - logps)[is_answer].max()) / largest
    allowed = SAME[engine.precision]
    return all(each <= allowed for each in job.gather_object(worst))


def _digest_inputs(engine: Engine, data: DataBundle, job: Job, key: Any) -> str:
    """Return the digest of the engine's weights, the data and `key`, the same for every split. Collective."""
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    own: dict[str, int] = {}
    for shard in engine.shards():
        if shard.kind == WEIGHT and shard.values is not None:
            words = shard.values.detach().view(views[shard.values.element_size()])
            own[shard.name] = own.get(shard.name, 0) + int(words.sum(dtype=torch.int64))
    sums: dict[str, int] = {}
    for each in job.gather_object(own):
        for name, value in each.items():
            sums[name] = (sums.get(name, 0) + value) % 2**64
    sets = {**data.eval, **data.eval_sets}
    sizes = {name: len(each) for name, each in sets.items()}  # type: ignore[arg-type]
    known = [sorted(sums.items()), data.fingerprint, sizes, engine.precision, key]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
