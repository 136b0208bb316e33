"""Measured bytes of a rank, against the table of the ZeRO paper (Rajbhandari et al. 2020, section 5).

Mixed-precision Adam holds 2 bytes a parameter, 2 of its gradient and 12 of fp32 state (weights, two moments).
"""

from __future__ import annotations

import gc
import json
import time

import pytest
import torch
from support.launch import ROOT
from support.memory import reachable_tensor_bytes
from support.tiny import CPU, deepspeed_json, make_engine, recipe, settings, token_bundle

from pipeline.config.batch_plan import plan_batch
from pipeline.config.settings import load_settings
from pipeline.distributed.process_group import Job
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.objectives import CausalLM
from pipeline.training.assemble import build_loader

# A million parameters, so that batches and buckets are small beside them.
MODEL = {
    "kind": "causal_lm",
    "architecture": "llama",
    "num_layers": 4,
    "num_heads": 4,
    "hidden_size": 128,
    "intermediate_size": 512,
    "max_sequence_length": 24,
}
TREE = recipe(model=MODEL, batch={"micro_batch_size": 1, "gradient_accumulation_steps": 2})
BUCKETS = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
WHOLE = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}

# Bytes a parameter on each of N ranks.
PAPER = {
    0: lambda n: 2 + 2 + 12,
    1: lambda n: 2 + 2 + 12 / n,
    2: lambda n: 2 + (2 + 12) / n,
    3: lambda n: (2 + 2 + 12) / n,
}


def zero(stage: int, precision: str):
    return deepspeed_json(stage, precision, **BUCKETS, **(WHOLE if stage == 3 else {}))


def start(job: Job, tree, deepspeed):
    """The bytes held before there is an engine, the engine, and its loader."""
    data = token_bundle()
    gc.collect()
    before = reachable_tensor_bytes()
    engine = make_engine(job, tree, deepspeed, data)
    config = settings(tree, deepspeed).config
    loader = build_loader(config, plan_batch(config.batch, engine.dp_world_size), data, engine)
    return before, engine, loader


def most_held(job: Job, tree, deepspeed, expected: float) -> float:
    """Bytes a parameter held at the most after a micro-batch's backward, over two steps of two each.

    gloo's thread keeps the tensor of an all-reduce for a moment after the all-reduce has returned, on a busy
    machine a long one: while more is held than expected, it is measured again for some seconds.
    """
    before, engine, loader = start(job, tree, deepspeed)
    held = []
    take_step = engine._engine.step

    def measure_first():
        gc.collect()
        deadline = time.monotonic() + 20
        while (now := reachable_tensor_bytes() - before) > 1.05 * expected * engine.num_parameters:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        held.append(now)
        take_step()

    engine._engine.step = measure_first
    for _ in range(2):
        engine.train_step(loader.next_group(), CausalLM(), 1e-3, False)
    return max(held[2:]) / engine.num_parameters  # the optimizer's state exists after the first step


@pytest.mark.daily("1-2", "3-2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_what_the_zero_paper_says(ranks, stage, world_size):
    expected = PAPER[stage](world_size)
    for held in ranks(world_size).run(most_held, TREE, zero(stage, "bf16"), expected):
        assert held == pytest.approx(expected, rel=0.05)


def most_held_inside(job: Job, tree, deepspeed) -> float:
    """Bytes a parameter held at the most, looked at around the work of each block, embedding and head."""
    before, engine, loader = start(job, tree, deepspeed)
    held = [0]

    def look(*_):
        held[0] = max(held[0], reachable_tensor_bytes() - before)

    model = engine.module.model
    for module in [*model.layers, model.embed_tokens, engine.module.lm_head]:
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    engine.train_step(loader.next_group(), CausalLM(), 1e-3, False)
    return held[0] / engine.num_parameters


@pytest.mark.nightly
@pytest.mark.slow
def test_zero3_trains_a_model_whose_state_no_rank_ever_holds(ranks):
    """None of four ranks holds even half of the 16 bytes a parameter, gathered layers included."""
    for held in ranks(4).run(most_held_inside, TREE, zero(3, "bf16")):
        assert held < 0.5 * 16


def most_held_in_a_step(job: Job, tree, deepspeed) -> tuple[float, float]:
    """Bytes a parameter between two steps, and the most while it steps group after group."""
    before, engine, loader = start(job, tree, deepspeed)
    within: list[int] = []
    engine.train_step(loader.next_group(), CausalLM(), 1e-3, False)
    gc.collect()
    between = reachable_tensor_bytes() - before
    for register in (engine._optimizer.register_step_pre_hook, engine._optimizer.register_step_post_hook):
        register(lambda *_: within.append(reachable_tensor_bytes() - before))
    engine.train_step(loader.next_group(), CausalLM(), 1e-3, False)
    return between / engine.num_parameters, max(within) / engine.num_parameters


class Unfilled(NoSharding):
    """A model without values."""

    def construct_empty(self):
        return torch.device("meta")


FILE = ROOT / "ds_configs" / "zero3_one_gpu.json"
PAIR = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
HELD = {"as shipped": ({}, 16, 4), "states in bf16": (PAIR, 10, 0)}


@pytest.mark.daily("as shipped")
@pytest.mark.slow
@pytest.mark.parametrize(("half", "held", "gradient"), HELD.values(), ids=HELD)
def test_a_step_at_zero3_adds_the_gradient_of_one_sub_group(ranks, half, held, gradient):
    """And a model of 8 billion parameters fits into a GPU of 139 GiB, with 15 GiB for everything else."""
    shipped = json.loads(FILE.read_text())
    size = 10_000
    largest = MODEL["hidden_size"] * MODEL["intermediate_size"]
    shipped["zero_optimization"] |= BUCKETS | {"sub_group_size": size}
    shipped["bf16"] |= {"enabled": True, **half}
    between, within = ranks(1).run(most_held_in_a_step, TREE, shipped)[0]
    assert between == pytest.approx(held, rel=0.01)
    assert within - between <= gradient * (size + largest) / 1.1e6 + 0.05

    chosen = load_settings(ROOT / "launch" / "recipes" / "llama_8b.yaml", FILE)
    size = chosen.resolve(1, CPU).deepspeed["zero_optimization"]["sub_group_size"]
    sizes = [p.numel() for p in build_model(chosen.config.model, ModelRequest(Unfilled()), 0).parameters()]
    assert sum(sizes) == 8_030_261_248, "not Llama 3's 8B"
    assert sum(sizes) * between + gradient * (size + max(sizes)) < (139 - 15) * 2**30


@pytest.mark.daily("bf16")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_halves_parameters_and_gradients(ranks, precision):
    """The HalfTensor saving: 2 + 2 bytes of 4 + 4; what Adam needs stays in fp32."""
    full, half = (ranks(1).run(shares, TREE, zero(2, name))[0] for name in ("fp32", precision))
    assert half["parameters"] == full["parameters"] / 2
    assert half["activations"] < 0.62 * full["activations"]


def shares(job: Job, tree, deepspeed) -> dict[str, float]:
    """Bytes of the model's parameters, and of what a forward keeps for backward."""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed, data)
    batch = {key: value[None].repeat(8, 1) for key, value in data.train[0].items()}
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = CausalLM()(engine.module.train(), batch)
    assert loss.loss_sum.requires_grad
    return {
        "parameters": sum(p.numel() * p.element_size() for p in engine.module.parameters()),
        "activations": sum(kept.values()),
    }
