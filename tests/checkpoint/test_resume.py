"""Train 10 = train 5, save, load into new engines, train 5: exactly, at every stage and precision."""

from __future__ import annotations

import pytest
from parity.measure import ALONE
from support.checkpoint_stores import make_store
from support.tiny import deepspeed_json, make_engine, recipe, settings, token_bundle

from pipeline.config.batch_plan import plan_batch
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.objectives import CausalLM
from pipeline.training.assemble import build_loader

pytestmark = pytest.mark.slow


def dropout_recipe():
    """GPT-2 with dropout, so that random numbers matter too."""
    model = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 1, "num_heads": 2, "hidden_size": 16}
    return recipe(model=model | {"extra": {"resid_pdrop": 0.2, "embd_pdrop": 0.2}})


class Trial:
    """An engine and its loader, stepping and keeping the losses."""

    def __init__(self, job: Job, deepspeed):
        data = token_bundle()
        tree = dropout_recipe()
        config = settings(tree, deepspeed).config
        self.job = job
        self.engine = make_engine(job, tree, deepspeed, data)
        self.loader = build_loader(
            config, plan_batch(config.batch, self.engine.dp_world_size), data, self.engine
        )
        self.losses = []

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            seed_step(0, step, self.engine.dp_rank)
            result = self.engine.train_step(self.loader.next_group(), CausalLM(), 1e-2, False)
            self.losses.append((float(result.loss_sum), float(result.grad_norm), float(result.skipped)))


def unbroken_and_resumed(job: Job, deepspeed, folder: str):
    unbroken = Trial(job, deepspeed)
    unbroken.train(0, 10)
    first = Trial(job, deepspeed)
    first.train(0, 5)
    samples_seen = first.loader.samples_seen
    make_store(folder, job).save_final(first.engine, {"global_step": 5, "samples_seen": samples_seen})
    second = Trial(job, deepspeed)
    state = make_store(folder, job).resume(second.engine)
    assert state is not None
    second.loader.seek(state["samples_seen"])
    second.train(5, 10)
    return unbroken.losses, first.losses + second.losses


def fp16_search(stage: int):
    """A loss scale that is still being searched when the checkpoint is written."""
    return deepspeed_json(stage) | {"fp16": {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}}


def splits():
    yield pytest.param(None, 1, id="plain")
    for stage in (0, 1, 2, 3):
        for world_size in (1, 2):
            yield pytest.param(deepspeed_json(stage), world_size, id=f"zero{stage}-fp32-{world_size}")
        yield pytest.param(deepspeed_json(stage, "bf16"), 2, id=f"zero{stage}-bf16-2")
        yield pytest.param(fp16_search(stage), 1, id=f"zero{stage}-fp16-1")


@pytest.mark.daily("plain", "zero0-fp16-1", "zero1-fp32-2", "zero2-bf16-2", "zero3-fp32-2")
@pytest.mark.parametrize(("deepspeed", "world_size"), splits())
def test_resumed_equals_unbroken_bit_for_bit(ranks, tmp_path, deepspeed, world_size):
    if deepspeed is None:
        results = [unbroken_and_resumed(ALONE, None, str(tmp_path))]
    else:
        results = ranks(world_size).run(unbroken_and_resumed, deepspeed, str(tmp_path))
    for unbroken, resumed in results:
        assert resumed == unbroken
