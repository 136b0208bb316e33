"""Evaluation over a held-out split: sums over all batches and ranks, divided once."""

from __future__ import annotations

import math

import torch

from pipeline.data.loader import EvalLoader
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine
from pipeline.engine.normalize import mean_loss
from pipeline.objectives import Objective


def evaluate(engine: Engine, objective: Objective, loader: EvalLoader, job: Job) -> dict[str, float]:
    """eval/loss, the exact mean over the split; eval/perplexity for tokens, eval/accuracy for classes.

    The same on any number of ranks. Collective: every rank goes through the same number of batches.
    """
    sums: dict[str, torch.Tensor] = {}
    for batch, is_real in loader:
        loss = engine.eval_step(batch, objective)
        if not is_real:  # a rank that ran out of samples still takes part in the forward's collectives
            continue
        for key, value in {"loss": loss.loss_sum, "count": loss.count, **loss.extras}.items():
            sums[key] = sums.get(key, 0) + value.to(torch.float64)
    keys = ("loss", "count", *objective.extra_keys)
    zero = torch.zeros((), dtype=torch.float64, device=engine.device)
    total = job.all_reduce_sum(torch.stack([sums.get(key, zero).to(engine.device) for key in keys]))
    by_key = dict(zip(keys, total, strict=True))
    row = {"eval/loss": float(mean_loss(by_key["loss"], by_key["count"]))}
    if objective.unit == "tokens":
        row["eval/perplexity"] = math.exp(min(row["eval/loss"], 700.0))
    if "correct" in by_key:
        row["eval/accuracy"] = float(by_key["correct"] / by_key["samples"])
    return row
