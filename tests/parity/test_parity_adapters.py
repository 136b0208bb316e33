"""Adapters on the one curve: every kind under every way to split, against one process of plain PyTorch."""

from __future__ import annotations

import pytest
from parity.adapters import CASES, WAYS
from parity.measure import differences, oracle, train
from parity.splits import SHORT, STEPS

DAILY = {
    "lora": set(WAYS) - {"ZeRO 0", "ZeRO 1"},
    "rslora": {"ZeRO 2"},
    "dora": {*WAYS} - {"ZeRO 0", "ZeRO 1"},
}
BAND = 1e-6


def marks(case):
    kind, _, way = case.split.name.partition(", ")
    is_daily = case.world_size == 2 and way in DAILY[kind]
    return (pytest.mark.slow, *([] if is_daily else [pytest.mark.nightly]))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in CASES])
def test_an_adapters_curve_is_the_oracles(ranks, case, pytestconfig):
    steps = SHORT if pytestconfig.option.markexpr else STEPS
    results = ranks(case.world_size).run(train, case.recipe, case.json, steps, timeout=300)
    assert all(got.losses == results[0].losses for got in results), "ranks disagree about the loss"
    expected = oracle(case, steps)
    assert expected.losses[-1] < expected.losses[0], "nothing is trained"
    assert max(differences(results[0], expected)) < BAND
