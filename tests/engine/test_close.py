"""Two engines one after the other in one process: the first leaves no group, thread, parameter or patch."""

from __future__ import annotations

import gc
import sys
import time

import psutil
import pytest
import torch
from support.tiny import deepspeed_json, recipe, resolve, token_bundle
from torch.distributed import distributed_c10d

from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

pytestmark = pytest.mark.slow

CPU = {"device": "cpu"}
SPLITS = {
    "ddp": {"torch": {"parallel": "ddp"}},
    "zero0-bf16": deepspeed_json(0, "bf16"),
    "zero1": deepspeed_json(1),
    "zero2-fp16": deepspeed_json(2, "fp16"),
    "zero3": deepspeed_json(3),
    "hpz": deepspeed_json(3, zero_hpz_partition_size=2),
    "offload": deepspeed_json(3, "bf16", offload_optimizer=CPU, offload_param=CPU),
    "tensor": deepspeed_json(1) | {"tensor_parallel": {"autotp_size": 2}},
    "sequence": deepspeed_json(3) | {"sequence_parallel_size": 2},
    "stages": deepspeed_json(1) | {"pipeline": {"stages": 2}},
}


SETTLES_WITHIN = 30.0
"""Seconds. A thread that has been told to end is there until it has had its turn on a busy machine."""


def alive(most_threads: int = sys.maxsize) -> tuple[int, int, int]:
    """(process groups, threads, parameters) of this process, once it has at most so many threads."""
    gc.collect()
    end = time.monotonic() + SETTLES_WITHIN
    while psutil.Process().num_threads() > most_threads and time.monotonic() < end:
        time.sleep(0.05)
    parameters = sum(type(each) is torch.nn.Parameter for each in gc.get_objects())
    return len(distributed_c10d._world.pg_map), psutil.Process().num_threads(), parameters


def live(job: Job, split):
    """An engine that is made, steps twice and is closed."""
    data = token_bundle()
    config, resolved = resolve(recipe(), split, job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    for _ in range(2):
        engine.train_step(loader.next_group(), objective, 1e-3, 0)
    loader.close()
    working = alive()
    engine.close()
    engine.close()
    return working


def one_after_the_other(job: Job, split):
    live(job, split)  # what torch starts once per process is there from now on
    before = alive()
    working = live(job, split)
    return before, working, alive(most_threads=before[1]), torch.nn.functional.linear is torch._C._nn.linear


@pytest.mark.daily("ddp", "zero2-fp16", "zero3", "stages")
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_nothing_is_left_behind(ranks, split):
    for before, working, after, is_plain in ranks(2).run(one_after_the_other, split, timeout=600):
        assert working[2] > before[2], "the engine has parameters while it lives"
        assert after == before
        assert is_plain, "DeepSpeed's F.linear computes what comes next"
