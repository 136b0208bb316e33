"""A rank that is really slowed is named, with its host, and in the metrics."""

from __future__ import annotations

import json
import os
import platform
import time
from unittest.mock import patch

import pytest
from support.captured_logs import capture_logs
from support.tiny import deepspeed_json, recipe, resolve, token_bundle

from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

SPLITS = {
    "ddp": {"torch": {"parallel": "ddp"}},
    # As in a large model: few parameters are gathered ahead, and none stays.
    "ZeRO 3": deepspeed_json(3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0),
    "pipeline": deepspeed_json(1) | {"pipeline": {"stages": 2}},
}


def warnings_of_a_run(job, folder, split, slow_rank):
    """Events of a run in which the forward of one rank takes 200 ms longer."""
    steps = 24
    config, resolved = resolve(recipe(max_steps=steps, log={"every": 1}), split, job.ranks.world_size)
    run = assemble(config, resolved, job, token_bundle(), folder)

    def delay(module, *_):
        if module.training:
            time.sleep(0.2 / resolved.batch_plan.gradient_accumulation_steps)

    if job.ranks.rank == slow_rank:
        run.engine.module.register_forward_pre_hook(delay)
    with (
        # An idle machine: on an overloaded one the alert waits for hours before it names a rank.
        patch("os.getloadavg", lambda: (0.5, 0.5, 0.5)),
        capture_logs("pipeline.monitoring.trackers") as lines,
        run.trackers,
        TrainLoop(run) as loop,
    ):
        loop.train()
    run.loader.close()
    run.engine.close()
    return [line for line in lines if " is slow: " in line], os.getpid()


def slow_events(folder):
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") == "slow_rank"], rows


@pytest.mark.slow
@pytest.mark.daily("ZeRO 3")
@pytest.mark.parametrize(("split", "slow"), [("ddp", 1), ("ZeRO 3", 0)], ids=["ddp", "ZeRO 3"])
def test_a_slowed_rank_is_named_once_and_measured(ranks, tmp_path, split, slow):
    """Also where the others wait for it in the middle of their forwards, for its share of the parameters."""
    found = ranks(2).run(warnings_of_a_run, tmp_path, SPLITS[split], slow)
    (line,) = found[0][0]
    assert f": rank {slow} on {platform.node()} " in line
    assert f"(pid {found[slow][1]}) is slow: its forward takes" in line
    (event,), rows = slow_events(tmp_path)
    assert (event["rank"], event["phase"]) == (slow, "forward")
    assert event["step"] <= 20
    rows = [row for row in rows if "perf/slowest_rank" in row][1:]
    assert [row["perf/slowest_rank"] for row in rows].count(slow) > 0.8 * len(rows)
    for row in rows:
        assert row["perf/slowest_rank_own_time_seconds"] > 0.02
        assert row["perf/own_time_seconds"] < row["perf/slowest_rank_own_time_seconds"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_is_compared_with_those_of_its_stage(ranks, tmp_path):
    ranks(4).run(warnings_of_a_run, tmp_path, SPLITS["pipeline"], 2)
    (event,), _ = slow_events(tmp_path)
    assert (event["rank"], event["phase"]) == (2, "forward")
    assert "(the median rank of its stage: " in event["message"]
    assert event["step"] <= 20
