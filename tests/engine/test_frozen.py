"""`model.freeze` under every split: one loss curve, and frozen parameters unchanged.

A run is saved under one split and resumed under another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from parity.measure import ALONE, oracle, train
from parity.splits import CPU, GPT2, LLAMA, SEQUENCE_2, SHORT, TENSOR_2, TWO_STAGES, Case, Split, zero
from support.captured_logs import capture_logs
from support.checkpoint_stores import make_store
from support.resume_across_splits import (
    HALF,
    STEPS,
    GatheredShards,
    Run,
    assemble_tensors,
    copy_shards,
    make_recipe,
)
from support.tiny import TOLERANCES

from pipeline.distributed.process_group import Job

pytestmark = pytest.mark.slow

# All of the first block's, which is all that the first of two stages has; matrices and vectors of the second.
FROZEN = ["model.embed_tokens.*", "model.layers.0.*", "*.1.mlp.up_proj.weight", "*.1.input_layernorm.weight"]
MODEL = LLAMA | {"freeze": FROZEN}
TIED = GPT2 | {"freeze": ["transformer.wte.weight", "transformer.h.1.*.bias"]}
DDP = {"torch": {"parallel": "ddp"}}

SPLITS = {
    "ddp": DDP,
    **{f"ZeRO {stage}": zero(stage) for stage in range(4)},
    "ZeRO 3, optimizer on CPU": zero(3, offload_optimizer=CPU),
    **{f"tensor 2, ZeRO {stage}": zero(stage) | TENSOR_2 for stage in (0, 1)},
    **{f"pipeline 2, ZeRO {stage}": zero(stage) | TWO_STAGES for stage in (0, 1)},
    "sequence 2, ZeRO 2": zero(2) | SEQUENCE_2,
}


def curve_differs(ranks, model: dict[str, Any], json: dict[str, Any], precision: str = "fp32") -> list[float]:
    """Relative difference to plain PyTorch on one process, the largest of all steps: loss, gradient norm."""
    case = Case(Split("frozen", json, (2,), (precision,), model), 2, precision)
    expected = oracle(case, SHORT)
    found = ranks(2).run(train, case.recipe, case.json, SHORT, timeout=900)[0]
    return [
        max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
        for got, wanted in ((found.losses, expected.losses), (found.grad_norms, expected.grad_norms))
    ]


@pytest.mark.daily("ZeRO 3", "tensor 2, ZeRO 1", "pipeline 2, ZeRO 1")
@pytest.mark.parametrize("name", SPLITS)
def test_the_curve_is_that_of_one_process(ranks, name):
    assert all(
        a < b for a, b in zip(curve_differs(ranks, MODEL, SPLITS[name]), TOLERANCES["fp32"], strict=True)
    )


@pytest.mark.daily("ZeRO 1-fp16", "pipeline 2, ZeRO 1-bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["ZeRO 0", "ZeRO 1", "ZeRO 3", "pipeline 2, ZeRO 0", "pipeline 2, ZeRO 1"])
def test_the_curve_is_that_of_one_process_in_half_precision(ranks, name, precision):
    found = curve_differs(ranks, MODEL, SPLITS[name], precision)
    assert all(a < b for a, b in zip(found, TOLERANCES[precision], strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_stage_of_which_the_tied_copy_alone_trains(ranks, precision):
    model = GPT2 | {"freeze": ["transformer.h.1.*", "transformer.ln_f.*"]}
    found = curve_differs(ranks, model, SPLITS["pipeline 2, ZeRO 1"], precision)
    assert all(a < b for a, b in zip(found, TOLERANCES[precision], strict=True))


@pytest.mark.daily("pipeline 2, ZeRO 1")
@pytest.mark.parametrize("name", ["pipeline 2, ZeRO 0", "pipeline 2, ZeRO 1", "ZeRO 3"])
def test_a_frozen_weight_that_is_tied_over_stages(ranks, name):
    assert all(
        a < b for a, b in zip(curve_differs(ranks, TIED, SPLITS[name]), TOLERANCES["fp32"], strict=True)
    )


def save(job: Job, recipe: dict[str, Any], json: dict[str, Any], folder: str):
    """(losses of a run that saves in the middle; this rank's shards before and after; log lines)."""
    with capture_logs() as lines:
        run = Run(job, recipe, json)
        before = copy_shards(run.engine)
        store = make_store(folder, job)
        losses = run.train(0, HALF)
    after = copy_shards(run.engine)
    assert store.save(run.engine, {"global_step": HALF}).problem is None
    losses += run.train(HALF, STEPS)
    store.close()
    assert [done.problem for done in store.poll()] == [None]
    return losses, before, after, lines


def go_on(job: Job, recipe: dict[str, Any], json: dict[str, Any], folder: str) -> list[float]:
    run = Run(job, recipe, json)
    store = make_store(folder, job)
    assert store.resume(run.engine) == {"global_step": HALF}
    store.close()
    return run.train(HALF, STEPS)


# Each stands on either side.
PAIRS = [
    ("ZeRO 2", "pipeline 2, ZeRO 1"),
    ("ddp", "ZeRO 2"),
    ("pipeline 2, ZeRO 1", "ZeRO 3"),
    ("ZeRO 3", "tensor 2, ZeRO 1"),
    ("tensor 2, ZeRO 1", "ddp"),
]


@pytest.mark.daily("ZeRO 2-pipeline 2, ZeRO 1")
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_saved_under_one_split_and_gone_on_under_another(ranks, tmp_path, saved, resumed):
    recipe = make_recipe(MODEL)
    results = ranks(2).run(save, recipe, SPLITS[saved], str(tmp_path))
    unbroken = results[0][0]
    before, after = (
        assemble_tensors(GatheredShards({}, [shard for result in results for shard in result[part]]))
        for part in (1, 2)
    )
    weights = {name for name, kind in after if kind == "weight"}
    changed = {name for name in weights if (after[name, "weight"] != before[name, "weight"]).any()}
    moments = {name for name, kind in after if kind not in ("weight", "buffer")}
    assert changed == moments
    assert "model.layers.1.mlp.down_proj.weight" in changed
    assert not any(name.startswith(("model.embed_tokens.", "model.layers.0.")) for name in changed)
    assert not {"model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"} & changed
    told = [line for *_, lines in results for line in lines]
    assert any("model.freeze: 12 of 21 parameter tensors are frozen" in line for line in told)
    assert not any("took no part" in line for line in told)
    losses = ranks(2).run(go_on, recipe, SPLITS[resumed], str(tmp_path))[0]
    assert losses == pytest.approx(unbroken[HALF:], rel=2e-6)


def test_what_is_not_frozen_trains_otherwise(ranks):
    """The test that holds curves against each other can fail."""
    case = Case(Split("frozen", {"torch": {"parallel": "single"}}, (1,), ("fp32",), MODEL), 1, "fp32")
    free = replace(case, split=replace(case.split, model=LLAMA))
    frozen, trained = (train(ALONE, each.recipe, each.json, SHORT) for each in (case, free))
    assert abs(frozen.losses[-1] - trained.losses[-1]) > 1e-2
