"""Bytes of a checkpoint by formula, against a real engine's shards."""

from __future__ import annotations

from typing import Any

import pytest
from parity.splits import LLAMA, zero
from planner.test_states import BF16, HALVES, LORA, MUON, frozen, whole_of
from support.tiny import make_engine, recipe, resolve, token_bundle

from pipeline.checkpoint.shards import BUFFER
from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.planner.states import count_checkpoint_bytes
from pipeline.training.assemble import build_loader

FIRST = frozen("model.layers.0.*")
PLAIN = {"torch": {"parallel": "ddp"}, **BF16}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "frozen, plain": (FIRST, PLAIN, {}),
    "frozen, ZeRO 2": (FIRST, zero(2) | BF16, {}),
    "frozen, ZeRO 3 in fp32": (FIRST, zero(3), {}),
    "half masters and states, ZeRO 2": (LLAMA, zero(2) | HALVES, {}),
    "adapter, ZeRO 2": (LLAMA, zero(2) | BF16, LORA),
    "two kinds of optimizer, plain": (LLAMA, PLAIN, MUON),
}


def written(job: Job, tree: dict[str, Any], split: dict[str, Any]) -> int:
    """Bytes of this rank's shards, after a step. Collective."""
    data = token_bundle()
    config, resolved = resolve(tree, split, job.ranks.world_size)
    engine = make_engine(job, tree, split, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    try:
        engine.train_step(loader.next_group(), build_objective(config), 1e-3, 0)
        return sum(shard.num_bytes for shard in engine.shards() if shard.kind != BUFFER)
    finally:
        loader.close()
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_has_as_many_bytes(ranks, name):
    model, split, changes = CASES[name]
    tree = recipe(model=model, **changes)
    expected = count_checkpoint_bytes(whole_of(tree), *resolve(tree, split, 2))
    assert sum(ranks(2).run(written, tree, split)) == expected
