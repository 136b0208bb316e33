"""Adapters on the one curve: every kind under every way to split, against one process of plain PyTorch."""

from __future__ import annotations

import pytest
from parity.adapters import CASES
from parity.measure import differences, oracle, train
from parity.splits import SHORT, STEPS
from support.tiny import TOLERANCES

DAILY = ("lora, ZeRO 3", "lora, pipeline 2, ZeRO 1", "dora, ZeRO 2", "dora, tensor 2, ZeRO 1")
BAND = 1e-6  # in fp32


def marks(case):
    is_daily = case.world_size == 2 and case.split.name in DAILY and case.precision == "fp32"
    return (pytest.mark.slow, *([] if is_daily else [pytest.mark.nightly]))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in CASES])
def test_an_adapters_curve_is_the_oracles(ranks, case, pytestconfig):
    steps = SHORT if pytestconfig.option.markexpr else STEPS
    results = ranks(case.world_size).run(train, case.recipe, case.json, steps, timeout=300)
    assert all(got.losses == results[0].losses for got in results), "ranks disagree about the loss"
    expected = oracle(case, steps)
    assert expected.losses[-1] < expected.losses[0], "nothing is trained"
    loss, norm = (BAND, BAND) if case.precision == "fp32" else TOLERANCES[case.precision]
    for found, allowed in zip(differences(results[0], expected), (loss, norm, loss), strict=True):
        assert found < allowed
