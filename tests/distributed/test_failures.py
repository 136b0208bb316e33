"""Which errors may be another rank's doing, and what the watchdog's settings do not change."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.tiny import recipe, resolve

from pipeline.distributed.watchdog import is_from_peers
from pipeline.distributed.watchdog_store import Failure, claim
from pipeline.run_directory import open_run_directory


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (dist.DistNetworkError("Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ZeroDivisionError("Connection closed by peer"), False),
    ],
    ids=str,
)
def test_errors_that_other_ranks_may_have_caused(error, may_be):
    assert is_from_peers(error) is may_be


def test_the_first_failure_is_the_jobs():
    store = dist.HashStore()
    first, second = Failure(1, "raised", 2), Failure(0, "hang", 124, 60.0)
    assert claim(store, first) == first
    assert claim(store, second) == first
    assert claim(store, first) == first


def test_the_watchdogs_settings_make_no_other_run(tmp_path):
    split = {"data": "x", "global_batch_size": 4, "deepspeed": None, "world_size": 1}
    opened = []
    for section in ({}, {"timeout_seconds": 60, "hang_seconds": 9, "straggler_share": 1, "bind_cores": True}):
        config, _ = resolve(recipe(runs_dir=str(tmp_path), distributed=section), None, 1)
        directory, lock = open_run_directory(config, split)
        lock.release()
        opened.append(directory)
    assert opened[0] == opened[1]
