"""Adapters on the one curve: every kind under every way to split, against one process of plain PyTorch.

The activations of all blocks are recomputed (non-reentrant), and a module is trained whole beside them.
"""

from __future__ import annotations

import pytest
from parity.measure import differences, oracle, train
from parity.splits import (
    CPU,
    SEQUENCE_2,
    SHORT,
    STEPS,
    TENSOR_2,
    TWO_STAGES,
    Split,
    cases,
    recomputed,
    zero,
)

KINDS = ("lora", "rslora", "dora")
WAYS = {
    "DistributedDataParallel": {"torch": {"parallel": "ddp"}},
    "ZeRO 0": zero(0),
    "ZeRO 1": zero(1),
    "ZeRO 2": zero(2),
    "ZeRO 3": zero(3, stage3_param_persistence_threshold=0),
    "ZeRO 3, all on CPU": zero(3, offload_optimizer=CPU, offload_param=CPU),
    "tensor 2, ZeRO 1": zero(1) | TENSOR_2,
    "sequence 2, ZeRO 3": zero(3) | SEQUENCE_2,
    "pipeline 2, ZeRO 1": zero(1) | TWO_STAGES,
}
DAILY = {"lora": set(WAYS), "rslora": {"ZeRO 2"}, "dora": set(WAYS)}
# In fp32. A band of rounding: Adam's steps are of equal length however small a gradient is.
BAND = 1e-6


def adapter(kind: str) -> dict[str, object]:
    return {"kind": kind, "rank": 4, "alpha": 8.0}


def splits(kind: str) -> list[Split]:
    model = recomputed("full")
    several = ("tensor 2, ZeRO 1", "sequence 2, ZeRO 3", "pipeline 2, ZeRO 1")
    return [
        Split(
            f"{kind}, {name}", json, (2, 4) if name in several else (1, 2, 4), ("fp32",), model, adapter(kind)
        )
        for name, json in WAYS.items()
    ]


ALL = [case for kind in KINDS for case in cases(splits(kind))]


def marks(case):
    kind, _, way = case.split.name.partition(", ")
    is_daily = case.world_size == 2 and way in DAILY[kind]
    return (pytest.mark.slow, *([] if is_daily else [pytest.mark.nightly]))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in ALL])
def test_an_adapters_curve_is_the_oracles(ranks, case, pytestconfig):
    steps = SHORT if pytestconfig.option.markexpr else STEPS
    results = ranks(case.world_size).run(train, case.recipe, case.json, steps, timeout=300)
    assert all(got.losses == results[0].losses for got in results), "ranks disagree about the loss"
    expected = oracle(case, steps)
    assert expected.losses[-1] < expected.losses[0], "nothing is trained"
    assert max(differences(results[0], expected)) < BAND
