"""Histograms of weights and gradients are those of the whole tensors, whoever holds which part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parity.splits import GPT2, LLAMA
from support.resume_across_splits import (
    SPLITS,
    GatheredShards,
    Run,
    assemble_tensors,
    copy_shards,
    make_recipe,
    run_on_split,
)

from pipeline.distributed.process_group import Job
from pipeline.monitoring.histograms import (
    BINS,
    EDGES,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    HistogramMeter,
    count_bins,
)

EVERY = 2


def of_numpy(values: np.ndarray) -> np.ndarray:
    """Counts by NumPy's own histogram of magnitudes."""
    values = values[np.isfinite(values)].astype(np.float64)
    sizes = np.minimum(np.abs(values), np.nextafter(EDGES[-1], 0))
    magnitudes = EDGES[len(EDGES) // 2 :]
    above, below = (np.histogram(sizes[values * sign > 0], magnitudes)[0] for sign in (1, -1))
    counts = np.concatenate([below[::-1], [0], above])
    counts[BINS // 2] = len(values) - counts.sum()
    return counts


def test_counts_are_numpys():
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(50_000, generator=generator) * torch.exp(
        12 * torch.randn(50_000, generator=generator)
    )
    powers = 2.0 ** torch.arange(LOWEST_EXPONENT - 3, HIGHEST_EXPONENT + 3)
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38])
    values = torch.cat([drawn, powers, -powers, odd])
    assert count_bins(values).tolist() == of_numpy(values.numpy()).tolist()
    assert len(EDGES) == BINS + 1 <= 513, "W&B takes 512 bins"
    assert (np.diff(EDGES) > 0).all()


def test_more_values_than_fp32_counts(monkeypatch):
    monkeypatch.setattr("pipeline.monitoring.histograms.CHUNK_SIZE", 1000)
    assert count_bins(torch.ones(2**20 + 7)).sum() == 2**20 + 7


def look(job: Job, tree: dict[str, Any], split: dict[str, Any]):
    """(histograms of the second step, this rank's shards after it, what the first step gave)."""
    run = Run(job, tree, split)
    meter = HistogramMeter(run.engine, job, EVERY)
    told = []
    for step in range(EVERY):
        with meter.watch_step(step + 1):
            run.train(step, step + 1)
        told.append(meter.finish_step(step + 1))
    assert told[-1] is not None
    return told[-1].read(), copy_shards(run.engine), told[0]


@pytest.mark.slow
@pytest.mark.daily("LLAMA-ddp", "LLAMA-zero2", "LLAMA-zero3", "LLAMA-pipeline-zero1", "LLAMA-zero0-bf16")
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "ddp", "zero0", "zero1", "zero2", "zero3", "zero0-bf16", "zero2-bf16", "zero3-fp16"),
        *("zero2-cpu", "zero3-all-cpu", "zero3-small-groups", "zero2-round-robin", "pipeline-zero0"),
        *("pipeline-zero1", "pipeline-zero1-bf16", "tensor-zero0", "tensor-zero1", "tensor-zero3"),
        *("sequence-zero2", "sequence-zero3"),
    ],
)
@pytest.mark.parametrize("model", [LLAMA], ids=["LLAMA"])
def test_all_ranks_together_count_the_whole_model(ranks, name, model):
    check(ranks, name, model)


@pytest.mark.slow
@pytest.mark.daily("pipeline-zero1")
@pytest.mark.parametrize("name", ["zero3", "pipeline-zero0", "pipeline-zero1"])
def test_a_tied_weight_counts_once(ranks, name):
    check(ranks, name, GPT2)


def check(ranks, name, model):
    results = run_on_split(ranks, SPLITS[name], look, make_recipe(model))
    (told, _, before), *others = results
    assert before is None, "not a step of the interval"
    for other, *_ in others:
        assert all(np.array_equal(other.weights[key], told.weights[key]) for key in told.weights)
    whole = assemble_tensors(GatheredShards({}, [shard for _, shards, _ in results for shard in shards]))
    weights = {key: values for (key, kind), values in whole.items() if kind == "weight"}
    assert told.weights.keys() == told.gradients.keys() == weights.keys()
    for key, values in weights.items():
        assert told.weights[key].tolist() == of_numpy(values).tolist(), key
    # Gradients that are summed in another order, or rounded, fall across an edge now and then.
    ((alone, _, _),) = run_on_split(ranks, SPLITS["plain"], look, make_recipe(model))
    share, few = (0.1, 4) if "16" in name else (0.002, 3)
    for key, values in told.gradients.items():
        assert values.sum() == weights[key].size, key
        if key.endswith("c_attn.bias"):  # a third of it, the keys', has none but what rounding leaves
            continue
        moved = np.abs(np.cumsum(values - alone.gradients[key])).max()
        assert moved <= share * values.sum() + few, key
