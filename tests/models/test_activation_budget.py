"""As many blocks recompute as a budget of bytes asks for, whatever they keep; no number changes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from parity.activations import MODEL, kept_bytes
from support.tiny import deepspeed_json, make_engine, recipe, token_bundle, train_curve
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config.model_schema import CausalLMConfig
from pipeline.distributed.process_group import Job
from pipeline.files import GIB
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, Whole
from pipeline.models.transforms import Placement, transform
from pipeline.objectives import CausalLM

BLOCKS, INPUT = MODEL["num_layers"], 4 * 256 * MODEL["hidden_size"] * 4  # bytes of a block's input


def recomputing(model) -> list[bool]:
    return [m.gradient_checkpointing for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


kept_by = cache(kept_bytes)


@pytest.mark.daily("2")
@pytest.mark.parametrize("keeping", [0, 2, BLOCKS])
def test_what_is_kept_fits_into_the_budget_and_leaves_no_room_for_another_block(keeping):
    full = kept_by("full")
    block = (kept_by("none") - full) / BLOCKS
    budget = BLOCKS * INPUT + (keeping + 0.5) * block
    kept = kept_bytes("full", activation_budget_gib=budget / GIB)
    assert kept - full == pytest.approx(keeping * block, rel=0.01)


def test_the_last_blocks_keep_theirs_and_no_gradient_changes():
    gradients = []
    for budget in (None, 1e-9, (BLOCKS * INPUT + 30 * 2**20) / GIB, 1e3):
        config = CausalLMConfig(**MODEL, activation_checkpointing="full", activation_budget_gib=budget)
        model = build_model(config, ModelRequest(Whole()), 0)
        model = transform(model, config, Placement(torch.device("cpu"))).train()
        tokens = torch.arange(1024).view(4, 256)
        with torch.no_grad():
            CausalLM()(model, {"input_ids": tokens, "labels": tokens})  # decides nothing
        for _ in range(2):
            CausalLM()(model, {"input_ids": tokens, "labels": tokens}).loss_sum.backward()
        gradients.append([p.grad for p in model.parameters()])
        flags = recomputing(model)
        assert flags == sorted(flags, reverse=True)
        assert sum(flags) == {None: BLOCKS, 1e-9: BLOCKS, 1e3: 0}.get(budget, 3)
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


BUDGETED = recipe()["model"] | {
    "num_layers": 4,
    "activation_checkpointing": "full",
    "activation_budget_gib": 1.5e5 / GIB,
}


def recomputing_after_a_step(job: Job, deepspeed) -> list[bool]:
    """Of ranks whose rows have different lengths."""
    data = token_bundle()
    engine = make_engine(job, recipe(model=BUDGETED), deepspeed, data)
    length = 24 if job.ranks.rank == 0 else 6
    batch = {key: value[None, :length] for key, value in data.train[0].items()}
    engine.train_step([batch], CausalLM(), 1e-3, False)
    return recomputing(engine.module)


@pytest.mark.slow
def test_ranks_that_share_parameters_recompute_the_same_blocks(ranks):
    long, short = ranks(2).run(recomputing_after_a_step, deepspeed_json(3))
    assert long == short
    assert 0 < sum(long) < 4
    long, short = ranks(2).run(recomputing_after_a_step, deepspeed_json(2))
    assert sum(short) < sum(long), "the lengths make no difference, so the above says nothing"


@pytest.mark.slow
def test_the_curve_is_that_of_full_recomputation(ranks):
    full = recipe(model=BUDGETED | {"activation_budget_gib": None})
    budgeted = ranks(2).run(train_curve, recipe(model=BUDGETED), deepspeed_json(3), 3)
    assert budgeted == ranks(2).run(train_curve, full, deepspeed_json(3), 3)
