"""Trains a tiny run in which the losses of chosen samples are multiplied, as if their data were corrupted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny import ALONE as ALONE
from support.tiny import MaskedTokens, deepspeed_json, recipe, resolve, token_bundle

from pipeline.data.bundle import DataBundle
from pipeline.data.sampler import MixtureOrder
from pipeline.distributed.process_group import Job
from pipeline.monitoring.trackers.jsonl import iterate_record, read_metrics
from pipeline.objectives import CausalLM, LossSum
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

STEPS = 48
BATCH = 8
# The loss scale doubles every fifth step, so it overflows and halves again and again.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 5}}
# Name -> (ranks, DeepSpeed JSON or `None` for plain PyTorch).
SPLITS: dict[str, tuple[int, Any]] = {
    "single": (1, None),
    "ddp": (2, None),
    "zero1": (2, deepspeed_json(1)),
    "zero2-bf16": (2, deepspeed_json(2, "bf16")),
    "zero3": (2, deepspeed_json(3)),
    "zero3-offload": (2, deepspeed_json(3, offload_optimizer={"device": "cpu"})),
    "tensor": (2, deepspeed_json(1) | {"tensor_parallel": {"autotp_size": 2}}),
    "pipeline": (2, deepspeed_json(0) | {"pipeline": {"stages": 2}}),
    "zero0-fp16": (2, deepspeed_json(0) | FP16),
    "zero1-fp16": (2, deepspeed_json(1) | FP16),
    "zero2-fp16": (2, deepspeed_json(2) | FP16),
    "zero3-fp16": (2, deepspeed_json(3) | FP16),
    "pipeline-fp16": (2, deepspeed_json(0) | FP16 | {"pipeline": {"stages": 2}}),
}


class CorruptedTokens(CausalLM):
    """Multiplies the loss of a micro-batch that contains chosen sequences."""

    loss_factors: dict[tuple[int, ...], float]
    """Tokens of a sequence -> factor of the loss."""

    def __call__(self, model, batch) -> LossSum:
        loss = super().__call__(model, batch)
        factors = [self.loss_factors.get(tuple(row), 1.0) for row in batch["input_ids"].tolist()]
        return LossSum(loss.loss_sum * math.prod(factors), loss.count)


def read_samples(data: DataBundle, config, first: int) -> list[tuple[int, ...]]:
    """Return the tokens of the `BATCH` samples from position `first` of the order."""
    order = MixtureOrder(data.sources, config.seed)
    indices = order.samples_at(np.arange(first, first + BATCH)).tolist()
    return [tuple(data.train[index]["input_ids"].tolist()) for index in indices]


def train(
    job: Job, split, folder: str, loss_factors: dict[int, float], objective=None, prepare=None, **changes
):
    """Train a run that writes metrics.jsonl to the folder, and return this rank's final shards and scalars.

    Args:
        loss_factors: Position of a sample in the order -> factor of its loss.
        objective: Class of the objective; `None`: `CorruptedTokens`.
        prepare: Called with the run's components and the objective's `loss_factors` before the first step.
        changes: Sections of the recipe with other values.
    """
    data = replace(token_bundle(), train=MaskedTokens(512))
    batch = {"micro_batch_size": 2, "global_batch_size": BATCH}
    schedule = {"warmup": 2}
    optimizer = {"learning_rate": 1e-3, "max_grad_norm": 1.0}
    tree = recipe(max_steps=STEPS, batch=batch, schedule=schedule, optimizer=optimizer) | changes
    config, resolved = resolve(tree, split, job.ranks.world_size)
    components = assemble(config, resolved, job, data, Path(folder))
    objective = (objective or CorruptedTokens)()
    objective.loss_factors = {
        read_samples(data, config, at)[0]: factor for at, factor in loss_factors.items()
    }
    components = replace(components, objective=objective)
    if prepare is not None:
        prepare(components, objective.loss_factors)
    with components.trackers, TrainLoop(components) as loop:
        loop.train()
    engine = components.engine
    state = [shard.values.detach().clone() for shard in engine.shards()], engine.scalars()
    components.loader.close()
    engine.close()
    job.barrier()
    return state


def read_loss_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl without the columns of time, memory and other measurements."""
    return [
        {key: value for key, value in row.items() if key.split("/")[0] in ("step", "train", "eval")}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def read_events(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return the events of these names from metrics.jsonl."""
    return [line for line in iterate_record(folder / "metrics.jsonl") if line.get("event") in names]
