"""The peak of each rank of a split model by formula, against what tensors of a real engine's step take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner.test_memory_peak import LLAMA, Run, counted, formula
from planner.test_states import whole_of
from support.tiny import deepspeed_json

from pipeline.distributed.process_group import Job


def split(**more: Any) -> dict[str, Any]:
    return deepspeed_json(0) | more


TENSOR_2 = Run(
    "tensor", LLAMA, rows=4, length=256, how=split(tensor_parallel={"autotp_size": 2}), ranks=2, bound=0.03
)
STAGES_2 = replace(
    TENSOR_2, name="stages", rows=2, accumulated=4, how=split(pipeline={"stages": 2}), bound=0.01
)
RUNS = [
    TENSOR_2,
    # A first block, whose input needs no gradient, keeps no masks of what attention is given.
    replace(TENSOR_2, name="tensor, adapter drops", adapter={"rank": 4, "dropout": 0.1}, bound=0.08),
    replace(TENSOR_2, name="tensor, dora", adapter={"kind": "dora", "rank": 4}),
    replace(TENSOR_2, name="sequence", how=split(sequence_parallel_size=2)),
    replace(TENSOR_2, name="sequence, ZeRO 3", rows=8, how=deepspeed_json(3) | {"sequence_parallel_size": 2}),
    STAGES_2,
    replace(STAGES_2, name="stages, a step of two", rows=4, accumulated=2, bound=0.03),
    # The last stage is said to take more: with more micro-batches it has two at a time.
    replace(STAGES_2, name="stages, a step of one", rows=8, accumulated=1, bound=0.055),
    replace(
        STAGES_2,
        name="stages, every other block recomputes",
        model=LLAMA | {"num_layers": 6},
        recompute=2,
        how=split(pipeline={"stages": 2, "partition": "uniform"}),
        bound=0.02,
    ),
    Run(
        "stages, blocks left over",
        LLAMA | {"num_layers": 6},
        length=256,
        accumulated=6,
        how=split(pipeline={"stages": 4, "partition": "uniform"}),
        ranks=4,
        bound=0.02,
    ),
]


def most_made(job: Job, run: Run) -> int:
    """Bytes, in a step of this rank."""
    return counted(job, run, "cpu")[0]


@pytest.mark.daily("tensor", "sequence, ZeRO 3", "stages")
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_peak_of_each_rank(ranks, run):
    for rank, made in enumerate(ranks(run.ranks).run(most_made, run)):
        peak, before = formula(run, whole_of(run.tree), "cpu", rank, run.ranks)
        assert peak == pytest.approx(before + made, rel=run.bound), rank
