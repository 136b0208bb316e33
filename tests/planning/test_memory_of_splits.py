"""The peak of each rank of a split model by formula, against what tensors of a real engine's step take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning.test_memory_peak import LLAMA, Run, counted, formula
from planning.test_states import whole_of
from support.tiny import deepspeed_json

from pipeline.distributed.process_group import Job

WHOLE = Run("tensor", LLAMA, rows=4, length=256)


def split(**more: Any) -> dict[str, Any]:
    return deepspeed_json(0) | more


RUNS = [
    replace(WHOLE, how=split(tensor_parallel={"autotp_size": 2})),
    replace(WHOLE, name="sequence", how=split(sequence_parallel_size=2)),
    replace(WHOLE, name="sequence, ZeRO 3", rows=8, how=deepspeed_json(3) | {"sequence_parallel_size": 2}),
    replace(WHOLE, name="stages", rows=2, accumulated=4, how=split(pipeline={"stages": 2})),
]


def most_made(job: Job, run: Run) -> int:
    """Bytes, in a step of this rank."""
    return counted(job, run, "cpu")[0]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_peak_of_each_rank(ranks, run):
    for rank, made in enumerate(ranks(2).run(most_made, run)):
        peak, before = formula(run, whole_of(run.tree), "cpu", rank, 2)
        assert peak == pytest.approx(before + made, rel=0.05), rank
