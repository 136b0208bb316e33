"""Any split to any other, through files: saved under one, gone on under another, as if nothing happened."""

from __future__ import annotations

import pytest
from parity.splits import CPU, LLAMA, TENSOR_2, TWO_STAGES, zero
from support.checkpoint_stores import make_store
from support.resume_across_splits import HALF, LOSS_TOLERANCE, STEPS, Run, Split, make_recipe, run_on_split

pytestmark = pytest.mark.slow

PLAIN = {"torch": {"parallel": "single"}}
DDP = {"torch": {"parallel": "ddp"}}
OFFLOADED = zero(2, offload_optimizer=CPU)
STAGES = {f"ZeRO {stage}": zero(stage) for stage in (0, 1, 2, 3)}
SPLITS = {
    "plain": Split(PLAIN, 1),
    **{
        f"{name} x {world_size}": Split(json, world_size)
        for name, json in {"DDP": DDP, **STAGES, "ZeRO 2, CPU": OFFLOADED}.items()
        for world_size in (1, 2, 4)
    },
    **{
        f"{name} x {world_size}": Split(json, world_size)
        for name, json in {"tensor 2": zero(1) | TENSOR_2, "pipeline 2": zero(1) | TWO_STAGES}.items()
        for world_size in (2, 4)
    },
}

DAILY = (
    ("plain", "DDP x 2"),
    ("DDP x 2", "ZeRO 1 x 2"),
    ("ZeRO 0 x 2", "tensor 2 x 2"),
    ("ZeRO 1 x 2", "ZeRO 2 x 1"),
    ("ZeRO 2 x 2", "ZeRO 3 x 1"),
    ("ZeRO 3 x 2", "pipeline 2 x 2"),
    ("ZeRO 2, CPU x 2", "ZeRO 0 x 2"),
    ("tensor 2 x 2", "ZeRO 2, CPU x 2"),
    ("pipeline 2 x 2", "plain"),
)


def pairs():
    """`make test` has each way to divide once on either side; `make test-matrix` all of them."""
    names = list(SPLITS)
    for saved in names:
        for resumed in names:
            marks = [] if (saved, resumed) in DAILY else [pytest.mark.nightly]
            yield pytest.param(saved, resumed, marks=marks, id=f"{saved} to {resumed}")


def save(job, recipe, json, folder):
    """Losses of a run that saves in the middle, beside training, and trains on."""
    run = Run(job, recipe, json)
    store = make_store(folder, job)
    losses = run.train(0, HALF)
    assert store.save(run.engine, {"global_step": HALF}).problem is None
    losses += run.train(HALF, STEPS)
    store.close()
    assert [done.problem for done in store.poll()] == [None]
    return losses


def go_on(job, recipe, json, folder):
    run = Run(job, recipe, json)
    store = make_store(folder, job)
    assert store.resume(run.engine) == {"global_step": HALF}
    store.close()
    return run.train(HALF, STEPS)


@pytest.fixture(scope="module")
def saved_by(ranks, tmp_path_factory):
    """`saved_by(name, recipe)`: (folder with the checkpoint, the unbroken run's losses)."""
    found = {}

    def saved(name, recipe):
        key = name, str(recipe.get("adapter"))
        if key not in found:
            folder = str(tmp_path_factory.mktemp("saved"))
            found[key] = folder, run_on_split(ranks, SPLITS[name], save, recipe, folder)[0]
        return found[key]

    return saved


# An adapter's: of the base nothing is in a checkpoint.
ADAPTED = ("plain", "DDP x 2", "ZeRO 0 x 2", "ZeRO 2 x 2", "ZeRO 3 x 2", "tensor 2 x 2", "pipeline 2 x 2")
ADAPTED_DAILY = (("ZeRO 3 x 2", "tensor 2 x 2"),)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(a, b, marks=[] if (a, b) in ADAPTED_DAILY else [pytest.mark.nightly], id=f"{a} to {b}")
        for a in ADAPTED
        for b in ADAPTED
    ],
)
def test_losses_of_an_adapter_are_those_of_the_unbroken_run(ranks, saved_by, saved, resumed):
    recipe = make_recipe(LLAMA) | {"adapter": {"kind": "dora", "rank": 4, "modules_to_save": ["lm_head"]}}
    folder, unbroken = saved_by(saved, recipe)
    losses = run_on_split(ranks, SPLITS[resumed], go_on, recipe, folder)[0]
    assert losses == (
        unbroken[HALF:] if saved == resumed else pytest.approx(unbroken[HALF:], rel=LOSS_TOLERANCE)
    )


@pytest.mark.daily("plain-ZeRO 2 x 2")
@pytest.mark.parametrize(("saved", "resumed"), [("plain", "ZeRO 2 x 2"), ("ZeRO 2 x 2", "DDP x 2")])
def test_losses_of_an_adapter_over_a_base_in_4_bits_too(ranks, saved_by, saved, resumed):
    recipe = make_recipe(LLAMA | {"hidden_size": 64, "intermediate_size": 128})
    recipe |= {"adapter": {"rank": 4, "quantize": "nf4"}}
    folder, unbroken = saved_by(saved, recipe)
    losses = run_on_split(ranks, SPLITS[resumed], go_on, recipe, folder)[0]
    assert losses == pytest.approx(unbroken[HALF:], rel=LOSS_TOLERANCE)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("saved", "resumed"), pairs())
def test_losses_are_those_of_the_unbroken_run(ranks, saved_by, saved, resumed):
    folder, unbroken = saved_by(saved, make_recipe(LLAMA))
    losses = run_on_split(ranks, SPLITS[resumed], go_on, make_recipe(LLAMA), folder)[0]
    if saved == resumed:
        assert losses == unbroken[HALF:]
    else:
        assert losses == pytest.approx(unbroken[HALF:], rel=LOSS_TOLERANCE)
