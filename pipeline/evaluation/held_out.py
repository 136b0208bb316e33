"""Evaluates a model on held-out data sets. Losses and counts are summed over all ranks and divided once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import EvalConfig, RunConfig
from pipeline.data.bundle import DataBundle
from pipeline.data.loader import EvalLoader
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.distributed.stopping import STOP_FLAG, FlagReader, StopOnSignal
from pipeline.engine.interface import Evaluator, compute_evaluation_loss, compute_extra_means
from pipeline.errors import ConfigError
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.objectives import Objective
from pipeline.objectives.interface import TwoPassObjective, list_extra_sums


def build_eval_loader(
    config: RunConfig, plan: BatchPlan, data: DataBundle, engine: Evaluator
) -> EvalLoader | None:
    """Return a loader of this rank's share of all held-out data; `None` if no data is held out."""
    if not data.eval and not data.eval_sets:
        return None
    return EvalLoader(
        {**data.eval, **data.eval_sets},
        data.collate,
        total=data.eval,
        micro_batch_size=plan.micro_batch_size,
        dp_rank=engine.dp_rank,
        dp_world_size=engine.dp_world_size,
        max_samples=config.eval.max_samples,
        num_workers=config.loader.num_workers,
        pin_memory=engine.device.type == "cuda",
        num_words=get_vocabulary_size(engine.module) if config.model.language_model is not None else None,
    )


@tag_errors(Phase.EVALUATION)
def evaluate(
    engine: Evaluator, objective: Objective, loader: EvalLoader, job: Job, stop: StopOnSignal | None = None
) -> dict[str, float] | None:
    """Return the means over the held-out data, equal for any number of ranks. Collective.

    `eval/loss` is the exact mean over all sets of `loader.total` together. `eval/perplexity` comes
    with it for tokens, and `eval/accuracy` for classes. With several sets, `eval/<name>/loss` (and accuracy)
    of each is added. If no target of a set counts, its loss is NaN and its `targets` is 0.

    Every rank runs the same number of batches.

    Args:
        engine: Engine that computes the loss.
        objective: Objective to evaluate.
        loader: Loader of this rank's share.
        job: Ranks of the job.
        stop: Receiver of signals, which end the evaluation early to leave time for the checkpoint.

    Returns:
        The row; `None` if all ranks agreed to stop before the end.
    """
    if isinstance(objective, TwoPassObjective):
        known = evaluate(engine, objective.first_pass, loader, job, stop)
        if known is None:
            return None
        objective.set_first_pass_mean(known["eval/loss"])
    keys = ("loss", "count", *list_extra_sums(objective.means))
    sums = {name: torch.zeros(len(keys), dtype=torch.float64, device=engine.device) for name in loader.names}
    none = torch.zeros((), device=engine.device)
    flag_reader = FlagReader(engine.device)
    for name, batch, is_real in loader:
        job.progress.start_activity("evaluation")
        if stop is not None:
            flag = float(STOP_FLAG * stop.requested)
            flags = torch.full((), flag, dtype=torch.float64, device=engine.device)  # a copy would wait
            if flag_reader.read(job.all_reduce_sum(flags)).stop:
                return None
        loss = engine.eval_step(batch, objective)
        if not is_real:  # a rank without further samples still takes part in the forward's collectives
            continue
        values = {"loss": loss.loss_sum, "count": loss.count, **loss.extras}
        sums[name] += torch.stack([values.get(key, none).to(engine.device, torch.float64) for key in keys])
    everyones = job.all_reduce_sum(torch.stack(list(sums.values())))  # (sets, keys)
    by_name = dict(zip(loader.names, everyones, strict=True))
    total = torch.stack([by_name[name] for name in loader.total]).sum(dim=0)
    row = _compute_means("eval/", dict(zip(keys, total, strict=True)), objective)
    if objective.unit == "tokens":
        row["eval/perplexity"] = math.exp(min(row["eval/loss"], 700.0))
    if len(by_name) > 1:
        for name, values_of_set in by_name.items():
            row |= _compute_means(f"eval/{name}/", dict(zip(keys, values_of_set, strict=True)), objective)
    return row


def record_best_metric(
    config: EvalConfig, row: Mapping[str, float], objective: Objective
) -> dict[str, float | str]:
    """Return the record that a checkpoint stores of the metric that chooses the best checkpoint.

    Args:
        config: Section `eval` of the recipe.
        row: Result of `evaluate`.
        objective: Objective of the run.

    Raises:
        ConfigError: The evaluation has no such metric.
    """
    metric = config.best_metric
    uncounted = (
        math.nan if metric.rpartition("/")[2] in objective.means or metric in objective.means else None
    )
    if (value := row.get(f"eval/{metric}", uncounted)) is None:
        known = ", ".join(name.removeprefix("eval/") for name in row)
        raise ConfigError(
            f"eval.best_metric: {metric!r} is no metric of this run's evaluation; it has {known}"
        )
    return {"metric": metric, "value": value, "mode": "min" if config.best_is_lowest else "max"}


def _compute_means(prefix: str, sums: dict[str, torch.Tensor], objective: Objective) -> dict[str, float]:
    further = compute_extra_means(sums, objective.means)
    means = {"loss": compute_evaluation_loss(sums, objective.means, objective.weighted), **further}
    if not sums["count"]:  # NaN, because a loss of 0 would be the best of all evaluations
        means |= {"loss": math.nan, "targets": 0.0}
    return {f"{prefix}{name}": mean for name, mean in means.items()}
