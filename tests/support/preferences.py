"""Makes preference data in the form of `data.kind: preference`, and trains on it under any split."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.tiny import ALONE as ALONE
from support.tiny import VOCABULARY, make_bundle, recipe, resolve, settings
from torch import Tensor

from pipeline.config.batch_plan import BatchPlan
from pipeline.data.batches import Batch, as_batch, collate_items
from pipeline.data.bundle import DataBundle
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_eval_loader, build_meters

LENGTH = 24  # most tokens of a pair
STEPS = 3
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo"},
    "dpo smoothed": {"kind": "dpo", "label_smoothing": 0.2},
    "dpo hinge": {"kind": "dpo", "loss_type": "hinge", "beta": 0.5},
    "dpo ipo": {"kind": "dpo", "loss_type": "ipo"},
    "dpo robust": {"kind": "dpo", "loss_type": "robust", "label_smoothing": 0.1},
    "dpo of means, sft": {"kind": "dpo", "length_normalised": True, "sft_weight": 0.3, "beta": 1.0},
    "kto": {"kind": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.8},
    "orpo": {"kind": "orpo"},
    "simpo": {"kind": "simpo"},
    "cpo": {"kind": "cpo"},
    "reward": {"kind": "reward", "margin_weight": 0.5, "center_weight": 0.01},
}


@dataclass
class PreferenceRows:
    """Rows of pairs of answers, with uneven lengths.

    Args:
        examples: Each pair is a desirable or undesirable answer and a mismatched one, as KTO reads them.
        number: Number of pairs.
        in_row: Number of pairs per row. The pairs are the same for every value.
    """

    examples: bool = False
    number: int = 24
    in_row: int = 1
    seed: int = 0
    is_deterministic: bool = field(default=True, init=False)

    def __len__(self) -> int:
        return self.number // self.in_row

    def pair(self, index: int) -> list[tuple[int, Tensor, Tensor, float]]:
        """Return both segments of a pair.

        Returns:
            Kind, tokens, mask of the answer's tokens, and reference log-probability of each segment.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + index)

        def draw_integer(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        def draw_tokens(size: int) -> Tensor:
            return torch.randint(0, VOCABULARY, (size,), generator=generator)

        prompt = draw_tokens(draw_integer(1, 6))
        kinds = (1 + draw_integer(0, 2), 3) if self.examples else (1, 2)
        segments = []
        for kind in kinds:
            answer = draw_tokens(draw_integer(2, 8))
            mask = torch.cat([torch.zeros(len(prompt)), torch.ones(len(answer))]).bool()
            reference = -5.5 * len(answer) + 2 * float(torch.rand((), generator=generator)) - 3 * (kind == 3)
            segments.append((kind, torch.cat([prompt, answer]), mask, reference))
        return segments

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        num_segments = 2 * self.in_row
        length = LENGTH * self.in_row
        row = {
            "input_ids": torch.zeros(length, dtype=torch.long),
            "shift_labels": torch.full((length,), -100),
            "position_ids": torch.arange(length),
            "segments": torch.full((length,), -1),
            "segment_kinds": torch.zeros(num_segments, dtype=torch.long),
            "reference_logps": torch.zeros(num_segments),
            "margins": torch.zeros(num_segments),
        }
        start = segment = 0
        for number in range(self.in_row):
            for kind, tokens, mask, reference in self.pair(index * self.in_row + number):
                end = start + len(tokens)
                row["input_ids"][start:end] = tokens
                row["shift_labels"][start : end - 1] = torch.where(mask, tokens, -100)[1:]
                row["position_ids"][start:end] = torch.arange(len(tokens))
                row["segments"][start:end] = segment
                row["segment_kinds"][segment] = kind
                row["reference_logps"][segment] = reference
                row["margins"][segment] = (kind == 1) * len(tokens) / 10
                start = end
                segment += 1
        row["position_ids"][start:] = torch.arange(length - start)
        return row


def preference_bundle(examples: bool = False, in_row: int = 1) -> DataBundle:
    """Return 24 pairs to train on and 12 held-out ones."""
    held_out = {"held out": PreferenceRows(examples, 12, in_row, seed=1)}
    return make_bundle(PreferenceRows(examples, 24, in_row), held_out, VOCABULARY, "answers")


def make_recipe(loss: str, micro_batch_size: int = 8, in_row: int = 1) -> dict[str, Any]:
    """Return a recipe whose step takes 8 pairs (or examples), for any number of pairs per row."""
    tree = recipe(
        batch={"micro_batch_size": micro_batch_size, "global_batch_size": 8 // in_row},
        objective=LOSSES[loss],
        optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.5},
    )
    tree["model"] = tree["model"] | {"max_sequence_length": 4 * LENGTH, "num_key_value_heads": 2}
    return tree


def make_micro_batches(
    rows: PreferenceRows, step: int, plan: BatchPlan, dp_rank: int, dp_world_size: int
) -> list[Batch]:
    """Return a rank's micro-batches of a step; they hold the same pairs for any number of pairs per row."""
    size = plan.micro_batch_size
    starts = (
        step * plan.global_batch_size + (number * dp_world_size + dp_rank) * size
        for number in range(plan.gradient_accumulation_steps)
    )
    return [as_batch(collate_items([rows[start + offset] for offset in range(size)])) for start in starts]


def train_preferences(
    job: Job, tree: dict[str, Any], split: dict[str, Any] | None, in_row: int = 1
) -> list[dict[str, float]]:
    """Return the `train/` columns of each step, and then the results of an evaluation. Collective."""
    data = preference_bundle(tree["objective"]["kind"] == "kto", in_row)
    config, resolved = resolve(tree, split, job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    objective = build_objective(settings(tree, split).config)
    meters = build_meters(config, resolved, job=job, engine=engine, objective=objective, directory=Path())
    rows = []
    for step in range(STEPS):
        seed_step(config.seed, step, engine.seed_rank)
        group = make_micro_batches(
            data.train, step, resolved.batch_plan, engine.dp_rank, engine.dp_world_size
        )
        result = engine.train_step(group, objective, 1e-3, 0)
        meters.observe(result)
        rows.append(
            {key: value for key, value in meters.collect_row().read().row.items() if key[:6] == "train/"}
        )
    rows.append(
        evaluate(engine, objective, build_eval_loader(config, resolved.batch_plan, data, engine), job)
    )
    engine.close()
    return rows
