"""Measures activation checkpointing: bytes kept for backward, and seconds a step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from pipeline.config.model_schema import CausalLMConfig
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.objectives import CausalLM

MODES = ("none", 2, "selective", "full")
MODEL: dict[str, Any] = {
    "architecture": "llama",
    "num_layers": 4,
    "num_heads": 8,
    "hidden_size": 256,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "max_sequence_length": 256,
}


def kept_bytes(mode: str | int, **model_keys: Any) -> int:
    """Activations alive between forward and backward of 4 x 256 tokens, of the second of two."""
    model = _model(mode, **model_keys)
    batch = _batch()
    CausalLM()(model, batch).loss_sum.backward()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = CausalLM()(model, batch).loss_sum
        snapshot = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        loss.backward()
    return next(bytes_ for kind, bytes_ in snapshot.items() if "ACT" in str(kind))


def step_seconds(mode: str | int) -> float:
    """Median of a forward and backward over 4 x 256 tokens."""
    model = _model(mode)
    batch = _batch()
    seconds = []
    for _ in range(17):
        start = time.perf_counter()
        CausalLM()(model, batch).loss_sum.backward()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _model(mode: str | int, **keys: Any) -> torch.nn.Module:
    config = CausalLMConfig(**MODEL, activation_checkpointing=mode, **keys)
    model = build_model(config, ModelRequest(NoSharding()), 0)
    return apply_transforms(model, config, TransformContext(torch.device("cpu"))).train()


def _batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, MODEL["vocab_size"], (4, MODEL["max_sequence_length"]))
    return {"input_ids": tokens, "labels": tokens}


def activation_table() -> str:
    """One row a mode, for 4 blocks of width 256."""
    rows = []
    base = None
    for mode in MODES:
        kept = kept_bytes(mode)
        seconds = step_seconds(mode)
        base = base or (kept, seconds)
        row = f"| `{mode}` | {kept / 2**20:.0f} MiB | {kept / base[0]:.2f} | {seconds / base[1]:.2f} |"
        print(row, flush=True)
        rows.append(row)
    return "\n".join(
        ["| mode | kept for backward | of `none` | time of a step |", "|---|---|---|---|", *rows]
    )
