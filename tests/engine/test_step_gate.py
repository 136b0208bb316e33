"""A step waits for what it was given to wait with before it changes anything that a checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.splits import CPU, TENSOR_2, TWO_STAGES, zero
from support.resume_across_splits import Run, copy_shards, make_recipe
from support.tiny import recipe
from torch import nn

from pipeline.checkpoint.shards import BUFFER
from pipeline.engine.clipping import StepGate

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
SPLITS = {
    "plain": (None, 1),
    **{
        f"zero {stage}{name}": (zero(stage) | half, 1)
        for stage in (0, 1, 2, 3)
        for name, half in (("", {}), (" bf16", BF16), (" fp16", FP16))
    },
    "zero 2 offloaded": (zero(2, offload_optimizer=CPU) | BF16, 1),
    "zero 3 offloaded": (zero(3, offload_optimizer=CPU) | BF16, 1),
    "ddp": ({"torch": {"parallel": "ddp"}}, 2),
    "stages": (zero(1) | TWO_STAGES, 2),
    "stages bf16": (zero(1) | TWO_STAGES | BF16, 2),
    "tensor": (zero(1) | TENSOR_2 | BF16, 2),
}


def seen_by_the_gate(job, split):
    """(shards before a step, those that each wait of it and of the next one saw, shards after it)."""
    run = Run(job, make_recipe(recipe()["model"]), split)
    run.train(0, 2)
    before = copy_shards(run.engine)
    seen = []
    run.engine.hold_step(lambda: seen.append(copy_shards(run.engine)))
    run.train(2, 3)
    after = copy_shards(run.engine)
    run.train(3, 4)
    run.engine.close()
    return before, seen, after


def check(found):
    before, seen, after = found
    assert len(seen) == 1, "once, in the next step"
    changed = 0
    for (name, kind, _, old), (*_, waited), (*_, new) in zip(before, seen[0], after, strict=True):
        assert kind == BUFFER or np.array_equal(old, waited), f"{kind} of {name} was written before"
        changed += not np.array_equal(waited, new)
    assert changed


@pytest.mark.daily("plain", "zero 1 bf16", "zero 3 bf16")
@pytest.mark.slow
@pytest.mark.parametrize("split", [name for name, (_, world_size) in SPLITS.items() if world_size == 1])
def test_nothing_is_written_before(ranks, split):
    for found in ranks(1).run(seen_by_the_gate, SPLITS[split][0]):
        check(found)


@pytest.mark.daily("stages")
@pytest.mark.slow
@pytest.mark.parametrize("split", [name for name, (_, world_size) in SPLITS.items() if world_size == 2])
def test_nothing_is_written_before_on_two_ranks(ranks, split):
    for found in ranks(2).run(seen_by_the_gate, SPLITS[split][0]):
        check(found)


def test_a_forward_that_writes_weights_waits_too():
    embedding = nn.Embedding(4, 2, max_norm=1.0)
    opened = []
    StepGate(embedding, torch.optim.SGD(embedding.parameters())).hold(lambda: opened.append(True))
    assert opened
