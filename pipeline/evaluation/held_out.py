"""Evaluates a model on held-out data sets. Losses and counts are summed over all ranks and divided once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import EvalConfig, RunConfig
from pipeline.data.batches import IGNORE_INDEX
from pipeline.data.bundle import DataBundle
from pipeline.data.loader import EvalLoader
from pipeline.data.tokenizer import count_token_bytes
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.distributed.stopping import STOP_FLAG, FlagReader, StopOnSignal
from pipeline.engine.interface import Evaluator, compute_evaluation_loss, compute_extra_means
from pipeline.errors import ConfigError
from pipeline.models.embeddings import get_vocabulary_size
from pipeline.objectives import Objective
from pipeline.objectives.interface import TwoPassObjective, list_extra_sums

TEXT_KEYS = ("text_targets", "text_bytes")
"""Names of two sums that the host counts: targets, and bytes of their text."""


def build_eval_loader(
    config: RunConfig, plan: BatchPlan, data: DataBundle, engine: Evaluator
) -> EvalLoader | None:
    """Return a loader of this rank's share of all held-out data; `None` if no data is held out.

    These are the sets of `data.eval`, whose mean is `eval/loss`, and the further sets of `data.eval_sets`.
    """
    if not data.eval and not data.eval_sets:
        return None
    return EvalLoader(
        {**data.eval, **data.eval_sets},
        data.collate,
        names_in_mean=data.eval,
        micro_batch_size=plan.micro_batch_size,
        dp_rank=engine.dp_rank,
        dp_world_size=engine.dp_world_size,
        max_samples=config.eval.max_samples,
        num_workers=config.loader.num_workers,
        pin_memory=engine.device.type == "cuda",
        vocab_size=get_vocabulary_size(engine.module) if config.model.language_model is not None else None,
        token_bytes=count_token_bytes(data.tokenizer) if data.tokenizer is not None else None,
    )


@tag_errors(Phase.EVALUATION)
def evaluate(
    engine: Evaluator, objective: Objective, loader: EvalLoader, job: Job, stop: StopOnSignal | None = None
) -> dict[str, float] | None:
    """Return the means over the held-out data, equal for any number of ranks. Collective.

    `eval/loss` is the exact mean over all sets of `loader.names_in_mean` together, and so are the objective's
    further means, such as `eval/accuracy`. If losses are counted per token, `eval/perplexity` is added, and
    `eval/bits_per_byte` if the bytes of the tokens are known. With several sets, the same means of each set
    are added as `eval/<set>/...`, without the perplexity. If no target counts, the loss is NaN, and `targets`
    with the value 0 is added.

    Every rank runs the same number of batches.

    Args:
        engine: Engine that computes the loss.
        objective: Objective to evaluate. The mean of a TwoPassObjective's first pass is set in it.
        loader: Loader of this rank's share.
        job: Ranks of the job.
        stop: Receiver of signals, which end the evaluation early to leave time for the checkpoint; `None` if
            nothing ends it.

    Returns:
        Values of a metrics row by name; `None` if a signal on any rank ended the evaluation early.
    """
    if isinstance(objective, TwoPassObjective):
        first_row = evaluate(engine, objective.first_pass, loader, job, stop)
        if first_row is None:
            return None
        objective.set_first_pass_mean(first_row["eval/loss"])
    keys = ("loss", "count", *list_extra_sums(objective.means))
    sums = {name: torch.zeros(len(keys), dtype=torch.float64, device=engine.device) for name in loader.names}
    token_bytes = loader.token_bytes if objective.unit == "tokens" else None
    text = {name: np.zeros(len(TEXT_KEYS)) for name in loader.names}
    zero = torch.zeros((), device=engine.device)
    flag_reader = FlagReader(engine.device)
    for name, batch, is_real in loader:
        job.progress.start_activity("evaluation")
        if stop is not None:
            flag = float(STOP_FLAG * stop.requested)
            # torch.full does not synchronize with the device, as a copy from the host would.
            flags = torch.full((), flag, dtype=torch.float64, device=engine.device)
            if flag_reader.read(job.all_reduce_sum(flags)).stop:
                return None
        loss = engine.eval_step(batch, objective)
        if not is_real:  # a rank without further samples still takes part in the forward's collectives
            continue
        values = {"loss": loss.loss_sum, "count": loss.count, **loss.extras}
        sums[name] += torch.stack([values.get(key, zero).to(engine.device, torch.float64) for key in keys])
        if token_bytes is not None:
            text[name] += _count_text(batch, token_bytes)
    keys += TEXT_KEYS
    host_sums = torch.from_numpy(np.stack(list(text.values()))).to(engine.device)
    local_sums = torch.cat([torch.stack(list(sums.values())), host_sums], dim=1)
    global_sums = job.all_reduce_sum(local_sums)  # (sets, keys)
    sums_by_name = dict(zip(loader.names, global_sums, strict=True))
    total = torch.stack([sums_by_name[name] for name in loader.names_in_mean]).sum(dim=0)
    row = _compute_means("eval/", dict(zip(keys, total, strict=True)), objective)
    if objective.unit == "tokens":
        row["eval/perplexity"] = math.exp(min(row["eval/loss"], 700.0))  # a larger exponent would overflow
    if len(sums_by_name) > 1:
        for name, sums_of_set in sums_by_name.items():
            row |= _compute_means(f"eval/{name}/", dict(zip(keys, sums_of_set, strict=True)), objective)
    return row


def _count_text(batch: Mapping[str, Any], token_bytes: NDArray[np.int64]) -> tuple[int, int]:
    """Return the numbers of TEXT_KEYS of a batch in host memory.

    Ranks that share a sample may each count it, because only the ratio of the two numbers is used.
    """
    labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    values = labels.numpy()  # torch would start all its threads for a few kB
    targets = values[values != IGNORE_INDEX]
    return targets.size, int(token_bytes[targets].sum())


def get_best_metric(
    config: EvalConfig, row: Mapping[str, float], objective: Objective
) -> dict[str, float | str]:
    """Return the name, value and mode of the metric that chooses the best checkpoint.

    A checkpoint stores them. The value is NaN if no target counted for this metric of the objective, or if
    the metric is the loss and only tasks were evaluated.

    Args:
        config: Section `eval` of the recipe.
        row: Results of the evaluation.
        objective: Objective of the run.

    Raises:
        ConfigError: The evaluation has no such metric.
    """
    metric = config.best_metric
    value = row.get(f"eval/{metric}")
    if value is None:
        metric_without_set = metric.rpartition("/")[2]
        is_known = metric in objective.means or metric_without_set in objective.means
        if not is_known and metric != "loss":
            known = ", ".join(name.removeprefix("eval/") for name in row)
            raise ConfigError(
                f"eval.best_metric: {metric!r} is no metric of this run's evaluation; it has {known}"
            )
        value = math.nan
    return {"metric": metric, "value": value, "mode": "min" if config.best_is_lowest else "max"}


def _compute_means(prefix: str, sums: dict[str, torch.Tensor], objective: Objective) -> dict[str, float]:
    """Return loss and further means with this prefix, from sums over all ranks."""
    extra_means = compute_extra_means(sums, objective.means)
    means = {"loss": compute_evaluation_loss(sums, objective.means, objective.eval_weights), **extra_means}
    targets, num_bytes = (float(sums[key]) for key in TEXT_KEYS)
    if num_bytes:
        means["bits_per_byte"] = means["loss"] / math.log(2) * targets / num_bytes
    if not sums["count"]:  # NaN, because a loss of 0 would be the best of all evaluations
        means |= {"loss": math.nan, "targets": 0.0}
    return {f"{prefix}{name}": mean for name, mean in means.items()}
