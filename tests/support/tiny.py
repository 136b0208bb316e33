"""A tiny language model on data with uneven masks, and the curve it trains on under any split."""

from __future__ import annotations

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
# Relative difference allowed a step against the fp32 oracle: loss, gradient norm. One process in half
# precision is held to the same bands.
TOLERANCES = {"fp32": (2e-6, 1e-5), "bf16": (1e-3, 2e-2), "fp16": (1e-3, 1e-2)}
CPU = Device("cpu", bf16=True, fp16=True)


class MaskedTokens(Dataset[Any]):
    """Sequences whose number of valid labels runs from a few to all; `packed`: of several documents each."""

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
            labels[:-1][self.positions[index, 1:] == 0] = -100  # the last token of a document
            sample["position_ids"] = self.positions[index]
        return sample

    def find(self, input_ids: Tensor) -> list[int]:
        """The index of each row (B, T), wherever it lies."""
        return [int((self.tokens[:, :-1] == row).all(dim=1).nonzero()) for row in input_ids.cpu()]


def _make_positions(num_samples: int, length: int, generator: torch.Generator) -> Tensor:
    """(num_samples, length), starting again at 0 where a document starts: about every sixth token."""
    starts = torch.rand(num_samples, length, generator=generator) < 1 / 6
    starts[:, 0] = True
    places = torch.arange(length).expand(num_samples, -1)
    return places - torch.where(starts, places, 0).cummax(dim=1).values


def token_bundle(packed: bool = False) -> DataBundle:
    held_out = {"tiny": MaskedTokens(19, seed=1, packed=packed)}
    return DataBundle(MaskedTokens(packed=packed), held_out, collate_items, None, VOCABULARY, None, "tiny")


def recipe(**changes: Any) -> dict[str, Any]:
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
    return tree | changes


def deepspeed_json(stage: int, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"zero_optimization": {"stage": stage, **zero}}
    if precision == "fp16":
        # A scale that needs no search: skipped steps would shift the curve against the oracle's.
        tree["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if precision == "bf16":
        tree["bf16"] = {"enabled": True}
    return tree


def settings(tree: dict[str, Any], deepspeed: dict[str, Any] | None) -> Settings:
    source = ConfigFile(Path("tiny.yaml"), dict(tree))
    split = None if deepspeed is None else ConfigFile(Path("tiny.json"), deepspeed)
    if split is not None and "torch" in split.tree:
        adopt_torch_section(source, split)
    return Settings(validate_recipe(source), source.path, split)


def resolve(
    tree: dict[str, Any], split: dict[str, Any] | None, world_size: int
) -> tuple[RunConfig, ResolvedSettings]:
    """What a run on this many ranks would be given."""
    chosen = settings(tree, split)
    return chosen.config, chosen.resolve(world_size, CPU)


def make_engine(job: Job, tree: dict[str, Any], deepspeed: dict[str, Any] | None, data: DataBundle) -> Engine:
    config, resolved = resolve(tree, deepspeed, job.ranks.world_size)
    return build_engine(config, resolved, job, data)


def train_curve(
    job: Job, tree: dict[str, Any], deepspeed: dict[str, Any] | None, steps: int = 6
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: the numbers a run would log."""
    return train_curve_from_settings(job, settings(tree, deepspeed), steps)


def train_curve_from_settings(job: Job, chosen: Settings, steps: int) -> list[tuple[float, float]]:
    """As `train_curve`, of settings as they were read."""
    data = token_bundle()
    config = chosen.config
    engine = build_engine(config, chosen.resolve(job.ranks.world_size, CPU), job, data)
    plan = plan_batch(config.batch, engine.dp_world_size)
    loader = build_loader(config, plan, data, engine)
    objective = build_objective(config)
    curve = []
    for step in range(steps):
        seed_step(config.seed, step, engine.seed_rank)
        rate = config.optimizer.learning_rate * learning_rate_multiplier(config.schedule, step, steps)
        result = engine.train_step(loader.next_group(), objective, rate, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        norm = result.grad_norm
        curve.append(
            (float(mean_loss(total, result.global_count)), float("nan") if norm is None else float(norm))
        )
    loader.close()
    engine.close()
    return curve
