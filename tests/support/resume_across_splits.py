"""Trains under one split, gathers the shards in memory, and resumes from them under another split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from parity.measure import ALONE, has_async_io, largest_difference
from parity.splits import CPU, LLAMA, NVME, SEQUENCE_2, TENSOR_2, TWO_STAGES, zero
from support.tiny import recipe, resolve, token_bundle

from pipeline.checkpoint.shards import Region, copy_runs, overlap
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import mean_loss
from pipeline.engine.schedule import learning_rate_multiplier
from pipeline.errors import CheckpointError
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

STEPS = 10
HALF = 5  # the step whose shards are gathered
LOSS_TOLERANCE = 2e-6  # relative difference of a loss in fp32


@dataclass
class GatheredShards:
    """Holds the shards of all ranks in memory: a `ShardSource` without files."""

    scalars: Mapping[str, Any]
    shards: list[tuple[str, str, Region, np.ndarray]]

    def get_shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return the shape of each tensor by (name, kind)."""
        return {(name, kind): region.shape for name, kind, region, _ in self.shards}

    def read(self, name: str, kind: str, region: Region, out: torch.Tensor) -> None:
        """Copy a region of a tensor to `out`; its values may come from several shards."""
        num_read = 0
        for shard_name, shard_kind, shard_region, values in self.shards:
            if (shard_name, shard_kind) == (name, kind):
                runs = overlap(shard_region, region)
                copy_runs(torch.from_numpy(values), out, runs)
                num_read += int(runs[:, 2].sum())
        if num_read != region.length:
            raise CheckpointError(
                f"{name}: the gathered shards hold {num_read} of the {region.length} values of kind {kind}"
            )


@dataclass(frozen=True)
class Split:
    """Divides a run over ranks."""

    json: dict[str, Any]
    """DeepSpeed JSON; its section `torch` selects plain PyTorch."""
    world_size: int = 2

    def __str__(self) -> str:
        return next(name for name, split in SPLITS.items() if split is self)


def make_recipe(model: dict[str, Any], rate: float = 3e-3, **optimizer: Any) -> dict[str, Any]:
    """Return a recipe of 16 samples a step in two micro-batches, for any number of ranks."""
    return recipe(
        model=model,
        batch={"gradient_accumulation_steps": 2, "global_batch_size": 16},
        optimizer={"learning_rate": rate, "max_grad_norm": 0.5, **optimizer},
        max_steps=STEPS,
        objective={"kind": "causal_lm"},
    )


class Run:
    """Holds an engine, its loader and its objective, and trains any range of steps.

    Args:
        resumes: Whether `restore` follows before the first step.
    """

    def __init__(self, job: Job, tree: dict[str, Any], split: dict[str, Any], resumes: bool = False):
        self.job = job
        data = token_bundle()
        self.data = data
        self.config, self.resolved = resolve(tree, split, job.ranks.world_size)
        self.engine = build_engine(self.config, self.resolved, job, data, resumes=resumes)
        self.loader = build_loader(self.config, self.resolved.batch_plan, data, self.engine)
        self.objective = build_objective(self.config)

    def train(self, first: int, last: int) -> list[float]:
        """Train steps `first` to `last`, without the last, and return their losses. Collective."""
        self.loader.seek(16 * first)
        losses = []
        for step in range(first, last):
            seed_step(0, step, self.engine.seed_rank)
            rate = self.config.optimizer.learning_rate * learning_rate_multiplier(
                self.config.schedule, step, STEPS
            )
            result = self.engine.train_step(self.loader.next_group(), self.objective, rate, False)
            total = self.job.all_reduce_sum(result.loss_sum.to(torch.float64))
            losses.append(float(mean_loss(total, result.global_count)))
        return losses


def copy_shards(engine) -> list[tuple[str, str, Region, np.ndarray]]:
    """Return a copy of this rank's shards in fp32, which later steps do not change.

    All shards are listed before the first is copied, which checks that each stays valid until the next step.
    """
    shards = list(engine.shards())
    return [(s.name, s.kind, s.region, s.values.float().cpu().numpy().copy()) for s in shards]


def train_uninterrupted(job: Job, tree: dict[str, Any], split: dict[str, Any]):
    """Train all steps without an interruption. Collective.

    Returns:
        The losses of all steps, and this rank's shards and the scalars after half of them.
    """
    run = Run(job, tree, split)
    losses = run.train(0, HALF)
    shards = copy_shards(run.engine)
    scalars = run.engine.scalars()
    return losses + run.train(HALF, STEPS), shards, scalars


def train_resumed(job: Job, tree: dict[str, Any], split: dict[str, Any], source: GatheredShards, before: int):
    """Train `before` steps, restore the gathered shards, and train the second half. Collective.

    Returns:
        The losses of the second half, and this rank's shards and the scalars right after the restore.
    """
    run = Run(job, tree, split, resumes=before == 0)
    run.train(0, before)
    run.engine.restore(source)
    shards = copy_shards(run.engine)
    scalars = run.engine.scalars()
    return run.train(HALF, STEPS), shards, scalars


def gather_shards(results) -> GatheredShards:
    """Join the results of all ranks, whose scalars must be equal."""
    assert all(scalars == results[0][2] for *_, scalars in results)
    return GatheredShards(results[0][2], [shard for _, shards, _ in results for shard in shards])


def assemble_tensors(source: GatheredShards) -> dict[tuple[str, str], np.ndarray]:
    """Return every tensor whole, by (name, kind), and assert that the shards hold each value exactly once."""
    tensors = {}
    counts = {}
    for name, kind, region, values in source.shards:
        assert values.shape == (region.length,)
        key = (name, kind)
        whole_region = Region(region.shape, None, 0, int(np.prod(region.shape)))
        tensor = tensors.setdefault(key, torch.zeros(whole_region.length))
        count = counts.setdefault(key, torch.zeros(whole_region.length))
        runs = overlap(region, whole_region)
        copy_runs(torch.from_numpy(values), tensor, runs)
        for _, start, length in runs.tolist():
            count[start : start + length] += 1
    for key, count in counts.items():
        assert torch.equal(count, torch.ones_like(count)), f"{key}: a value is missing or is in two shards"
    return {key: tensor.numpy() for key, tensor in tensors.items()}


def run_on_split(ranks, split: Split, function, *arguments):
    """Return `function(job, arguments[0], split.json, *arguments[1:])` of each rank.

    Plain PyTorch in one process runs in the test's own process, without a pool.
    """
    if split.world_size == 1 and "torch" in split.json:
        return [function(ALONE, arguments[0], split.json, *arguments[1:])]
    return ranks(split.world_size).run(function, arguments[0], split.json, *arguments[1:], timeout=900)


@cache
def _train_and_save(ranks, split: str, tree: str) -> tuple[list[float], GatheredShards]:
    results = run_on_split(ranks, SPLITS[split], train_uninterrupted, json.loads(tree))
    return results[0][0], gather_shards(results)


def train_and_save(
    ranks, split: str, model: dict[str, Any], rate: float = 3e-3, **optimizer: Any
) -> tuple[list[float], GatheredShards]:
    """Return the losses of an uninterrupted run and its shards after half of the steps.

    Equal arguments train once per pool.
    """
    return _train_and_save(ranks, split, json.dumps(make_recipe(model, rate, **optimizer), sort_keys=True))


def check_resume(
    ranks,
    saved: Split,
    resumed: Split,
    model=LLAMA,
    tolerance: float = LOSS_TOLERANCE,
    rate=3e-3,
    before: int = 0,
    **optimizer: Any,
) -> None:
    """Assert that a resumed run restores what was saved, and that its losses are the uninterrupted run's.

    Under the same split, the losses must be equal bit for bit.

    Args:
        tolerance: Relative difference allowed for the losses under another split.
        before: Number of steps that the resumed engine takes before it restores.
        optimizer: Further keys of the recipe's section `optimizer`.
    """
    if not has_async_io() and "nvme" in f"{saved.json}{resumed.json}":
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")
    losses, source = train_and_save(ranks, str(saved), model, rate, **optimizer)
    saved_tensors = assemble_tensors(source)
    tree = make_recipe(model, rate, **optimizer)
    results = run_on_split(ranks, resumed, train_resumed, tree, source, before)
    restored = gather_shards(results)
    restored_tensors = assemble_tensors(restored)
    assert restored_tensors.keys() == saved_tensors.keys()
    for key, values in saved_tensors.items():
        assert np.array_equal(restored_tensors[key], values), key
    assert restored.scalars.get("optimizer/step") == source.scalars.get("optimizer/step")
    for resumed_losses, *_ in results:
        if saved == resumed:
            assert restored.scalars == source.scalars
            assert resumed_losses == losses[HALF:], "not bit for bit"
        else:
            assert largest_difference(resumed_losses, losses[HALF:]) < tolerance


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# The loss scale starts so high that the scaler still halves it when the shards are gathered.
SEARCH = {"fp16": {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}}
SPLITS = {
    "plain": Split({"torch": {"parallel": "single"}}, 1),
    "plain-bf16": Split({"torch": {"parallel": "single"}, "bf16": {"enabled": True}}, 1),
    "ddp": Split({"torch": {"parallel": "ddp"}}),
    **{f"zero{stage}": Split(zero(stage)) for stage in range(4)},
    **{f"zero{stage}-1": Split(zero(stage), 1) for stage in range(4)},
    **{f"zero{stage}-bf16": Split(zero(stage) | BF16) for stage in range(4)},
    **{f"zero{stage}-fp16": Split(zero(stage) | FP16) for stage in range(4)},
    **{f"zero{stage}-search": Split(zero(stage) | SEARCH) for stage in range(4)},
    **{f"zero{stage}-cpu": Split(zero(stage, offload_optimizer=CPU)) for stage in (1, 2, 3)},
    "zero2-cpu-bf16": Split(zero(2, offload_optimizer=CPU) | BF16),
    "zero3-cpu-fp16": Split(zero(3, offload_optimizer=CPU) | FP16),
    "zero3-all-cpu": Split(zero(3, offload_optimizer=CPU, offload_param=CPU)),
    "zero3-kept-none": Split(zero(3, stage3_param_persistence_threshold=0)),
    "zero2-round-robin": Split(zero(2, round_robin_gradients=True)),
    "zero3-hpz": Split(zero(3, zero_hpz_partition_size=2)),
    "zero3-small-groups": Split(zero(3, sub_group_size=3_000)),
    **{f"pipeline-zero{stage}": Split(zero(stage) | TWO_STAGES) for stage in (0, 1)},
    **{
        f"pipeline-zero1-{p}": Split(zero(1) | TWO_STAGES | half)
        for p, half in (("bf16", BF16), ("fp16", FP16))
    },
    "pipeline-zero0-fp16": Split(zero(0) | TWO_STAGES | FP16),
    "pipeline-4": Split(zero(1) | TWO_STAGES, 4),
    **{f"tensor-zero{stage}": Split(zero(stage) | TENSOR_2) for stage in range(4)},
    "tensor-zero0-bf16": Split(zero(0) | TENSOR_2 | BF16),
    "tensor-4": Split(zero(2) | TENSOR_2, 4),
    **{f"sequence-zero{stage}": Split(zero(stage) | SEQUENCE_2) for stage in range(4)},
}


BUFFERED = NVME | {"buffer_size": 500_000}
SWAPPED = zero(3, offload_optimizer=NVME, offload_param=BUFFERED)
SPLITS |= {
    "nvme": Split(SWAPPED),
    "nvme-1": Split(SWAPPED, 1),
    "nvme-bf16": Split(SWAPPED | BF16),
    # Two sub-groups take turns in the same memory; a sub-group below 1 MB would stay in memory.
    "nvme-2-groups": Split(
        zero(3, offload_optimizer=NVME, offload_param=BUFFERED, sub_group_size=265_000), 1
    ),
}
