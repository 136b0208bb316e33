"""Any split to any other, through files: saved under one, gone on under another, as if nothing happened."""

from __future__ import annotations

import pytest
from parity.splits import CPU, LLAMA, TENSOR_2, TWO_STAGES, zero
from support.exchange import BAND, HALF, STEPS, Run, Split, run_on, tree
from support.launch import ROOT
from support.saved import store_in

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


def pairs():
    """`make test` has each split once on either side; `make test-matrix` all of them."""
    names = list(SPLITS)
    for i, saved in enumerate(names):
        for j, resumed in enumerate(names):
            marks = [pytest.mark.slow] + [pytest.mark.matrix] * ((j - i) % len(names) != 9)
            everyday = (saved, resumed) in (("ZeRO 2 x 2", "ZeRO 3 x 1"), ("pipeline 2 x 2", "plain"))
            yield pytest.param(saved, resumed, marks=() if everyday else marks, id=f"{saved} to {resumed}")


def save(job, recipe, json, folder):
    """Losses of a run that saves in the middle, beside training, and trains on."""
    run = Run(job, recipe, json)
    store = store_in(folder, job)
    losses = run.train(0, HALF)
    assert store.save(run.engine, {"global_step": HALF}).problem is None
    losses += run.train(HALF, STEPS)
    store.close()
    assert [done.problem for done in store.poll()] == [None]
    return losses


def go_on(job, recipe, json, folder):
    run = Run(job, recipe, json)
    store = store_in(folder, job)
    assert store.resume(run.engine) == {"global_step": HALF}
    store.close()
    return run.train(HALF, STEPS)


@pytest.fixture(scope="module")
def saved_by(ranks, tmp_path_factory):
    """`saved_by(name)`: (folder with the checkpoint, the unbroken run's losses)."""
    found = {}

    def saved(name):
        if name not in found:
            folder = str(tmp_path_factory.mktemp("saved"))
            found[name] = folder, run_on(ranks, SPLITS[name], save, tree(LLAMA), folder)[0]
        return found[name]

    return saved


@pytest.mark.thin(8)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("saved", "resumed"), pairs())
def test_losses_are_those_of_the_unbroken_run(ranks, saved_by, saved, resumed):
    folder, unbroken = saved_by(saved)
    losses = run_on(ranks, SPLITS[resumed], go_on, tree(LLAMA), folder)[0]
    if saved == resumed:
        assert losses == unbroken[HALF:]
    else:
        assert losses == pytest.approx(unbroken[HALF:], rel=BAND)


def test_the_document_shows_every_pair_within_the_band():
    lines = (ROOT / "docs" / "checkpoints.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    (head,) = [row for row in rows if row[0] == "saved under"]
    kinds = list(dict.fromkeys(name.partition(" x ")[0] for name in SPLITS))
    assert head[1:] == kinds
    cells = {row[0]: row[1:] for row in rows if len(row) == len(head) and row is not head}
    assert list(cells) == kinds
    assert all(float(cell) <= BAND for row in cells.values() for cell in row)
    assert any(line.startswith(f"*{len(SPLITS) ** 2} pairs") for line in lines)
