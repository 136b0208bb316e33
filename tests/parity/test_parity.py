"""One loss curve whatever the split: every split, world size and precision against one process in fp32.

The same recipe everywhere: 20 steps, uneven masks, two micro-batches a step, clipping on, dropout off.
"""

from __future__ import annotations

import pytest
from parity.measure import largest_difference, oracle, train
from parity.splits import STEPS, Case, cases

# Relative, largest of all steps: loss, gradient norm, evaluation loss. The half precisions' bands are those
# that one process keeps to: the rows of world size 1 are held to the same ones.
BANDS = {"fp32": (1e-5, 1e-5, 1e-5), "bf16": (2e-3, 2e-2, 2e-3), "fp16": (1e-3, 1e-2, 1e-3)}


def marks(case: Case):
    """`make check` keeps the plain stages at one and two ranks."""
    quick = case.world_size <= 2 and case.split.name in ("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3")
    return () if quick else (pytest.mark.slow,)


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in cases()])
def test_the_curve_is_the_oracles(ranks, case):
    results = ranks(case.world_size).run(train, case.recipe, case.json)
    expected, (loss_band, norm_band, eval_band) = oracle(case), BANDS[case.precision]
    for got in results:
        assert got.losses == results[0].losses, "ranks disagree about the loss"
        assert largest_difference(got.losses, expected.losses) < loss_band
        assert largest_difference(got.grad_norms, expected.grad_norms) < norm_band
        assert got.eval_loss == pytest.approx(expected.eval_loss, rel=eval_band)
    check_samples(case, results)


def check_samples(case: Case, results) -> None:
    """Data-parallel ranks take different samples, together the data set, in a new order each epoch."""
    by_data_rank = {got.dp_rank: got.samples for got in results}
    assert all(by_data_rank[got.dp_rank] == got.samples for got in results), "copies see other samples"
    steps = [
        [index for rank in sorted(by_data_rank) for index in by_data_rank[rank][step]]
        for step in range(STEPS)
    ]
    taken = [index for step in steps for index in step]
    epochs = [taken[start : start + 64] for start in range(0, len(taken) - 63, 64)]
    assert len(epochs) == STEPS * 16 // 64
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "the order repeats"
