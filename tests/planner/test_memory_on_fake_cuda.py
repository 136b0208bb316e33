"""The peak of a rank on a GPU by formula, against the bytes that a real engine's step allocates on a card
that is not there.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from planner.test_memory_peak import GPT2, LLAMA, QWEN2, Run, counted, formula
from support.fake_cuda import DEVICE, hopper
from support.ranks import RankPool

from pipeline.distributed.process_group import Job
from pipeline.planner.model import Model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

# Widths of the heads are a multiple of what fused kernels take.
WIDE = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 2048}
RUNS = [
    Run("llama", LLAMA | WIDE, "bf16", length=512),
    Run("llama, all blocks recompute", LLAMA | WIDE, "bf16", recompute="full", length=512),
    Run(
        "llama, documents apart, words filled up",
        LLAMA | WIDE | {"vocab_size": 2051},
        "bf16",
        apart=True,
        length=512,
    ),
    Run("qwen2, two micro-batches", QWEN2 | WIDE, "bf16", accumulated=2, length=512),
    Run("llama, ZeRO 1", LLAMA | WIDE, "bf16", length=512, stage=1),
    Run("llama, ZeRO 2, recomputes", LLAMA | WIDE, "bf16", recompute="full", length=512, stage=2),
    Run("llama, ZeRO 3, recomputes", LLAMA | WIDE, "bf16", recompute="full", length=512, stage=3),
    Run("gpt2, recomputes", GPT2 | WIDE, "bf16", recompute="full", length=512),
]


def on_card(job: Job, runs: list[Run]) -> list[tuple[int, Model]]:
    with hopper():
        return [counted(replace(job, device=DEVICE), run, "cuda", block=512) for run in runs]


def test_the_peak_of_a_step_on_a_card():
    with RankPool(1) as pool:  # of its own: torch takes CUDA for available from then on
        found = pool.run(on_card, RUNS)[0]
    for run, (made, model) in zip(RUNS, found, strict=True):
        peak, before = formula(run, model, "cuda")
        assert peak == pytest.approx(before + made, rel=0.02), run
        assert peak - before == pytest.approx(made, rel=0.05), run
