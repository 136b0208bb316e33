"""Unit and meaning of every column of metrics.jsonl.

`docs/write_reference.py` writes the tables of docs/reference/metrics-and-alerts.md from it. A new
column needs an entry here: tests/monitoring/test_columns.py compares the entries with the rows of runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """Description of a column."""

    unit: str
    """Unit of the value."""
    meaning: str
    """Description of the value, and of the rows that have it if not all of its kind do."""


TRAINING = {
    "train/loss": Column(
        "nats for language models",
        "Mean loss of the last step's global batch: per token, or per sample or pair if the objective counts "
        "these.",
    ),
    "train/grad_norm": Column("none", "Norm of the last step's gradient before clipping."),
    "train/learning_rate": Column(
        "none", "Learning rate of the last step, for parameters outside any group."
    ),
    "train/loss_scale": Column("none", "Loss scale. fp16 only."),
    "train/skipped_steps": Column("steps", "Steps so far whose gradient was infinite or NaN."),
    "train/skipped_in_a_row": Column(
        "steps", "Consecutive such steps up to the last step. Absent if there are none."
    ),
    "train/samples_seen": Column("samples", "Samples read so far, over all ranks."),
    "train/tokens_seen": Column("tokens", "Target tokens so far, over all ranks. Language models only."),
    "train/epoch": Column("epochs", "Passes over the training data so far."),
    "train/METRIC": Column("per metric", "Further mean of the objective over the last step's global batch."),
    "data/SOURCE_samples": Column("samples", "Samples of a source so far. Only with several sources."),
}
"""Columns of training rows about the loss and the data."""

PERFORMANCE = {
    "perf/step_time_seconds": Column(
        "s per step", "Mean time of a step, without evaluations, checkpoints and generation."
    ),
    "perf/data_time_seconds": Column("s per step", "Part of it in which the rank waits for data."),
    "perf/samples_per_second": Column("samples/s", "Throughput of all ranks."),
    "perf/tokens_per_second": Column("tokens/s", "Throughput of all ranks in target tokens."),
    "perf/tokens_per_second_per_device": Column("tokens/s", "The same, divided by the number of ranks."),
    "perf/mfu": Column(
        "share",
        "Model FLOPs utilisation: FLOPs of the model, counted as in PaLM, divided by the device's dense "
        "peak. Absent if either is unknown.",
    ),
    "perf/hfu": Column(
        "share",
        "The same with the recomputed forward of checkpointed blocks, an upper bound. Only if blocks "
        "recompute matrix products.",
    ),
    "perf/own_time_seconds": Column(
        "s per step",
        "Time that the median rank spends on data, forward and backward without waiting for others. Only "
        "with several ranks.",
    ),
    "perf/slowest_rank": Column("rank", "Rank with the longest own time."),
    "perf/slowest_rank_own_time_seconds": Column("s per step", "Own time of that rank."),
    "perf/first_step_seconds": Column(
        "s", "Time from the start of the process to the end of its first step. First row of a process."
    ),
    "perf/checkpoint_stall_seconds": Column(
        "s", "Time that training waited for the newest checkpoint. First row after it is complete."
    ),
    "perf/checkpoint_write_seconds": Column("s", "Time that its files took on their own thread."),
    "perf/elapsed_seconds": Column("s", "Wall time of all processes of the run so far."),
    "perf/goodput": Column(
        "share", "Part of it spent in steps that count: no startup, evaluation, save or repeated step."
    ),
    "perf/cost": Column("your currency", "Cost so far. Only with `log.price_per_device_hour`."),
}
"""Columns of training rows about speed."""

PHASE_MEANINGS = {
    "data": "The device waits for the next batch.",
    "forward": "Model and loss. At ZeRO 3 without the wait for parameters.",
    "backward": "Backward, recomputation, and the gradient reduction that DDP and ZeRO overlap with it.",
    "communication": "Other waits between ranks: for a rank that is late, for ZeRO 3's parameters in the "
    "forward, for pipeline transfers and their bubble. Only with several ranks.",
    "optimizer": "Norm, clipping and update, with the collectives of ZeRO 1 to 3.",
    "checkpoint": "Training waits for a save.",
    "evaluation": "Training waits for an evaluation.",
    "generation": "Training waits for text from the model.",
    "other": "The rest: logging, callbacks, your code between two calls of `run.step()`.",
}
"""Phase -> meaning of its column `time/PHASE_seconds`."""
TIME = {f"time/{phase}_seconds": Column("s", meaning) for phase, meaning in PHASE_MEANINGS.items()}
"""Columns of training rows that add up to the wall time of rank 0 since the previous row. A phase that
follows a row counts in the next row."""

MEMORY = {
    "memory/peak_allocated_gib": Column("GiB", "Peak of the tensors on rank 0's GPU since the previous row."),
    "memory/peak_reserved_gib": Column("GiB", "Peak that its allocator took from the GPU since then."),
    "memory/alloc_retries": Column(
        "count", "Times since then that the allocator was full and freed its cache. Such steps are slow."
    ),
    "memory/peak_resident_gib": Column("GiB", "Peak host memory of rank 0's process since its start."),
    "gpu/utilization": Column(
        "share", "Share of the last moment in which any kernel ran, mean of all GPUs. Needs `nvidia-ml-py`."
    ),
    "gpu/power_watts": Column("W", "Power of all GPUs together. Needs `nvidia-ml-py`."),
    "gpu/temperature_celsius": Column("°C", "Temperature of the hottest GPU. Needs `nvidia-ml-py`."),
}
"""Columns of training rows about devices."""

EVALUATION = {
    "eval/loss": Column(
        "as `train/loss`", "Exact mean over the held-out data, equal for any number of ranks."
    ),
    "eval/perplexity": Column("none", "exp(`eval/loss`). Language models with the built-in loss only."),
    "eval/bits_per_byte": Column(
        "bits per byte",
        "Loss per byte of text, which compares models with different tokenizers. Only with the built-in loss "
        "and text data.",
    ),
    "eval/targets": Column("targets", "0: nothing counts in the loss of the held-out data, which is NaN."),
    "eval/METRIC": Column("per metric", "Further mean of the objective."),
    "eval/SET/METRIC": Column("per metric", "The same means of one set. Only with several sets."),
    "eval/tasks/TASK/METRIC": Column("per metric", "Metric of a task of `eval.tasks`."),
}
"""Columns of evaluations."""

OBJECTIVE_METRICS = {
    "accuracy": Column("share", "Correct predictions. Classification."),
    "router_aux_loss": Column(
        "none",
        "Load-balancing loss of a mixture of experts, before its coefficient. Language models with experts.",
    ),
    "rewards/chosen": Column(
        "none", "Mean reward of the chosen answers. Preferences and reward models; KTO: desirable answers."
    ),
    "rewards/rejected": Column("none", "Mean reward of the rejected answers; KTO: undesirable answers."),
    "rewards/margin": Column("none", "Mean difference of the two. Pairs only."),
    "rewards/accuracy": Column("share", "Pairs whose chosen answer has the higher reward."),
    "logps/chosen": Column("nats", "Mean log-probability of the chosen answers, summed over their tokens."),
    "logps/rejected": Column("nats", "The same of the rejected answers."),
    "sft_loss": Column("nats per token", "Cross entropy of the chosen answers. Only with its weight set."),
    "kl": Column("nats", "Baseline of KTO: distance to the reference on mismatched answers."),
}
"""METRIC of the built-in objectives, for `train/METRIC` and `eval/METRIC`. A custom one adds its own."""

COLUMNS = TRAINING | PERFORMANCE | TIME | MEMORY | EVALUATION
"""Name -> description. Words in capitals stand for names of the run: METRIC, SOURCE, SET, TASK."""
