"""Optimizer state in host memory: DeepSpeed's CPU Adam, or torch's where that cannot be built."""

from __future__ import annotations

import pytest
from support.launch import ROOT, launch, write_recipe
from support.tiny import deepspeed_json, recipe, train_curve
from test_parity import BANDS, largest_difference

pytestmark = pytest.mark.slow
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_state_gives_the_oracles_curve(ranks, stage):
    """The first run on a machine compiles CPU Adam, for about a minute."""
    curve = ranks(2).run(train_curve, recipe(), deepspeed_json(stage, **OFFLOAD), timeout=400)[0]
    assert largest_difference(curve, 0) < BANDS["fp32"][0]
    assert largest_difference(curve, 1) < BANDS["fp32"][1]


def test_without_a_compiler_torchs_adamw_takes_its_place(tmp_path):
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    result = launch(
        "--config",
        str(write_recipe(tmp_path)),
        *split,
        "ds.zero_optimization.offload_optimizer.device=cpu",
        CXX="/nowhere/c++",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("CPU Adam cannot be built here") == 1
