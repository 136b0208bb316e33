"""Weights that change with the step: shares that follow them, and the same samples at every split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.measure import ALONE
from support.step_samples import list_step_samples

from pipeline.config.data_schema import SourceConfig, TextDataConfig, interpolate_weight
from pipeline.data.bundle import DataBundle
from pipeline.data.curriculum import CurriculumOrder, build_weights, check_same_curriculum
from pipeline.data.sampler import SourceCounts, SourceShare
from pipeline.errors import DataError

pytestmark = pytest.mark.slow

quick = settings(max_examples=15, deadline=None)
STEPS = 40


@st.composite
def curricula(draw):
    """(sources, weights of each step, samples of a step)."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    weight = st.one_of(st.just(0.0), st.floats(0.01, 10))
    row = st.lists(weight, min_size=len(lengths), max_size=len(lengths)).filter(any)
    weights = draw(st.lists(row, min_size=STEPS, max_size=STEPS))
    return [SourceShare(f"s{i}", n) for i, n in enumerate(lengths)], weights, draw(st.integers(1, 24))


def order_of(curriculum):
    sources, weights, size = curriculum
    return CurriculumOrder(sources, 5, lambda step: weights[min(step, STEPS - 1)], size)


def sources_of(curriculum, samples):
    """Number of the source of each sample."""
    ends = np.cumsum([source.num_samples for source in curriculum[0]])
    return np.searchsorted(ends, samples, side="right")


@quick
@given(curriculum=curricula())
def test_the_samples_of_a_source_follow_the_sum_of_its_shares(curriculum):
    sources, weights, size = curriculum
    taken = sources_of(curriculum, order_of(curriculum).samples_at(np.arange(STEPS * size)))
    counts = np.stack([np.bincount(row, minlength=len(sources)) for row in taken.reshape(STEPS, size)])
    shares = np.array([[each / sum(row) for each in row] for row in weights]) * size
    assert np.abs(counts.cumsum(0) - shares.cumsum(0)).max() < 2
    assert not counts[np.array(weights) == 0].any()


@quick
@given(curriculum=curricula())
def test_a_source_is_gone_through_whole_before_it_repeats(curriculum):
    order = order_of(curriculum)
    size = curriculum[2]
    samples = order.samples_at(np.arange(STEPS * size))
    owners = sources_of(curriculum, samples)
    first = 0
    for number, source in enumerate(curriculum[0]):
        own = samples[owners == number] - first
        times = np.bincount(own, minlength=source.num_samples)
        assert times.max() - times.min() <= 1
        first += source.num_samples


@quick
@given(curriculum=curricula(), start=st.integers(0, STEPS - 3), data=st.data())
def test_any_rank_at_any_time_finds_the_same_order(curriculum, start, data):
    """The table of counts grows with what is asked for: in one go, from the middle on, or piece by piece."""
    size = curriculum[2]
    expected = order_of(curriculum).samples_at(np.arange(STEPS * size))
    world = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if size % n == 0]))
    micro = data.draw(st.sampled_from([n for n in range(1, size + 1) if size // world % n == 0]))
    accumulation = size // world // micro
    resumed = list_step_samples(
        order_of(curriculum),
        micro=micro,
        accumulation=accumulation,
        world=world,
        samples_seen=start * size,
        num_steps=2,
    )
    assert [sample for step in resumed for sample in step] == expected[
        start * size : (start + 2) * size
    ].tolist()


@quick
@given(curriculum=curricula(), first=st.integers(0, 300), length=st.integers(0, 300))
def test_counting_positions_is_counting_samples(curriculum, first, length):
    order = order_of(curriculum)
    owners = sources_of(curriculum, order.samples_at(np.arange(first, first + length)))
    assert (
        order.count(first, first + length).tolist()
        == np.bincount(owners, minlength=len(curriculum[0])).tolist()
    )


def test_a_checkpoint_of_other_weights_is_refused():
    sources = [SourceShare("a", 50), SourceShare("b", 50)]
    counts = SourceCounts(CurriculumOrder(sources, 0, lambda step: [1, step], 8))
    seen = counts.count_up_to(80)
    SourceCounts(CurriculumOrder(sources, 0, lambda step: [1, step], 8)).seek(80, seen)
    with pytest.raises(DataError, match="the weights that the run began with"):
        SourceCounts(CurriculumOrder(sources, 0, lambda step: [1, 1], 8)).seek(80, seen)


def test_weights_between_two_steps_are_on_the_line():
    weight = {10: 1.0, 20: 0.0, 40: 4.0}
    assert [interpolate_weight(weight, step) for step in (0, 10, 15, 20, 25, 40, 99)] == [
        1,
        1,
        0.5,
        0,
        1,
        4,
        4,
    ]
    assert interpolate_weight(0.3, 7) == 0.3


def ends_with_step_7(step):
    return {"a": 1.0, "b": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0][step]}


def unknown_name(step):
    return {"a": 1.0, "c": 2.0}


def nothing_from_step_3(step):
    return {"a": 1.0 * (step < 3), "b": 0.0}


def of_the_clock(step):
    return {"a": float(np.random.default_rng().random()) + 0.1, "b": 1.0}


def text_config(*weights, curriculum=None):
    sources = [{"name": name, "paths": ["x"]} for name in "ab"]
    for source, weight in zip(sources, weights, strict=False):
        source["weight"] = weight
    return TextDataConfig.model_validate({"kind": "text", "sources": sources, "curriculum": curriculum})


SHARES = (SourceShare("a", 40), SourceShare("b", 30))


def bundle(config, sources=SHARES):
    data = list(range(sum(source.num_samples for source in sources)))
    weights_at = build_weights(config, sources)
    return DataBundle(data, {}, list, None, None, None, "x", sources, weights_at=weights_at)


def test_a_fixed_number_beside_a_weight_of_steps_stays():
    data = bundle(text_config({0: 0.0, 4: 8.0}, 2.0))
    assert [list(data.weights_at(step)) for step in (0, 2, 9)] == [[0.0, 2.0], [4.0, 2.0], [8.0, 2.0]]
    assert bundle(text_config(1.0, 2.0)).weights_at is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("unknown_name", r"unknown_name\(0\) returned .*expected a dict with a weight for each of a, b"),
        ("nothing_from_step_3", "the weights of all sources are 0 at step 3"),
        ("missing", "has no 'missing'"),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused_before_the_first_step(function, message):
    with pytest.raises(DataError, match=message):
        check_same_curriculum(ALONE, bundle(text_config(curriculum=f"test_curriculum:{function}")), 10)


def test_a_mistake_in_a_curriculum_names_it_and_the_step():
    data = bundle(text_config(curriculum="test_curriculum:ends_with_step_7"))
    message = r"ends_with_step_7\(8\), which is also called past the last step, raised IndexError: list index"
    with pytest.raises(DataError, match=message):
        check_same_curriculum(ALONE, data, 20)


def test_a_source_without_samples_has_no_weight():
    sources = (SourceShare("a", 40), SourceShare("b", 0))
    check_same_curriculum(ALONE, bundle(text_config(1.0, {20: 0.0, 30: 1.0}), sources), 20)
    with pytest.raises(DataError, match=r"b has weight 0\.1 at step 21 and no training sample"):
        check_same_curriculum(ALONE, bundle(text_config(1.0, {20: 0.0, 30: 1.0}), sources), 40)


def compared(job, function):
    try:
        check_same_curriculum(job, bundle(text_config(curriculum=f"test_curriculum:{function}")), 10)
    except DataError as error:
        return str(error)


def test_ranks_with_other_weights_are_told(ranks):
    assert all(
        "rank 1 and rank 0 have different weights" in said for said in ranks(2).run(compared, "of_the_clock")
    )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({}, "given {}"),
        ({0: -1.0}, "expected a number of 0 or more"),
        ({-1: 1.0}, "expected a number of 0 or more"),
        ({"late": 1.0}, "given {'late': 1.0}"),
        ("half", "given 'half'"),
        (-0.5, "given -0.5"),
    ],
)
def test_weights_that_are_none(weight, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig.model_validate({"paths": ["x"], "weight": weight})


def test_weights_that_are_all_0_at_a_step():
    with pytest.raises(ValueError, match="sum to 0"):
        text_config({0: 1.0, 5: 0.0}, {0: 0.0, 5: 0.0, 9: 1.0})


def test_a_curriculum_takes_the_place_of_weights():
    with pytest.raises(ValueError, match="give sources, without weight"):
        text_config(1.0, 2.0, curriculum="a:b")
