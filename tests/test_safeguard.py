"""Steps that go wrong: left out so that nothing shows of them, gone back from, or the end of the run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import MaskedTokens, deepspeed_json, recipe, resolve, token_bundle

from pipeline.assemble import assemble
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.objectives import CausalLM, LossSum
from pipeline.sinks.jsonl import iterate_record, read_metrics
from pipeline.training import Loop

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
STEPS, BATCH = 48, 8
# Name -> ranks, DeepSpeed JSON (None: plain PyTorch).
SPLITS: dict[str, tuple[int, Any]] = {
    "single": (1, None),
    "ddp": (2, None),
    "zero1": (2, deepspeed_json(1)),
    "zero2-bf16": (2, deepspeed_json(2, "bf16")),
    "zero3": (2, deepspeed_json(3)),
    "zero3-offload": (2, deepspeed_json(3, offload_optimizer={"device": "cpu"})),
    "tensor": (2, deepspeed_json(1) | {"tensor_parallel": {"autotp_size": 2}}),
    "pipeline": (2, deepspeed_json(0) | {"pipeline": {"stages": 2}}),
}


class PoisonedTokens(CausalLM):
    """The loss of some sequences is multiplied: as of data that is broken there."""

    poison: dict[tuple[int, ...], float]

    def __call__(self, model, batch) -> LossSum:
        loss = super().__call__(model, batch)
        found = [self.poison.get(tuple(row), 1.0) for row in batch["input_ids"].tolist()]
        return LossSum(loss.loss_sum * math.prod(found), loss.count)


def samples_at(data: DataBundle, config, first: int) -> list[tuple[int, ...]]:
    from pipeline.data.mixture import MixtureOrder

    order = MixtureOrder(data.sources, config.seed)
    import numpy as np

    indices = order.samples_at(np.arange(first, first + BATCH)).tolist()
    return [tuple(data.train[index]["input_ids"].tolist()) for index in indices]


def train(job: Job, split, folder: str, poison: dict[int, float], **changes):
    """The record and the final state of a run.

    Args:
        poison: Position of a sample in the order -> what its loss is multiplied by.
    """
    data = replace(token_bundle(), train=MaskedTokens(512))
    batch = {"micro_batch_size": 2, "global_batch_size": BATCH}
    schedule = {"warmup_steps": 2}
    optimizer = {"learning_rate": 1e-3, "max_grad_norm": 1.0}
    tree = recipe(max_steps=STEPS, batch=batch, schedule=schedule, optimizer=optimizer) | changes
    config, resolved = resolve(tree, split, job.ranks.world_size)
    parts = assemble(config, resolved, job, data, Path(folder))
    objective = PoisonedTokens()
    objective.poison = {samples_at(data, config, at)[0]: factor for at, factor in poison.items()}
    parts = replace(parts, objective=objective)
    with parts.sinks, Loop(parts) as loop:
        loop.train()
    kept = [shard.values.detach().clone() for shard in parts.engine.shards()], parts.engine.scalars()
    parts.loader.close()
    parts.engine.close()
    job.barrier()
    return kept


def rows(folder: Path) -> list[dict[str, float]]:
    """Without what is measured."""
    return [
        {key: value for key, value in row.items() if key.split("/")[0] in ("step", "train", "eval")}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in iterate_record(folder / "metrics.jsonl") if line.get("event") in names]


def both(job: Job, split, folder: str):
    """Whether a run that skips equals one whose data never held it."""
    watch = {"on_spike": "skip", "on_nonfinite": "skip"}
    # Step 41's batch is NaN in one sample, that after it too, and step 45's is far too high.
    poison = {40 * BATCH: math.nan, 41 * BATCH: math.inf, 46 * BATCH: 1e4}
    skipped = train(job, split, f"{folder}/skipped", poison, watch=watch)
    left_out = [[40 * BATCH, 42 * BATCH], [46 * BATCH, 47 * BATCH]]
    clean = train(job, split, f"{folder}/clean", {}, watch=watch, loader={"leave_out": left_out})
    same = all(torch.equal(a, b) for a, b in zip(skipped[0], clean[0], strict=True))
    return same and skipped[1] == clean[1]


@pytest.mark.slow
@pytest.mark.daily("ddp", "zero2-bf16", "zero3", "pipeline")
@pytest.mark.parametrize("split", SPLITS)
def test_a_run_that_skipped_equals_one_whose_data_never_held_it(ranks, split, tmp_path):
    world_size, deepspeed = SPLITS[split]
    if split == "single":
        assert both(ALONE, deepspeed, str(tmp_path))
    else:
        assert all(ranks(world_size).run(both, deepspeed, str(tmp_path), timeout=500))
    assert rows(tmp_path / "skipped") == rows(tmp_path / "clean")
    assert len(rows(tmp_path / "clean")) >= STEPS
    skips = events(tmp_path / "skipped", "skip")
    assert [(each["step"], each["first_sample"]) for each in skips] == [(41, 320), (41, 328), (45, 368)]
    assert not events(tmp_path / "clean", "skip", "loss_spike", "non_finite")
