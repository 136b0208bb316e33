"""Trains one case on real ranks, and the oracle beside it: plain PyTorch, one process, fp32, no split."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from parity.splits import STEPS, Case
from support.memory import reachable_tensor_bytes
from support.tiny import resolve, token_bundle

from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import mean_loss
from pipeline.engine.schedule import learning_rate_multiplier
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_eval_loader, build_loader

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


@dataclass(frozen=True)
class Trained:
    """Values that a run would log."""

    losses: list[float]
    grad_norms: list[float]
    eval_loss: float
    samples: list[list[int]]
    """Indices of the samples this rank took, step by step."""
    dp_rank: int
    tokens_per_second: float
    bytes_per_parameter: float
    """Bytes of this rank between two steps: parameters, optimizer state, buffers; 0 if not asked for."""


def train(
    job: Job, recipe: dict[str, Any], split: dict[str, Any], steps: int = STEPS, with_memory: bool = False
) -> Trained:
    """Train the first of the recipe's STEPS under one split, as the loop does. Collective."""
    data = token_bundle(packed=True)
    before = held_now() if with_memory else 0
    config, resolved = resolve(recipe, split, job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config, resolved.compile)
    losses = []
    norms = []
    samples = []
    seconds = 0.0
    for step in range(steps):
        seed_step(config.seed, step, engine.seed_rank)
        rate = config.optimizer.learning_rate * learning_rate_multiplier(config.schedule, step, STEPS)
        group = loader.next_group()
        samples.append([index for batch in group for index in data.train.find(batch["input_ids"])])
        start = time.perf_counter()
        result = engine.train_step(group, objective, rate, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        losses.append(float(mean_loss(total, result.global_count)))
        seconds += time.perf_counter() - start if step >= steps // 2 else 0.0
        assert result.grad_norm is not None
        norms.append(float(result.grad_norm))
    held = held_now() - before if with_memory else 0
    row = evaluate(engine, objective, build_eval_loader(config, resolved.batch_plan, data, engine), job)
    tokens = (steps - steps // 2) * resolved.batch_plan.global_batch_size * data.train.tokens.shape[1]
    return Trained(
        losses,
        norms,
        row["eval/loss"],
        samples,
        engine.dp_rank,
        tokens / seconds,
        held / engine.num_parameters,
    )


def held_now() -> int:
    """Half a second's work, for the table alone."""
    gc.collect()
    return reachable_tensor_bytes()


@cache
def has_async_io() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def missing(case: Case) -> str | None:
    """Return what this machine lacks for the case."""
    if "NVMe" in case.split.name and not has_async_io():
        return "no libaio to link with (apt-get install libaio-dev)"
    return None


@cache
def _oracle(recipe: str, steps: int) -> Trained:
    return train(ALONE, json.loads(recipe), {"torch": {"parallel": "single"}}, steps)


def oracle(case: Case, steps: int = STEPS) -> Trained:
    """Return the curve of the case's recipe on one process in fp32, all samples in one micro-batch."""
    tree = case.recipe
    tree["batch"] = {"micro_batch_size": 16}
    tree["model"] = {key: value for key, value in tree["model"].items() if key != "activation_checkpointing"}
    return _oracle(json.dumps(tree, sort_keys=True), steps)


def largest_difference(a: list[float], b: list[float]) -> float:
    """Relative, over all steps."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def differences(got: Trained, expected: Trained) -> list[float]:
    """Relative, the largest of all steps: loss, gradient norm, evaluation loss."""
    return [
        largest_difference(got.losses, expected.losses),
        largest_difference(got.grad_norms, expected.grad_norms),
        largest_difference([got.eval_loss], [expected.eval_loss]),
    ]
