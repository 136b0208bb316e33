"""One loss curve whatever the split: every split, world size and precision against one process in fp32.

The same recipe everywhere: 20 steps, rows of several documents, uneven masks, two micro-batches a step,
clipping on, dropout off. `make test` has the first 8 steps of the cases in DAILY.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity.measure import differences, missing, oracle, train
from parity.splits import ALL, SHORT, STEPS, WORLDS, Case, cases, zero
from support.tiny import TOLERANCES

QUICK = ("ZeRO_2-fp32-2", "ZeRO_3-fp32-2")
DAILY = (
    *("one_process-fp32-1", "nn.DataParallel-fp32-1", "DistributedDataParallel-fp32-2", "ZeRO_0-fp32-2"),
    *("ZeRO_1-fp32-2", "ZeRO_3_hpZ_2-fp32-2", "ZeRO_2_optimizer_on_CPU-fp32-2", "ZeRO_3_all_on_CPU-bf16-2"),
    *("ZeRO_3_all_on_NVMe-fp32-2", "tensor_2_ZeRO_1-fp32-2", "tensor_2_ZeRO_3-bf16-2"),
    *("pipeline_2_ZeRO_0-fp16-2", "pipeline_2_ZeRO_1-bf16-2", "pipeline_2_ZeRO_1_gpt2_(tied)-fp32-2"),
    *("pipeline_4_ZeRO_1-fp32-4", "sequence_2_ZeRO_1-fp32-2", "sequence_2_ZeRO_3-bf16-2"),
    *("ZeRO_3_blocks_recomputed-fp32-2", "pipeline_2_blocks_recomputed-fp32-2", "ZeRO_2-bf16-2"),
    *("ZeRO_1-fp16-2", "ZeRO_3-fp16-2", "ZeRO_2_static_loss_scale-fp16-2"),
    "ZeRO_3_gradients_summed_in_fp32-bf16-2",
    "DistributedDataParallel-bf16-2",
)
"""Each way to split, each precision, and each number of ranks; where a way has ZeRO beside it, two stages."""


def marks(case: Case):
    if str(case) in QUICK:
        return ()
    return (pytest.mark.slow, *([] if str(case) in DAILY else [pytest.mark.nightly]))


@pytest.fixture(scope="session")
def steps(pytestconfig) -> int:
    """The cases of a run that selects tests by markers, as `make test` does, are a part of all."""
    return SHORT if pytestconfig.option.markexpr else STEPS


_bands: dict[str, list[float]] = {}


# Seconds: the first case of a machine that needs a native op compiles it, for up to five minutes.
PATIENCE = 900.0


def band(ranks, case: Case, steps: int) -> list[float]:
    """Tolerances of the three differences.

    In half precision twice those of the same recipe and precision on one process: another order of the same
    sums rounds otherwise. Within the precision's own rounding a gradient's norm is right,
    and a loss, which is a mean of hundreds of tokens', within a 16th of that.
    """
    loss, norm = TOLERANCES[case.precision]
    if case.precision == "fp32":
        return [loss, norm, loss]
    key = f"{case.precision} {case.split.model}"
    if key not in _bands:
        alone = replace(case, split=replace(case.split, json=zero(2)), world_size=1)
        found = differences(ranks(1).run(train, alone.recipe, alone.json, steps)[0], oracle(case, steps))
        assert all(a < b for a, b in zip(found, [loss, norm, loss], strict=True))
        loss = max(found[0], found[2])  # one evaluation may be right by chance
        rounding = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]).eps / 2
        loss = max(2 * loss, rounding / 16)
        _bands[key] = [loss, max(2 * found[1], rounding), loss]
    return _bands[key]


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in cases()])
@pytest.mark.timeout(PATIENCE + 60)
def test_the_curve_is_the_oracles(ranks, case, steps):
    if why := missing(case):
        pytest.skip(why)
    results = ranks(case.world_size).run(train, case.recipe, case.json, steps, timeout=PATIENCE)
    for got in results:
        assert got.losses == results[0].losses, "ranks disagree about the loss"
    for found, allowed in zip(
        differences(results[0], oracle(case, steps)), band(ranks, case, steps), strict=True
    ):
        assert found < allowed
    check_samples(results, steps)


def check_samples(results, steps: int) -> None:
    """Data-parallel ranks take different samples, together the data set, in a new order each epoch."""
    by_data_rank = {got.dp_rank: got.samples for got in results}
    assert all(by_data_rank[got.dp_rank] == got.samples for got in results), "copies see other samples"
    taken = [
        index for step in range(steps) for rank in sorted(by_data_rank) for index in by_data_rank[rank][step]
    ]
    epochs = [taken[start : start + 64] for start in range(0, len(taken) - 63, 64)]
    assert len(epochs) == steps * 16 // 64
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "the order repeats"


def test_every_day_has_each_way_to_split_each_precision_and_each_number_of_ranks():
    daily = [case for case in cases() if str(case) in QUICK + DAILY]
    assert len(daily) == len(QUICK + DAILY), "a name is of no case"
    assert {(case.precision, case.world_size) for case in daily} >= {(half, 2) for half in ALL}
    assert {case.world_size for case in daily} == {*WORLDS}
    assert {way for case in cases() for way in ways(case)} == {way for case in daily for way in ways(case)}


def ways(case: Case) -> set[str]:
    """Return the sections of the JSON, its ZeRO stage, engine of plain PyTorch and offload devices."""
    zero_section = case.json.get("zero_optimization", {})
    chosen = {"stage": zero_section.get("stage"), "parallel": case.json.get("torch", {}).get("parallel")}
    chosen |= {key: value["device"] for key, value in zero_section.items() if key.startswith("offload")}
    return {*case.json, *zero_section, *map(str, chosen.items())} - {
        "stage3_param_persistence_threshold",
        "compile",
    }
