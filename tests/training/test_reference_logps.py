"""Reference log-probabilities: of the run's first weights, equal under every split and packing; cached."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.splits import zero
from support.preferences import ALONE, make_recipe, preference_bundle
from support.tiny import resolve

from pipeline.data.batches import as_batch, collate_items
from pipeline.data.reference import (
    REFERENCE_FILE,
    ReferenceCollate,
    ReferenceTable,
    compute_answer_keys,
    restore_reference_logps,
)
from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError, DataError
from pipeline.objectives import LogprobRecorder, build_objective
from pipeline.training.assemble import build_engine
from pipeline.training.reference_logps import ReferenceRows, compute_reference

pytestmark = pytest.mark.slow


def computed(job: Job, split, folder: Path, in_row: int = 1, seed: int = 0, cache: Path | None = None):
    """(keys, log-probabilities) that a run of this split begins with. Collective."""
    tree = make_recipe("dpo", 2, in_row) | {"seed": seed}
    data = preference_bundle(in_row=in_row)
    config, resolved = resolve(tree, split, job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    objective = build_objective(config)
    rows = ReferenceRows(data, resolved.batch_plan.micro_batch_size, 0)
    compute_reference(
        rows, job=job, engine=engine, objective=objective, directory=folder, cache=cache, key="key"
    )
    engine.close()
    table = restore_reference_logps(data, folder, job).collate._table
    return table.keys, table.logps


def hold(found, expected) -> None:
    assert np.array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Log-probabilities of one process."""
    return computed(ALONE, None, tmp_path_factory.mktemp("alone"))


def test_it_is_what_the_model_says_of_each_answer(whole, tmp_path):
    data = preference_bundle()
    config, resolved = resolve(make_recipe("dpo"), None, 1)
    engine = build_engine(config, resolved, ALONE, data)
    recorded = LogprobRecorder(build_objective(config))
    rows = [*range(len(data.train))]
    batch = as_batch(collate_items([data.train[row] for row in rows]))
    engine.eval_step(batch, recorded)
    found = ReferenceCollate(collate_items, ReferenceTable(*whole))([data.train[row] for row in rows])
    torch.testing.assert_close(found["reference_logps"], recorded.logps_BS.float())


@pytest.mark.parametrize("in_row", [2, 4])
def test_it_is_known_by_the_answer_however_many_share_a_row(whole, tmp_path, in_row):
    hold(computed(ALONE, None, tmp_path, in_row), whole)


SPLITS = {
    "ZeRO 3": zero(3),
    "tensor 2": zero(1) | {"tensor_parallel": {"autotp_size": 2}},
    "sequence 2": zero(2) | {"sequence_parallel_size": 2},
    "stages 2": zero(1) | {"pipeline": {"stages": 2}},
}


@pytest.mark.parametrize("split", SPLITS)
def test_it_is_the_same_under_every_split(ranks, whole, tmp_path, split):
    found = ranks(2).run(computed, SPLITS[split], tmp_path)
    for rank in found:
        hold(rank, whole)


def test_a_further_run_from_the_same_weights_takes_it_over(whole, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"
    first = computed(ALONE, None, tmp_path / "a", cache=cache)
    (kept,) = cache.iterdir()
    hold(computed(ALONE, None, tmp_path / "b", cache=cache), first)
    assert f"are from {kept}" in caplog.text
    caplog.clear()
    other = computed(ALONE, None, tmp_path / "c", seed=1, cache=cache)
    assert "are from" not in caplog.text
    assert not np.allclose(other[1], first[1], rtol=1e-3)


def test_one_that_says_something_else_is_computed_anew(tmp_path, caplog):
    """The weights of a frozen base, which are in no digest of the trained weights."""
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"
    first = computed(ALONE, None, tmp_path / "a", cache=cache)
    (kept,) = cache.iterdir()
    from safetensors.numpy import save_file

    save_file({"keys": first[0], "logps": first[1] * 1.01}, kept)
    hold(computed(ALONE, None, tmp_path / "b", cache=cache), first)
    assert "are from" not in caplog.text


def test_a_run_that_lost_it_says_so(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=f"{REFERENCE_FILE} is missing or damaged, .*; restore the file, or start a new run",
    ):
        restore_reference_logps(preference_bundle(), tmp_path, ALONE)
    (tmp_path / REFERENCE_FILE).write_bytes(b"no table")
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        restore_reference_logps(preference_bundle(), tmp_path, ALONE)


def test_an_answer_that_was_not_there_is_an_error(whole):
    data = preference_bundle()
    batch = as_batch(collate_items([data.train[0], data.train[1]]))
    few = ReferenceTable.from_answers(compute_answer_keys(batch).ravel(), np.zeros(4, np.float32))
    collate = ReferenceCollate(collate_items, few)
    assert collate([data.train[1]])["reference_logps"].shape == (1, 2)
    with pytest.raises(DataError, match=r"no reference log-probability .* \(segment 0 of row 1 of a batch\)"):
        replace(data, collate=collate).collate([data.train[1], data.train[2]])
