"""The batch equation: any two numbers give the third, and no plan breaks it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.batch_plan import BatchPlan, plan_batch
from pipeline.config.schema import BatchConfig
from pipeline.errors import ConfigError

numbers = st.integers(1, 10_000)
ranks = st.integers(1, 4096)
NAMES = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")


@settings(deadline=None)
@given(numbers, numbers, ranks, st.sampled_from([None, *NAMES]))
def test_any_two_give_the_third(micro, steps, dp_world_size, left_out):
    total = micro * steps * dp_world_size
    stated = dict(zip(NAMES, (micro, steps, total), strict=True))
    stated.pop(left_out, None)
    plan = plan_batch(BatchConfig(**stated), dp_world_size)
    assert plan == BatchPlan(micro, steps, dp_world_size)
    assert plan.global_batch_size == total


@settings(deadline=None)
@given(st.none() | numbers, st.none() | numbers, st.none() | numbers, ranks)
def test_a_plan_says_what_was_asked_and_obeys_the_equation(micro, steps, total, dp_world_size):
    stated = {name: v for name, v in zip(NAMES, (micro, steps, total), strict=True) if v is not None}
    try:
        plan = plan_batch(BatchConfig(**stated), dp_world_size)
    except ConfigError:
        return
    for name, value in stated.items():
        assert getattr(plan, name) == value
    product = plan.micro_batch_size * plan.gradient_accumulation_steps * dp_world_size
    assert product == plan.global_batch_size
    assert min(plan.micro_batch_size, plan.gradient_accumulation_steps) >= 1


@settings(deadline=None)
@given(numbers, ranks)
def test_accumulation_is_one_where_nothing_else_decides_it(micro, dp_world_size):
    assert plan_batch(BatchConfig(micro_batch_size=micro), dp_world_size).gradient_accumulation_steps == 1


def test_a_contradiction_prints_both_sides():
    batch = BatchConfig(micro_batch_size=8, gradient_accumulation_steps=4, global_batch_size=100)
    with pytest.raises(ConfigError) as caught:
        plan_batch(batch, 2)
    assert str(caught.value) == (
        "batch: 8 (micro_batch_size) x 4 (gradient_accumulation_steps) x 2 (data-parallel ranks) = 64 "
        "(global_batch_size), but global_batch_size is given as 100; remove one of micro_batch_size, "
        "gradient_accumulation_steps and global_batch_size, and it is computed from the others"
    )


@settings(deadline=None)
@given(st.sampled_from(NAMES[:2]), numbers, numbers, ranks)
def test_what_does_not_divide_names_near_values_that_do(name, part, total, dp_world_size):
    batch = BatchConfig(**{name: part, "global_batch_size": total})
    if total % (part * dp_world_size) == 0:
        assert plan_batch(batch, dp_world_size).global_batch_size == total
        return
    with pytest.raises(ConfigError, match=r"use a global_batch_size of [0-9a-z ]*$") as caught:
        plan_batch(batch, dp_world_size)
    near = [
        int(n)
        for n in re.search(r"global_batch_size of (\d+)(?: or (\d+))?$", str(caught.value)).groups()
        if n
    ]
    assert near[-1] > total
    assert near[-1] - total <= part * dp_world_size
    assert len(near) == 1 or 0 < near[0] < total
    for value in near:
        better = batch.model_copy(update={"global_batch_size": value})
        assert plan_batch(better, dp_world_size).global_batch_size == value


@pytest.mark.parametrize("batch", [BatchConfig(), BatchConfig(gradient_accumulation_steps=4)])
def test_too_few_numbers_are_refused(batch):
    with pytest.raises(ConfigError, match="give micro_batch_size or global_batch_size"):
        plan_batch(batch, 2)


def test_fewer_samples_than_ranks_cannot_be_split():
    with pytest.raises(
        ConfigError, match=r"= 2 / 4 = 0\.500, which is not an integer; use a global_batch_size of 4$"
    ):
        plan_batch(BatchConfig(global_batch_size=2), 4)


@pytest.mark.parametrize(
    ("stated", "name", "most"),
    [
        ({"global_batch_size": 10**12}, "micro_batch_size", "16,777,216"),
        ({"global_batch_size": 2**40, "micro_batch_size": 1}, "gradient_accumulation_steps", "16,777,216"),
        ({"micro_batch_size": 2**24, "gradient_accumulation_steps": 2**24}, "global_batch_size", "1,099,"),
    ],
)
def test_a_number_that_follows_has_the_limits_of_a_stated_one(stated, name, most):
    with pytest.raises(ConfigError, match=f"; {name} must be at most {most}"):
        plan_batch(BatchConfig(**stated), 1)


@settings(deadline=None)
@given(st.integers(1, 5_000), ranks)
def test_auto_leaves_open_what_divides_a_ranks_share(share, dp_world_size):
    plan = plan_batch(
        BatchConfig(micro_batch_size="auto", global_batch_size=share * dp_world_size), dp_world_size
    )
    assert plan.is_provisional
    assert plan.candidates == [n for n in range(1, share + 1) if share % n == 0]
    for size in plan.candidates:
        divided = plan.with_micro_batch_size(size)
        assert not divided.is_provisional
        assert divided == plan_batch(
            BatchConfig(micro_batch_size=size, global_batch_size=share * dp_world_size), dp_world_size
        )


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, "give global_batch_size"),
        (
            {"gradient_accumulation_steps": 2, "global_batch_size": 8},
            "remove it, or give micro_batch_size as",
        ),
        ({"global_batch_size": 7}, "samples per rank = 7 / 2 = 3.500.*; use a global_batch_size of 6 or 8$"),
    ],
)
def test_what_auto_cannot_stand_with_is_refused(others, message):
    with pytest.raises(ConfigError, match=message):
        plan_batch(BatchConfig(micro_batch_size="auto", **others), 2)
