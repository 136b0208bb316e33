"""Host memory while an engine is made: a rank has its own part of the model, never all of it."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from parity.splits import LARGE, TWO_STAGES, zero
from support.memory import reachable_tensor_bytes
from support.rank_pool import RankPool
from support.resume_across_splits import GatheredShards, assemble_tensors, copy_shards
from support.tiny import make_engine, recipe, token_bundle
from support.weights import SIZES

from pipeline.distributed.process_group import Job
from pipeline.engine.memory import is_malloc_tuned
from pipeline.monitoring.metrics import read_peak_resident_bytes, read_resident_bytes, reset_resident_peak

pytestmark = pytest.mark.slow

TREE = recipe(model=LARGE)
STAGES = zero(0) | TWO_STAGES


def peak_while_made(job: Job, tree: dict[str, Any], split: dict[str, Any]) -> tuple[float, float]:
    """(most resident memory while the engine is made, tensors held after it), in sizes of the fp32 model."""
    data = token_bundle()
    make_engine(job, recipe(model=LARGE | SIZES), split, data)  # what is imported and allocated once
    gc.collect()
    held = reachable_tensor_bytes()
    resident = read_resident_bytes()
    reset_resident_peak()
    engine = make_engine(job, tree, split, data)
    size = 4 * engine.num_parameters
    gc.collect()
    return (read_peak_resident_bytes() - resident) / size, (reachable_tensor_bytes() - held) / size


def test_a_stage_is_all_that_a_rank_ever_has(ranks):
    for peak, held in ranks(2).run(peak_while_made, TREE, STAGES):
        assert 0.45 < held < 0.55
        assert peak < 1


@pytest.mark.nightly
@pytest.mark.skipif(is_malloc_tuned(os.environ), reason="the environment says how malloc is to work")
@pytest.mark.parametrize(
    ("half", "most"), [({}, 2.3), ({"bf16": {"enabled": True}}, 1.9)], ids=["fp32", "bf16"]
)
def test_zero3_gives_back_what_it_drew_to_shard_it(half, most):
    """Held: a half each of parameters, fp32 copies and gradients. Beside it only some modules' weights.

    On ranks without a past: what earlier engines left in a heap would be taken first, and hide it.
    """
    with RankPool(2) as pool:
        for peak, _ in pool.run(peak_while_made, TREE, zero(3) | half):
            assert peak < most


def test_where_it_is_cut_does_not_decide_the_weights(ranks):
    """Random numbers stay in step on ranks that keep other parts."""
    found = []
    for split in (STAGES, zero(0) | {"pipeline": {"stages": 2, "partition": "uniform"}}, zero(0)):
        shards = [shard for rank in ranks(2).run(weights, recipe(), split) for shard in rank]
        found.append(assemble_tensors(GatheredShards({}, shards)))
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for name, values in found[2].items():
        assert (found[0][name] == values).all(), name
        assert (found[1][name] == values).all(), name


def weights(job: Job, tree: dict[str, Any], split: dict[str, Any]) -> list[Any]:
    """This rank's shards of the initial weights."""
    written = copy_shards(make_engine(job, tree, split, token_bundle()))
    return [shard for shard in written if shard[1] == "weight"]
