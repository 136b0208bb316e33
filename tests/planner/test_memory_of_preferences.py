"""The peak of a step that compares answers by formula, against what tensors of a real engine's step take."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import support.preferences
import torch
from planner.allocations import Allocations
from support.preferences import ALONE, PreferenceRows, make_micro_batches, make_recipe
from support.tiny import resolve
from torch import Tensor

from pipeline.config.settings import ResolvedSettings
from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.models.sizes import measure_module
from pipeline.objectives import build_objective
from pipeline.planner.activations import MicroBatchSpec
from pipeline.planner.memory import compute_phase_peaks, count_batch_bytes
from pipeline.planner.rank import RankSlice
from pipeline.planner.states import count_buffers, count_states
from pipeline.training.assemble import build_engine

ROWS = 4
LENGTH = 256
PROMPT = 20
WORDS = 2048
SIZES = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "vocab_size": WORDS}


class LongAnswers(PreferenceRows):
    """Answers of which two fill a row."""

    def pair(self, index: int) -> list[tuple[int, Tensor, Tensor, float]]:
        kinds = (1, 3) if self.examples else (1, 2)
        size = LENGTH // 2
        answer = torch.arange(size) >= PROMPT
        tokens = torch.randint(0, WORDS, (size,), generator=torch.Generator().manual_seed(index))
        return [(kind, tokens, answer, -500.0) for kind in kinds]


def recipe_of(loss: str) -> dict[str, Any]:
    tree = make_recipe(loss)
    tree["model"] |= {**SIZES, "max_sequence_length": LENGTH}
    return tree | {"batch": {"micro_batch_size": ROWS, "gradient_accumulation_steps": 1}}


def made_and_said(tree: dict[str, Any], split: dict[str, Any], examples: bool) -> tuple[float, float]:
    """Bytes at the most, counted and by formula."""
    rows = LongAnswers(examples)
    config, resolved = resolve(tree, split, 1)
    data = DataBundle(rows, {"held out": rows}, collate_items, None, WORDS, None, "answers")
    engine = build_engine(config, resolved, ALONE, data)
    objective = build_objective(config)
    engine.train_step(group(rows, 0, resolved), objective, 1e-3, False)
    batches = group(rows, 1, resolved)
    gc.collect()
    with Allocations("cpu") as made:
        engine.train_step(batches, objective, 1e-3, False)
    model = measure_module(engine.module)
    engine.close()
    work = MicroBatchSpec.from_run(config, resolved, model, "cpu")
    assert work is not None
    work = replace(work, apart=True)
    rank = RankSlice.from_run(model, config, resolved, on_cpu=True)
    states = count_states(rank)
    beside = count_buffers(rank)
    held = states.device
    before = held.weights + held.masters + held.moments + beside.always + count_batch_bytes(work)
    return before + made.most, max(compute_phase_peaks(work, model, states, beside).values())


def group(rows: PreferenceRows, step: int, resolved: ResolvedSettings) -> Any:
    return make_micro_batches(rows, step, resolved.batch_plan, 0, 1)


@pytest.mark.daily("dpo-fp32", "kto-fp32")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "reward"])
def test_the_peak_of_a_step_that_compares(monkeypatch, loss, precision):
    monkeypatch.setattr(support.preferences, "LENGTH", LENGTH)
    split = {"torch": {"parallel": "single"}, "bf16": {"enabled": precision == "bf16"}}
    counted, said = made_and_said(recipe_of(loss), split, loss == "kto")
    assert said == pytest.approx(counted, rel=0.03)
