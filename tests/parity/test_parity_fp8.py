"""fp8 has bands of its own: near the curve without it, and one curve whatever the split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parity.measure import differences, oracle, train
from parity.splits import SEQUENCE_2, SHORT, TWO_STAGES, Case, Split, recomputed, zero
from support.tiny import TOLERANCES

pytest.importorskip("torchao")

pytestmark = pytest.mark.slow

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Relative difference a step to one process in fp32 without fp8: loss, gradient norm.
TO_FP32 = (2e-3, 3e-2)
# To the same recipe of fp8 on one process, in fp32. One scale a row, the gradients' too, loses their smallest
# values along other stretches of tokens.
ACROSS_SPLITS = dict.fromkeys(RECIPES, TOLERANCES["fp32"]) | {"rowwise": (2e-5, 2e-3)}

ALONE = Split("one process", {"torch": {"parallel": "single"}})
SPLITS = [
    Split("DistributedDataParallel", {"torch": {"parallel": "ddp"}}),
    *(Split(f"ZeRO {stage}", zero(stage)) for stage in (0, 1, 2, 3)),
    Split("ZeRO 3, all but products recomputed", zero(3), model=recomputed("selective")),
    Split("pipeline 2, ZeRO 1", zero(1) | TWO_STAGES),
    Split("sequence 2, ZeRO 3", zero(3) | SEQUENCE_2),
]
DAILY = {"ZeRO 2", "pipeline 2, ZeRO 1"}


def curve(ranks, split: Split, precision: str, recipe: str, world_size: int):
    model = split.model | {"fp8": recipe}
    case = Case(replace(split, model=model), world_size, precision)
    return ranks(world_size).run(train, case.recipe, case.json, SHORT)[0]


@pytest.fixture(scope="module")
def alone(ranks):
    """`alone(precision, recipe)`: the curve on one process."""
    found = {}

    def run(precision, recipe):
        if (precision, recipe) not in found:
            found[precision, recipe] = curve(ranks, ALONE, precision, recipe, 1)
        return found[precision, recipe]

    return run


def within(found, band):
    loss, norm = band
    return all(a < b for a, b in zip(found, (loss, norm, loss), strict=True))


@pytest.mark.daily("fp32-tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fp8_is_near_the_curve_without_it(alone, precision, recipe):
    expected = oracle(Case(Split("", {}), 1, "fp32"), SHORT)
    found = differences(alone(precision, recipe), expected)
    assert within(found, TO_FP32)
    assert found[1] > 1e-3, "the gradients are those of no fp8"


def cases():
    for recipe in RECIPES:
        for precision in ("fp32", "bf16"):
            for split in SPLITS:
                is_daily = split.name in DAILY and (recipe, precision) == ("tensorwise", "fp32")
                marks = [] if is_daily else [pytest.mark.nightly]
                name = f"{split.name}-{precision}-{recipe}".replace(" ", "_").replace(",", "")
                yield pytest.param(split, precision, recipe, id=name, marks=marks)


@pytest.mark.parametrize(("split", "precision", "recipe"), cases())
def test_every_split_gives_one_curve(ranks, alone, split, precision, recipe):
    band = TOLERANCES["bf16"] if precision == "bf16" else ACROSS_SPLITS[recipe]
    assert within(differences(curve(ranks, split, precision, recipe, 2), alone(precision, recipe)), band)
