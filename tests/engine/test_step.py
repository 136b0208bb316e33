"""Promises of a step: exact token means, parameters unchanged by a bad batch, dropout only in training."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from support.captured_logs import capture_logs
from support.tiny import (
    deepspeed_json,
    make_engine,
    recipe,
    resolve,
    settings,
    token_bundle,
    train_curve,
)
from torch import nn

from pipeline.config.batch_plan import plan_batch
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import Engine
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import CausalLM, CustomLoss, LossSum, build_objective
from pipeline.objectives.linear_cross_entropy import OutputHeads
from pipeline.training.assemble import build_eval_loader

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
STAGES = [None, 0, 1, 2, 3]  # None: plain PyTorch


def json_for(stage: int | None, precision: str = "fp32"):
    return None if stage is None else deepspeed_json(stage, precision)


def run(ranks, stage, function, *arguments, world_size=1):
    """Run on the pool, or for plain PyTorch in this process."""
    return function(ALONE, *arguments) if stage is None else ranks(world_size).run(function, *arguments)[0]


def parameters(engine: Engine) -> list[torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.slow
@pytest.mark.daily("None", "2", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_and_micro_batch_size_do_not_change_the_curve(ranks, stage):
    """8 x 1 = 4 x 2 = 1 x 8 with uneven masks: no mean of means anywhere."""
    curves = [
        run(
            ranks,
            stage,
            train_curve,
            recipe(batch={"micro_batch_size": m, "global_batch_size": 8}),
            json_for(stage),
            4,
        )
        for m in (8, 4, 1)
    ]
    for curve in curves[1:]:
        for (loss, norm), (expected_loss, expected_norm) in zip(curve, curves[0], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert norm == pytest.approx(expected_norm, rel=1e-5)


class Poisoned(CausalLM):
    """The same loss, times NaN or infinity when told to."""

    factor = 1.0

    def __call__(self, model, batch) -> LossSum:
        loss = super().__call__(model, batch)
        return LossSum(loss.loss_sum * self.factor, loss.count)


def good_bad_good(job: Job, tree, deepspeed, factor: float):
    """Did a bad step leave the parameters alone, was it counted, and does a good one move them after it?"""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed, data)
    objective = Poisoned()
    batch = {key: value[None].repeat(2, 1) for key, value in data.train[engine.dp_rank].items()}
    engine.train_step([batch], objective, 1e-2, False)
    before = parameters(engine)
    # Only the last rank's loss is bad: the others must skip with it.
    objective.factor = factor if job.ranks.rank == job.ranks.world_size - 1 else 1.0
    skipped = engine.train_step([batch], objective, 1e-2, False).skipped
    after = parameters(engine)
    objective.factor = 1.0
    good = engine.train_step([batch], objective, 1e-2, False)
    moved = parameters(engine)
    return (
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        float(skipped),
        any(not torch.equal(a, b) for a, b in zip(after, moved, strict=True)) and float(good.skipped) == 0.0,
        all(bool(torch.isfinite(p).all()) for p in moved),
    )


CUT = {
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "sequence": {"sequence_parallel_size": 2},
    "stages": {"pipeline": {"stages": 2}},
}
CPU = {"device": "cpu"}
BAD = {
    "plain": (1, None),
    "ddp": (2, {"torch": {"parallel": "ddp"}}),
    "zero0-fp32-1": (1, deepspeed_json(0)),
    **{
        f"zero{stage}-{precision}-2": (2, deepspeed_json(stage, precision))
        for stage, precision in itertools.product(range(4), ["fp32", "bf16", "fp16"])
    },
    **{
        f"{name}-zero{stage}-{precision}": (2, deepspeed_json(stage, precision) | CUT[name])
        for name, stage, precision in [
            *itertools.product(["stages"], [0, 1], ["fp32", "bf16", "fp16"]),
            *(("tensor", 0, "bf16"), ("tensor", 1, "fp32"), ("tensor", 2, "fp16")),
            *(("sequence", 0, "fp16"), ("sequence", 1, "bf16"), ("sequence", 2, "fp32")),
        ]
    },
    "offload-zero1-fp16": (2, deepspeed_json(1, "fp16", offload_optimizer=CPU)),
    "offload-zero2-fp32": (2, deepspeed_json(2, offload_optimizer=CPU)),
    "offload-zero3-bf16": (2, deepspeed_json(3, "bf16", offload_optimizer=CPU, offload_param=CPU)),
}
"""Split -> ranks, DeepSpeed JSON (None: plain PyTorch)."""


@pytest.mark.slow
@pytest.mark.daily(
    *("plain-nan", "ddp-nan", "zero0-fp32-1-nan", "zero1-fp32-2-inf", "zero2-fp16-2-nan", "zero3-bf16-2-nan"),
    *("stages-zero1-bf16-nan", "tensor-zero1-fp32-inf", "sequence-zero1-bf16-nan", "offload-zero2-fp32-nan"),
)
@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize("split", BAD)
def test_a_bad_batch_of_the_last_rank_changes_no_parameter(ranks, split, factor):
    world_size, json = BAD[split]
    arguments = (recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1}), json, factor)
    if json is None:
        answers = [good_bad_good(ALONE, *arguments)]
    else:
        answers = ranks(world_size).run(good_bad_good, *arguments, timeout=500)
    for unchanged, skipped, moved, finite in answers:
        assert unchanged
        assert skipped == 1.0
        assert moved
        assert finite


def overflow_once(job: Job, tree, deepspeed):
    """Steps with a loss scale far too high: DeepSpeed skips and halves until gradients fit into fp16."""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed, data)
    batch = {key: value[None].repeat(2, 1) for key, value in data.train[0].items()}
    results = [engine.train_step([batch], CausalLM(), 1e-3, False) for _ in range(24)]
    return [(float(r.skipped), r.loss_scale) for r in results]


def overflow_with_logits(job: Job, tree, deepspeed):
    with patch.object(OutputHeads, "find", lambda *_: None):
        return overflow_once(job, tree, deepspeed)


@pytest.mark.slow
@pytest.mark.daily("2")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fp16_overflow_is_skipped_counted_and_the_scale_falls(ranks, stage):
    deepspeed = deepspeed_json(stage)
    deepspeed["fp16"] = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    batch = {"micro_batch_size": 2, "gradient_accumulation_steps": 1}
    steps = ranks(1).run(overflow_once, recipe(batch=batch), deepspeed)[0]
    assert steps[0][0] == 1.0
    assert steps[-1][0] == 0.0
    assert steps[-1][1] < 2**24
    assert steps == ranks(1).run(overflow_with_logits, recipe(batch=batch), deepspeed)[0]


def modes(job: Job, tree, deepspeed):
    """Is the module in training mode in train_step, after an evaluation in between?"""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed, data)
    seen = []

    class Watching(CausalLM):
        def __call__(self, model, batch):
            seen.append(engine.module.training)
            return super().__call__(model, batch)

    batch = {key: value[None] for key, value in data.train[0].items()}
    engine.train_step([batch], Watching(), 1e-3, False)
    engine.eval_step(batch, Watching())
    engine.train_step([batch], Watching(), 1e-3, False)
    return seen


@pytest.mark.slow
@pytest.mark.daily("None", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_dropout_is_off_in_evaluation_and_on_again_after(ranks, stage):
    tree = recipe(batch={"micro_batch_size": 1, "gradient_accumulation_steps": 1})
    assert run(ranks, stage, modes, tree, json_for(stage)) == [True, False, True]


def evaluated(job: Job, tree, deepspeed):
    data = token_bundle()
    config = settings(tree, deepspeed).config
    engine = make_engine(job, tree, deepspeed, data)
    loader = build_eval_loader(config, plan_batch(config.batch, engine.dp_world_size), data, engine)
    return evaluate(engine, build_objective(config), loader, job)


@pytest.mark.slow
def test_evaluation_is_the_same_under_every_split(ranks):
    """19 samples on 1 and 2 ranks in batches of 2, 3 and 16: uneven everywhere, one rank without any."""
    rows = [evaluated(ALONE, recipe(batch={"micro_batch_size": 16}), None)]
    sharded = deepspeed_json(3)
    divided = deepspeed_json(1)
    for world_size, micro, json in [
        *((1, 3, sharded), (2, 2, sharded), (2, 16, sharded), (2, 64, sharded)),
        *((2, 3, divided | cut) for cut in CUT.values()),
        (2, 16, {"torch": {"parallel": "ddp"}}),
    ]:
        rows += ranks(world_size).run(evaluated, recipe(batch={"micro_batch_size": micro}), json)
    for row in rows[1:]:
        assert row == pytest.approx(rows[0], rel=1e-6)
    assert rows[0]["eval/perplexity"] == pytest.approx(math.exp(rows[0]["eval/loss"]))


class Peak(nn.Module):
    """Four linear layers that note how many whole elements exist while each one is made."""

    whole_elements: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            self.layers.append(nn.Linear(64, 64))
            with torch._C.DisableTorchFunction():  # looked at otherwise, they would be made whole
                Peak.whole_elements.append(sum(p.data.numel() for p in self.layers.parameters()))


def whole_while_built(job: Job, deepspeed):
    from pipeline.engine.deepspeed_patches import restore_torch_linear
    from pipeline.engine.zero3 import Zero3Sharding

    Peak.whole_elements.clear()
    with Zero3Sharding(deepspeed, torch.float32).construct():
        Peak()
    restore_torch_linear()  # an engine would do so when it is closed
    return max(Peak.whole_elements)


@pytest.mark.slow
def test_zero3_never_holds_all_of_a_plain_module_while_it_is_made(ranks):
    json = deepspeed_json(3, stage3_param_persistence_threshold=0)
    json["train_micro_batch_size_per_gpu"] = 1
    assert max(ranks(2).run(whole_while_built, json)) == 0, "a finished layer was not sharded at once"


def at_the_minimum(job: Job, tree, deepspeed):
    """Steps skipped of eight bad ones, the scale then, are all parameters finite, is a good step skipped?"""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed, data)
    objective = Poisoned()
    objective.factor = math.inf
    batch = {key: value[None].repeat(2, 1) for key, value in data.train[0].items()}
    bad = [engine.train_step([batch], objective, 1e-3, False) for _ in range(8)]
    finite = all(bool(torch.isfinite(p).all()) for p in parameters(engine))
    good = engine.train_step([batch], CausalLM(), 1e-3, False)
    return sum(float(each.skipped) for each in bad), bad[-1].loss_scale, finite, float(good.skipped)


SCALES = {
    "falling": ({"initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}, 1.0),
    "static": ({"loss_scale": 64.0}, 64.0),
}


@pytest.mark.slow
@pytest.mark.daily("falling-0", "falling-3", "static-2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", SCALES)
def test_where_the_loss_scale_cannot_fall_steps_are_skipped_and_the_run_goes_on(ranks, scale, stage):
    """The meters warn, and end a run of nothing else; DeepSpeed would raise a bare exception."""
    keys, last = SCALES[scale]
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    deepspeed = deepspeed_json(stage) | {"fp16": {"enabled": True, **keys}}
    assert ranks(1).run(at_the_minimum, tree, deepspeed)[0] == (8.0, last, True, 0.0)


class PartlyUsed(nn.Module):
    """Its second layer takes no part."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs):
        return self.used(inputs)


def warnings_of(job: Job, deepspeed):
    """Messages of two steps of a partly used model."""
    from pipeline.engine.deepspeed_engine import DeepSpeedEngine

    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    config, resolved = resolve(tree, deepspeed, job.ranks.world_size)
    engine = DeepSpeedEngine(PartlyUsed(), config.optimizer, resolved.deepspeed, resolved.split, job)
    batch = {"inputs": torch.ones(2, 4), "targets": torch.ones(2, 1)}
    with capture_logs() as lines:
        for _ in range(2):
            engine.train_step([batch], CustomLoss(squared), 1e-3, False)
    return [line for line in lines if "took no part" in line]


def squared(outputs, batch):
    return (outputs - batch["targets"]).square().sum()


@pytest.mark.slow
@pytest.mark.daily("0")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_take_no_part_are_named_once(ranks, stage):
    (line,) = ranks(1).run(warnings_of, deepspeed_json(stage))[0]
    assert "idle.weight, idle.bias" in line
    assert "used.weight" not in line
