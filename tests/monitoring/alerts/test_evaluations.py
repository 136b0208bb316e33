"""Evaluations that give NaN in a run: told once, and never the best."""

from __future__ import annotations

import pytest
from support.corrupted_data import ALONE, read_events
from support.nonfinite_sample import FAULT, HeldOut, Samples, make_bundle
from support.tiny import deepspeed_json, recipe, resolve
from torch.utils.data import Subset

from pipeline.checkpoint.find import find_checkpoint
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

SPOILT = (2, 3)
"""Steps whose evaluation gives NaN."""


def evaluated(job, deepspeed, folder):
    """A run of four steps, with an evaluation and a checkpoint after each."""
    tree = recipe(
        max_steps=4,
        model={"kind": "support.nonfinite_sample:Model"},
        objective={"kind": "support.nonfinite_sample:loss", "reduction": "sum"},
        batch={"micro_batch_size": 4, "gradient_accumulation_steps": 1},
        eval={"every": 1},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": True},
    )
    config, resolved = resolve(tree, deepspeed, job.ranks.world_size)
    FAULT.case = ""
    FAULT.sample = -1
    data = make_bundle({"good": Subset(Samples(), range(4)), "bad": HeldOut()})
    parts = assemble(config, resolved, job, data, folder)
    with parts.trackers, TrainLoop(parts) as loop:
        for step in range(1, 5):
            FAULT.case = "held out" if step in SPOILT else ""
            loop.step()
    parts.loader.close()
    parts.engine.close()
    FAULT.case = ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "deepspeed"),
    [(1, None), (2, None), (2, deepspeed_json(3))],
    ids=["single", "ddp", "zero3"],
)
def test_an_evaluation_of_nan_is_told_once_and_is_never_the_best(ranks, tmp_path, world_size, deepspeed):
    folder = tmp_path / "run"
    if world_size == 1:
        evaluated(ALONE, deepspeed, folder)
    else:
        ranks(world_size).run(evaluated, deepspeed, folder)
    (told,) = read_events(folder, "non_finite_eval")
    assert (told["step"], told["level"]) == (2, "warning")
    assert told["message"] == "the evaluation after step 2 gave eval/bad/loss, eval/loss: infinite or NaN"
    _, best, manifest = find_checkpoint(folder, "best")
    assert manifest.global_step not in SPOILT
    kept = sorted(int(path.name[5:]) for path in best.parent.glob("step-*"))
    assert kept == sorted({manifest.global_step, 4})
