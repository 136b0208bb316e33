"""One loss curve whatever the split: every ZeRO stage and precision against plain PyTorch in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.tiny import deepspeed_json, recipe, train_curve

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks

# Relative difference allowed per step, in loss and in gradient norm.
BANDS = {"fp32": (2e-6, 2e-5), "bf16": (1e-3, 2e-2), "fp16": (1e-3, 1e-2)}


@cache
def oracle() -> tuple[tuple[float, float], ...]:
    job = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
    return tuple(train_curve(job, recipe(batch={"micro_batch_size": 8}), None))


def largest_difference(curve: list[tuple[float, float]], column: int) -> float:
    return max(abs(a[column] - b[column]) / abs(b[column]) for a, b in zip(curve, oracle(), strict=True))


def test_the_fp16_loss_scale_does_not_show_in_the_curve(ranks):
    """At every stage, up to a scale far above AdamW's eps (DeepSpeed's own default is 2**16)."""
    for stage in (0, 1, 2, 3):
        deepspeed = deepspeed_json(stage)
        deepspeed["fp16"] = {"enabled": True, "initial_scale_power": 14}
        curve = ranks(1).run(train_curve, recipe(), deepspeed)[0]
        assert largest_difference(curve, 0) < BANDS["fp16"][0]
        assert largest_difference(curve, 1) < BANDS["fp16"][1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_and_precision_give_the_oracles_curve(ranks, stage, precision, world_size):
    curves = ranks(world_size).run(train_curve, recipe(), deepspeed_json(stage, precision))
    assert all(curve == curves[0] for curve in curves), "ranks disagree about the loss"
    loss_band, norm_band = BANDS[precision]
    assert largest_difference(curves[0], 0) < loss_band
    assert largest_difference(curves[0], 1) < norm_band
