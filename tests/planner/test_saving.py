"""What a checkpoint takes by formula, against a real engine's shards and a real run's copies of them."""

from __future__ import annotations

from typing import Any

import pytest
from parity.measure import ALONE
from parity.splits import LLAMA, zero
from planner.test_states import BF16, HALVES, LORA, MUON, frozen, whole_of
from support.tiny import make_engine, recipe, resolve, token_bundle

from pipeline.checkpoint.shards import BUFFER
from pipeline.checkpoint.store import CheckpointStore, Snapshot
from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.planner.states import checkpoint_bytes, copy_bytes
from pipeline.training.assemble import assemble, build_loader
from pipeline.training.loop import TrainLoop

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
    loader = build_loader(config, resolved.plan, data, engine)
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
    expected = checkpoint_bytes(whole_of(tree), *resolve(tree, split, 2))
    assert sum(ranks(2).run(written, tree, split)) == expected


@pytest.mark.parametrize(
    ("saves", "copies"),
    [({"every": 2}, 2), ({"every": 6}, 0), ({}, 0), ({"every_minutes": 1e-6}, 5)],
    ids=str,
)
def test_a_copy_is_expected_where_a_run_makes_one(tmp_path, monkeypatch, saves, copies):
    made: list[int] = []
    fill = Snapshot.fill

    def noted(snapshot: Snapshot, shards: Any) -> None:
        made.append(sum(shard.num_bytes for shard in snapshot.layout.shards))
        fill(snapshot, shards)

    monkeypatch.setattr(Snapshot, "fill", noted)
    pinned: list[Any] = []  # what a GPU's copy is made in, after the first step
    monkeypatch.setattr(CheckpointStore, "prepare", lambda _, engine: pinned.append(engine))
    tree = recipe(max_steps=6, checkpoint={**saves, "keep_last": 9})
    config, resolved = resolve(tree, None, 1)
    parts = assemble(config, resolved, ALONE, token_bundle(), tmp_path)
    with parts.trackers, TrainLoop(parts) as loop:
        loop.train()
    parts.loader.close()
    assert len(made) == copies
    assert len(pinned) == (copies > 0)
    expected = copy_bytes(whole_of(tree), config, resolved)
    assert expected == max(made, default=0)
