"""A step that exceeds its limits leaves nothing behind: what follows is bit-equal to a run without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.tiny import deepspeed_json, make_engine, recipe, token_bundle
from torch import nn

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.clipping import StepLimitGuard
from pipeline.engine.interface import Engine, StepLimits
from pipeline.objectives import CausalLM, LossSum

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SGD = {"optimizer": {"kind": "sgd", "learning_rate": 3e-3, "max_grad_norm": 0.5}}
# Name -> ranks, DeepSpeed JSON (None: plain PyTorch), what else the recipe says.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
SPLITS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "single": (1, None, {}),
    "ddp": (2, None, {}),
    "ddp-sgd": (2, None, SGD),
    "zero0": (2, deepspeed_json(0), {}),
    "zero0-bf16": (2, deepspeed_json(0, "bf16"), {}),
    "zero1-bf16": (2, deepspeed_json(1, "bf16"), {}),
    "zero2": (2, deepspeed_json(2), {}),
    "zero2-sgd": (2, deepspeed_json(2), SGD),
    "zero2-offload": (2, deepspeed_json(2, **OFFLOAD), {}),
    "zero3": (2, deepspeed_json(3), {}),
    "zero3-bf16": (2, deepspeed_json(3, "bf16"), {}),
    "tensor": (2, deepspeed_json(1) | {"tensor_parallel": {"autotp_size": 2}}, {}),
    "pipeline": (2, deepspeed_json(0) | {"pipeline": {"stages": 2}}, {}),
    "pipeline-zero1": (2, deepspeed_json(1) | {"pipeline": {"stages": 2}}, {}),
    "zero0-fp16": (2, deepspeed_json(0) | FP16, {}),
    "zero0-fp16-fixed": (2, deepspeed_json(0) | {"fp16": {"enabled": True, "loss_scale": 256}}, {}),
    "zero2-fp16": (2, deepspeed_json(2) | FP16, {}),
    "zero2-fp16-offload": (2, deepspeed_json(2, **OFFLOAD) | FP16, {}),
    "zero3-fp16": (2, deepspeed_json(3) | FP16, {}),
    "tensor-zero0-fp16": (2, deepspeed_json(0) | FP16 | {"tensor_parallel": {"autotp_size": 2}}, {}),
    "pipeline-fp16": (2, deepspeed_json(0) | FP16 | {"pipeline": {"stages": 2}}, {}),
    "pipeline-zero1-fp16": (2, deepspeed_json(1) | FP16 | {"pipeline": {"stages": 2}}, {}),
}


class Poisoned(CausalLM):
    """The same loss, times what it is told, in the last of a step's micro-batches alone."""

    factor = 1.0

    def __call__(self, model, batch) -> LossSum:
        loss = super().__call__(model, batch)
        factor = self.factor if int(batch["input_ids"][0, 0]) == int(self.poisoned) else 1.0
        return LossSum(loss.loss_sum * factor, loss.count)


def state(engine: Engine) -> tuple[list[torch.Tensor], Any]:
    return [shard.values.detach().clone() for shard in engine.shards()], engine.scalars()


def with_and_without(job: Job, tree, deepspeed, bad: list[tuple[float, StepLimits]]):
    """Train with bad steps and without them.

    Returns:
        Whether losses, norms and all state are bit-equal; the messages about the bad steps.
    """
    data = token_bundle()

    def train(with_bad: bool):
        engine = make_engine(job, tree, deepspeed, data)
        objective = Poisoned()
        width = 2 * engine.dp_world_size

        def batches(first: int):
            at = first + 2 * engine.dp_rank
            return [
                {key: torch.stack([data.train[at + m + i][key] for i in range(2)]) for key in data.train[0]}
                for m in (0, width)
            ]

        def step(first: int, factor: float = 1.0, limits: StepLimits | None = None):
            group = batches(first)
            objective.factor = factor
            objective.poisoned = group[1]["input_ids"][0, 0] if engine.dp_rank == 0 else -1
            result = engine.train_step(group, objective, 1e-2, 0, limits)
            return float(job.all_reduce_sum(result.loss_sum.clone())), float(result.grad_norm), result

        curve = [step(0)[:2]]
        said = []
        for at, (factor, limits) in enumerate(bad):
            if with_bad:
                result = step(32, factor, limits)[2]
                said.append((float(result.skipped), float(result.loss)))
            result = step(8 + 8 * at, limits=StepLimits(100.0, 100.0))
            curve.append(result[:2])
            assert float(result[2].skipped) == 0
            assert math.isclose(
                float(result[2].loss), result[0] / float(result[2].global_count), rel_tol=1e-6
            )
        if with_bad:
            step(32, limits=StepLimits(-math.inf, -math.inf))  # as one that is done again to find a cause
        curve.append(step(24)[:2])  # no limits any more
        kept = state(engine)
        engine.close()
        return curve, kept, said

    (curve, kept, said), (clean_curve, clean, _) = train(True), train(False)
    equal = all(torch.equal(a, b) for a, b in zip(kept[0], clean[0], strict=True)) and kept[1] == clean[1]
    return curve == clean_curve, equal, said


@pytest.mark.slow
@pytest.mark.daily("ddp", "zero2-fp16", "zero3", "pipeline")
@pytest.mark.parametrize("split", SPLITS)
def test_what_follows_a_refused_step_is_bit_equal_to_a_run_without_it(ranks, split):
    """A loss that is NaN, one too high, and a gradient that is too long, each on one rank alone."""
    world_size, deepspeed, changes = SPLITS[split]
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 2}, **changes)
    bad = [
        (math.nan, StepLimits(100.0, 100.0)),
        (50.0, StepLimits(12.0, math.inf)),
        (1.0, StepLimits(math.inf, 1e-6)),
    ]
    if split == "single":
        answers = [with_and_without(ALONE, tree, deepspeed, bad)]
    else:
        answers = ranks(world_size).run(with_and_without, tree, deepspeed, bad, timeout=500)
    for same_curve, same_state, said in answers:
        assert [skipped for skipped, _ in said] == [1.0, 1.0, 1.0]
        assert math.isnan(said[0][1])
        assert said[1][1] > 12.0 > said[2][1]
        assert same_curve
        assert same_state
    assert all(said[1:] == answers[0][2][1:] for _, _, said in answers), "ranks were told different losses"


def searching(job: Job, stage: int, lowest_power: int, factors: list[float], limits: StepLimits | None):
    """Train from a loss scale of 2**24, which is too high for all steps.

    Returns:
        The state after the steps; of each step whether it was skipped and whether to search for the cause.
    """
    fp16 = {"enabled": True, "initial_scale_power": 24, "min_loss_scale": 2**lowest_power, "hysteresis": 1}
    data = token_bundle()
    objective = Poisoned()
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    engine = make_engine(job, tree, deepspeed_json(stage) | {"fp16": fp16}, data)
    said = []
    for number, objective.factor in enumerate(factors):
        rows = [data.train[4 * number + 2 * job.ranks.rank + place] for place in range(2)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        objective.poisoned = batch["input_ids"][0, 0]
        result = engine.train_step([batch], objective, 1e-2, 0, limits)
        said.append((float(result.skipped), result.is_loss_scale_search))
    kept = state(engine)
    engine.close()
    return kept, said


@pytest.mark.slow
@pytest.mark.daily("2")
@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_finds_the_loss_scale_is_no_refused_one(ranks, stage):
    """It counts, and the scale falls as without limits.

    Refused steps leave the scale: a loss that is too high, whose gradient is not finite either, and any such
    gradient if the scale cannot fall.
    """
    pool = ranks(2)
    limits = StepLimits(12.0, math.inf)
    searched = pool.run(searching, stage, 0, [1.0] * 12, limits)
    as_ever = pool.run(searching, stage, 0, [1.0] * 12, None)
    for (kept, said), (expected, without) in zip(searched, as_ever, strict=True):
        assert [skipped for skipped, _ in said] == [skipped for skipped, _ in without]
        assert 0 < sum(is_search for _, is_search in said) == sum(skipped for skipped, _ in said) < 12
        assert kept[1] == expected[1]
        assert kept[1]["loss_scale"] < 2**24
        assert all(torch.equal(a, b) for a, b in zip(kept[0], expected[0], strict=True))
    for lowest, factors in ((0, [1e4, 1e4]), (24, [1.0, 1.0])):
        for kept, said in pool.run(searching, stage, lowest, factors, limits):
            assert said == [(1.0, False)] * 2
            assert kept[1]["loss_scale"] == 2**24
            assert kept[1]["loss_scale_iteration"] == 0


class Counting(nn.Module):
    """Its forward changes a buffer in place, puts another tensor for a second one, and poisons a norm's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        self.last = x.mean(dim=0)
        return self.norm(x)


@pytest.mark.parametrize("is_refused", [True, False])
def test_buffers_of_a_refused_step_are_those_before_it(is_refused):
    module = Counting()
    module(torch.randn(4, 3))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    guard = StepLimitGuard(ALONE, module)
    guard.begin_step(StepLimits(1.0, 1.0))
    module(torch.full((4, 3), math.nan if is_refused else 1.0))
    guard.compute_loss(torch.tensor(4 * (math.nan if is_refused else 0.5)), torch.tensor(4.0))
    assert bool(guard(torch.tensor(0.5))) is is_refused
    assert float(guard.end_step(torch.zeros(()))) == is_refused
    after = dict(module.named_buffers())
    unchanged = all(torch.equal(after[name], each) for name, each in before.items())
    assert unchanged is is_refused
    if not is_refused:
        assert int(after["seen"]) == 8
        assert torch.equal(after["last"], torch.ones(3))


def test_a_step_without_limits_keeps_and_reads_nothing():
    guard = StepLimitGuard(ALONE, Counting())
    guard.begin_step(None)
    guard.compute_loss(torch.ones(()), torch.ones(()))
    assert guard(torch.tensor(math.nan)) is None
    assert guard.loss is None
    skipped = torch.zeros(())
    assert guard.end_step(skipped) is skipped
