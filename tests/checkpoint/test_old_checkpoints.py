"""Checkpoints that earlier versions wrote still load, under the split that wrote them and under others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from parity.splits import LLAMA
from support.exchange import BAND, HALF, SPLITS, STEPS, Run, run_on, tree
from support.saved import store_in

# Written by format 1: {split}/step-00000005/, and losses.json of the run that went on.
FORMAT_1 = Path(__file__).parent / "format_1"
SMALL = LLAMA | {"num_heads": 2, "hidden_size": 8, "intermediate_size": 16}


def go_on(job, recipe, split, folder):
    """(losses of the second half, the scalars right after resuming)."""
    run = Run(job, recipe, split)
    store = store_in(folder, job)
    assert store.resume(run.engine) == {"global_step": HALF}
    store.close()
    scalars = run.engine.scalars()
    return run.train(HALF, STEPS), scalars


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed", "band"),
    [
        ("zero3", "zero3", BAND),
        ("zero3", "tensor-zero1", BAND),
        ("tensor-zero1", "plain", BAND),
        ("tensor-zero1", "ddp", BAND),
        ("zero2-search", "zero1-search", 5e-3),
        ("zero3", "pipeline-zero1", BAND),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_of_format_1(ranks, tmp_path, saved, resumed, band):
    shutil.copytree(FORMAT_1 / saved, tmp_path, dirs_exist_ok=True)
    expected = json.loads((FORMAT_1 / saved / "losses.json").read_text())
    for losses, scalars in run_on(ranks, SPLITS[resumed], go_on, tree(SMALL), str(tmp_path)):
        assert losses == pytest.approx(expected[HALF:], rel=band)
        kept = json.loads((FORMAT_1 / saved / "step-00000005" / "manifest.json").read_text())["manifest"]
        assert scalars["optimizer/step"] == kept["scalars"]["adam_step"]
