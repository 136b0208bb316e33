"""Trains a tiny language model on data with uneven loss masks, under any split, and returns its curve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.config.batch_plan import plan_batch
from pipeline.config.deepspeed_adoption import adopt_torch_section
from pipeline.config.loading import ConfigFile
from pipeline.config.recipe import validate_recipe
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.config.split import Device
from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.interface import Engine, mean_loss
from pipeline.engine.schedule import learning_rate_multiplier
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

VOCABULARY = 257
ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
# Precision -> relative difference of a step's loss and gradient norm from the fp32 reference. One process in
# half precision has the same tolerances.
TOLERANCES = {"fp32": (2e-6, 1e-5), "bf16": (1e-3, 2e-2), "fp16": (1e-3, 1e-2)}
CPU = Device("cpu", bf16=True, fp16=True)


class MaskedTokens(Dataset[Any]):
    """Random sequences whose number of valid labels varies from one or two to all.

    Args:
        packed: Whether a sequence holds several documents, with positions that restart at each.
    """

    def __init__(self, num_samples: int = 64, length: int = 24, seed: int = 0, packed: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (num_samples, length + 1), generator=generator)
        self.valid = torch.randint(2, length + 1, (num_samples,), generator=generator)
        self.positions = _make_positions(num_samples, length, generator) if packed else None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[self.valid[index] :] = -100
        sample = {"input_ids": self.tokens[index, :-1], "shift_labels": labels}
        if self.positions is not None:
            labels[:-1][self.positions[index, 1:] == 0] = -100  # a document's last token has no next token
            sample["position_ids"] = self.positions[index]
        return sample

    def find(self, input_ids: Tensor) -> list[int]:
        """Return the index of each row of `input_ids` (B, T), which may be on any device."""
        return [int((self.tokens[:, :-1] == row).all(dim=1).nonzero()) for row in input_ids.cpu()]


def _make_positions(num_samples: int, length: int, generator: torch.Generator) -> Tensor:
    """Return positions (num_samples, length) that restart at 0 about every sixth token."""
    starts = torch.rand(num_samples, length, generator=generator) < 1 / 6
    starts[:, 0] = True
    offsets = torch.arange(length).expand(num_samples, -1)
    return offsets - torch.where(starts, offsets, 0).cummax(dim=1).values


def make_bundle(
    train: Any, held_out: Mapping[str, Any], vocab_size: int | None, fingerprint: str
) -> DataBundle:
    """Return the bundle of data whose samples are dicts of tensors."""
    return DataBundle(
        train=train,
        eval=held_out,
        collate=collate_items,
        tokenizer=None,
        vocab_size=vocab_size,
        num_classes=None,
        fingerprint=fingerprint,
    )


def token_bundle(packed: bool = False) -> DataBundle:
    """Return 64 sequences to train on and 19 held-out ones."""
    held_out = {"tiny": MaskedTokens(19, seed=1, packed=packed)}
    return make_bundle(MaskedTokens(packed=packed), held_out, VOCABULARY, "tiny")


def recipe(**changes: Any) -> dict[str, Any]:
    """Return a recipe for a Llama of two layers; `changes` replaces whole sections."""
    tree: dict[str, Any] = {
        "max_steps": 8,
        "model": {
            "kind": "causal_lm",
            "architecture": "llama",
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_sequence_length": 24,
        },
        "data": {"kind": "tests:unused"},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
        "schedule": {"warmup": 2},
        "wandb": {"mode": "disabled"},
    }
    if ":" in changes.get("model", {}).get("kind", ""):
        tree["objective"] = {"kind": "model_loss"}  # a model of one's own has no default objective
    return tree | changes


def deepspeed_json(stage: int, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON for a ZeRO stage; `zero` adds keys of `zero_optimization`."""
    tree: dict[str, Any] = {"zero_optimization": {"stage": stage, **zero}}
    if precision == "fp16":
        # This scale does not overflow. A search for the scale would skip steps and shift the curve.
        tree["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if precision == "bf16":
        tree["bf16"] = {"enabled": True}
    return tree


def settings(tree: dict[str, Any], deepspeed: dict[str, Any] | None) -> Settings:
    """Validate a recipe and a DeepSpeed JSON as if they were read from files; `None`: plain PyTorch."""
    source = ConfigFile(Path("tiny.yaml"), dict(tree))
    split = None if deepspeed is None else ConfigFile(Path("tiny.json"), deepspeed)
    if split is not None and "torch" in split.tree:
        adopt_torch_section(source, split)
    return Settings(validate_recipe(source), source.path, split)


def resolve(
    tree: dict[str, Any], split: dict[str, Any] | None, world_size: int
) -> tuple[RunConfig, ResolvedSettings]:
    """Return the configuration and the resolved settings of a run on `world_size` CPU ranks."""
    given = settings(tree, split)
    return given.config, given.resolve(world_size, CPU)


def make_engine(job: Job, tree: dict[str, Any], deepspeed: dict[str, Any] | None, data: DataBundle) -> Engine:
    """Build the engine of a recipe and a DeepSpeed JSON on this rank. Collective."""
    config, resolved = resolve(tree, deepspeed, job.ranks.world_size)
    return build_engine(config, resolved, job, data)


def train_curve(
    job: Job, tree: dict[str, Any], deepspeed: dict[str, Any] | None, steps: int = 6
) -> list[tuple[float, float]]:
    """Train some steps and return (loss, gradient norm) of each, as a run would log them. Collective."""
    return train_curve_from_settings(job, settings(tree, deepspeed), steps)


def train_curve_from_settings(job: Job, given: Settings, steps: int) -> list[tuple[float, float]]:
    """Train as `train_curve` does, with validated settings. Collective."""
    data = token_bundle()
    config = given.config
    engine = build_engine(config, given.resolve(job.ranks.world_size, CPU), job, data)
    plan = plan_batch(config.batch, engine.dp_world_size)
    loader = build_loader(config, plan, data, engine)
    objective = build_objective(config)
    curve = []
    for step in range(steps):
        seed_step(config.seed, step, engine.seed_rank)
        rate = config.optimizer.learning_rate * learning_rate_multiplier(config.schedule, step, steps)
        result = engine.train_step(loader.next_group(), objective, rate, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        loss = float(mean_loss(total, result.global_count))
        grad_norm = float("nan") if result.grad_norm is None else float(result.grad_norm)
        curve.append((loss, grad_norm))
    loader.close()
    engine.close()
    return curve
