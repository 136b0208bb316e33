"""What machines are busy with: each once, from the first of its ranks."""

from __future__ import annotations

import math
import platform

import pytest
from support.clock import Clock
from support.record import rows_of
from support.tiny import recipe, resolve, token_bundle

from pipeline.distributed.diagnosis import RankProcess
from pipeline.monitoring.metrics import NodeMeter
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop


def on(*machines: str) -> list[RankProcess]:
    """Ranks on HOST.MACHINE."""
    return [RankProcess(rank, each.partition(".")[0], 1, each) for rank, each in enumerate(machines)]


def test_each_machine_speaks_by_its_first_rank_and_all_of_its_gpus():
    meter = NodeMeter(on("a.1", "a.1", "b.2", "b.2"))
    row = meter.row(
        [[0.1, 0.9, 0.2, 0.9], [0.3, 0.9, 0.4, 0.9], [5.0, 9.0, 6.0, 9.0]], [0.5, 0.7, math.nan, 1.0]
    )
    assert row == {
        "node/a/cpu_utilization": 0.1,
        "node/a/memory_utilization": 0.3,
        "node/a/network_mib_per_second": 5.0,
        "node/a/gpu_utilization": pytest.approx(0.6),
        "node/b/cpu_utilization": 0.2,
        "node/b/memory_utilization": 0.4,
        "node/b/network_mib_per_second": 6.0,
    }


def test_machines_of_one_name_are_told_apart():
    row = NodeMeter(on("a.1", "a.2")).row([[0.1, 0.2], [0.3, 0.4], [5.0, 6.0]])
    assert {key for key in row if "cpu" in key} == {"node/a-0/cpu_utilization", "node/a-1/cpu_utilization"}


def test_rates_are_since_the_last_row():
    clock = Clock()
    meter = NodeMeter([], clock)
    clock.now += 1e12
    assert meter.take()[2] == pytest.approx(0, abs=1e-3)


def trained(job, folder, asked):
    config, resolved = resolve(recipe(max_steps=2, log={"nodes": asked}), None, job.ranks.world_size)
    parts = assemble(config, resolved, job, token_bundle(), folder)
    with parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    parts.loader.close()
    parts.engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_rows_have_it_where_it_is_asked_for(ranks, tmp_path, world_size, asked):
    ranks(world_size).run(trained, tmp_path, asked)
    rows = [row for row in rows_of(tmp_path) if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        told = {key: each for key, each in row.items() if key.startswith("node/")}
        assert len(told) == (3 if asked else 0)
        assert all(key.startswith(f"node/{platform.node()}/") for key in told)
        assert all(0 <= each <= 1 for key, each in told.items() if key.endswith("utilization"))
