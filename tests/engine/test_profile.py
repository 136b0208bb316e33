"""DeepSpeed's profilers: their numbers stand in the rows, are right, and change no step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny import deepspeed_json, make_engine, recipe, resolve, settings, token_bundle

from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_loader, build_meters

pytestmark = pytest.mark.slow

STEPS = 3
BATCH = {"micro_batch_size": 2, "global_batch_size": 8}
PARTS = ("forward", "backward", "update")


def rows_of(job: Job, deepspeed: dict[str, Any], folder: str) -> list[dict[str, float]]:
    """What a run logs of each step, with the seconds that a step took here."""
    tree, data = recipe(batch=BATCH), token_bundle()
    config, (_, resolved) = settings(tree, deepspeed).config, resolve(tree, deepspeed, job.ranks.world_size)
    engine, objective = make_engine(job, tree, deepspeed, data), build_objective(config)
    loader = build_loader(config, resolved.plan, data, engine)
    meters = build_meters(
        config, resolved, job=job, engine=engine, objective=objective, directory=Path(folder)
    )
    rows = []
    for step in range(STEPS):
        groups, started = loader.next_group(), time.perf_counter()
        seed_step(config.seed, step, engine.seed_rank)
        meters.observe(engine.train_step(groups, objective, 3e-4, 0))
        took = time.perf_counter() - started
        rows.append(meters.summary().read().row | {"took": took})
    engine.close()
    return rows


def losses(rows: list[dict[str, float]]) -> list[float]:
    return [row["train/loss"] for row in rows]


def test_what_was_asked_for_is_in_the_rows_and_nothing_else_changes(ranks, tmp_path):
    plain = deepspeed_json(2)
    asked = plain | {
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": 2},
    }
    without = ranks(2).run(rows_of, plain, str(tmp_path))
    rows = ranks(2).run(rows_of, asked, str(tmp_path))
    assert not [key for row in without[0] for key in row if key.startswith(("perf/comm_", "perf/profiled"))]
    assert not [key for row in without[0] for key in row if key == "perf/backward_time_seconds"]
    for each, same in zip(rows, without, strict=True):
        assert losses(each) == losses(same)
        for row in each:
            seconds = [row[f"perf/{part}_time_seconds"] for part in PARTS]
            assert min(seconds) > 0
            assert sum(seconds) <= row["took"]
    assert [key for key in rows[1][1] if key.startswith("perf/profiled")] == []  # one rank counts
    counted, once = rows[0][1], [row for row in rows[0] if "perf/profiled_forward_flops" in row]
    assert once == [counted]  # the second step, as in DeepSpeed
    assert counted["perf/profiled_forward_flops"] >= 2 * counted["perf/profiled_forward_macs"] > 0
    table = (tmp_path / "flops_profile.txt").read_text()
    assert "DeepSpeed Flops Profiler" in table
    assert "LlamaForCausalLM" in table


def parameters_of(job: Job, deepspeed: dict[str, Any]) -> int:
    """Made and trained without a word about collectives, after an engine that counted them."""
    from deepspeed.comm import comm

    comm.comms_logger.comms_dict.clear()
    engine = make_engine(job, recipe(batch=BATCH), deepspeed, token_bundle())
    assert not comm.comms_logger.comms_dict
    return engine.num_parameters


def test_collectives_are_counted_a_step(ranks, tmp_path):
    """ZeRO 2 reduces all gradients every micro-batch, of which there are two, and a rank hands in its half of
    the weights every step."""
    json = deepspeed_json(2) | {"comms_logger": {"enabled": True}}
    rows, _ = ranks(2).run(rows_of, json, str(tmp_path))
    count, _ = ranks(2).run(parameters_of, deepspeed_json(2))
    mib = 4 * count / 2**20
    for row in rows:
        names = {key.removesuffix("_calls") for key in row if key.endswith("_calls")}
        gathered = sum(row[f"{name}_mib"] for name in names if "gather" in name)
        reduced = sum(row[f"{name}_mib"] for name in names if "reduce" in name)
        assert gathered == pytest.approx(mib / 2, rel=0.02)
        assert reduced == pytest.approx(2 * mib, rel=0.02)
        assert all(row[f"{name}_calls"] >= 1 for name in names)
        assert 0 < sum(row[f"{name}_seconds"] for name in names) <= row["took"]
