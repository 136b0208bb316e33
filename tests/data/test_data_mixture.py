"""Several sources in one order: exact shares, every sample in its turn, the same at every split."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.step_samples import list_step_samples

from pipeline.data.sampler import (
    MixtureOrder,
    ShuffledOrder,
    SourceCounts,
    SourceShare,
    count_drawn_per_epoch,
)
from pipeline.errors import DataError

WORLDS = (1, 2, 3, 4, 8)
quick = settings(max_examples=25, deadline=None)
sizes = st.integers(1, 60)


@st.composite
def mixtures(draw, largest=60, most=4):
    """Sources with weights (some of them 0), or with epochs."""
    lengths = draw(st.lists(st.integers(1, largest), min_size=1, max_size=most))
    if draw(st.booleans()):
        weights = draw(st.lists(st.floats(0, 10), min_size=len(lengths), max_size=len(lengths)))
        weights[0] = weights[0] or 1.0
        return tuple(SourceShare(f"s{i}", lengths[i], weight=w) for i, w in enumerate(weights))
    epochs = draw(st.lists(st.floats(0.1, 3), min_size=len(lengths), max_size=len(lengths)))
    return tuple(SourceShare(f"s{i}", lengths[i], epochs=e) for i, e in enumerate(epochs))


def by_source(sources, samples):
    """Number of samples of each source."""
    ends = np.cumsum([source.num_samples for source in sources])
    owners = np.searchsorted(ends, samples, side="right")
    return np.bincount(owners, minlength=len(sources)).tolist()


@quick
@given(n=sizes, seed=st.integers(0, 100), epochs=st.sampled_from([1.0, 2.0, 0.5, 2.7]))
def test_a_lone_source_keeps_its_order(n, seed, epochs):
    order = MixtureOrder((SourceShare("only", n, epochs=epochs),), seed)
    positions = np.arange(4 * n)
    assert np.array_equal(order.samples_at(positions), ShuffledOrder(n, seed).samples_at(positions))
    assert order.samples_per_epoch == max(1, round(n * epochs))


@quick
@given(sources=mixtures(), seed=st.integers(0, 100), epoch=st.integers(0, 50))
def test_every_epoch_has_exactly_its_shares(sources, seed, epoch):
    order = MixtureOrder(sources, seed)
    size = order.samples_per_epoch
    samples = order.samples_at(np.arange(size) + epoch * size)
    assert by_source(sources, samples) == count_drawn_per_epoch(sources)


@quick
@given(sources=mixtures(), seed=st.integers(0, 100), epochs=st.integers(1, 9))
def test_a_source_is_gone_through_whole_before_it_repeats(sources, seed, epochs):
    order = MixtureOrder(sources, seed)
    seen = Counter(order.samples_at(np.arange(epochs * order.samples_per_epoch)).tolist())
    first = 0
    for source, drawn in zip(sources, count_drawn_per_epoch(sources), strict=True):
        times = [seen[sample] for sample in range(first, first + source.num_samples)]
        assert sum(times) == epochs * drawn
        assert max(times) - min(times) <= 1
        first += source.num_samples


def test_a_plain_mixture_is_a_new_permutation_of_everything_each_epoch():
    sources = (SourceShare("a", 700), SourceShare("b", 200), SourceShare("c", 101))
    order = MixtureOrder(sources, 5)
    epochs = order.samples_at(np.arange(4 * 1001).reshape(4, 1001))
    assert all(np.array_equal(np.sort(epoch), np.arange(1001)) for epoch in epochs)
    for i, one in enumerate(epochs):
        for other in epochs[:i]:
            assert (one == other).mean() < 0.02
    # Mixed throughout, not source by source: a quarter of an epoch holds about a quarter of each.
    quarter = by_source(sources, epochs[0][:250])
    assert np.allclose(quarter, [175, 50, 25], atol=25)


def test_sources_of_one_size_do_not_go_in_step():
    order = MixtureOrder((SourceShare("a", 500), SourceShare("b", 500)), 0)
    samples = order.samples_at(np.arange(1000))
    a = samples[samples < 500]
    b = samples[samples >= 500] - 500
    assert (a == b).mean() < 0.02


@quick
@given(sources=mixtures(largest=2 * 10**12), seed=st.integers(0, 100), start=st.integers(0, 10**13))
def test_exact_at_trillions(sources, seed, start):
    total = sum(source.num_samples for source in sources)
    drawn = count_drawn_per_epoch(sources)
    if sources[0].weight is not None:
        assert sum(drawn) == total
        weights = [source.weight for source in sources]
        for share, weight in zip(drawn, weights, strict=True):
            assert abs(share - total * (weight / sum(weights))) <= 1 + total * 1e-15
            assert weight > 0 or share == 0
    order = MixtureOrder(sources, seed)
    samples = order.samples_at(np.arange(start, start + 64))
    assert ((samples >= 0) & (samples < total)).all()
    counts = order.count(start, start + 64)
    assert by_source(sources, samples) == counts.tolist()


@settings(max_examples=8, deadline=None)
@given(sources=mixtures(), seed=st.integers(0, 50), samples_seen=st.integers(0, 500))
def test_the_split_does_not_change_what_a_step_sees(sources, seed, samples_seen):
    order = MixtureOrder(sources, seed)
    expected = order.samples_at(np.arange(samples_seen, samples_seen + 48)).reshape(2, 24).tolist()
    for world in WORLDS:
        for accumulation in {1, 24 // world}:
            steps = list_step_samples(
                order,
                micro=24 // (world * accumulation),
                accumulation=accumulation,
                world=world,
                samples_seen=samples_seen,
                num_steps=2,
            )
            assert steps == expected


@quick
@given(sources=mixtures(), first=st.integers(0, 300), length=st.integers(0, 300))
def test_counting_positions_is_counting_samples(sources, first, length):
    order = MixtureOrder(sources, 1)
    counted = order.count(first, first + length)
    assert counted.tolist() == by_source(sources, order.samples_at(np.arange(first, first + length)))


@quick
@given(sources=mixtures(), steps=st.lists(st.integers(1, 50), min_size=1, max_size=6), cut=st.integers(0, 5))
def test_what_was_seen_is_exact_also_after_a_resume(sources, steps, cut):
    order = MixtureOrder(sources, 1)
    cut = min(cut, len(steps))
    counts = SourceCounts(order)
    seen = 0
    for step in steps[:cut]:
        seen += step
        remembered = counts.count_up_to(seen)
    for known in (remembered if cut else None, None, {"other": seen}):  # a checkpoint may have no counts
        resumed = SourceCounts(order)
        resumed.seek(seen, known)
        total = seen + sum(steps[cut:])
        expected = by_source(sources, order.samples_at(np.arange(total)))
        assert list(resumed.count_up_to(total).values()) == expected


def test_counting_whole_epochs_looks_at_no_position():
    order = MixtureOrder((SourceShare("a", 10**12), SourceShare("b", 3 * 10**12)), 0)
    assert order.count(0, 5 * 4 * 10**12).tolist() == [5 * 10**12, 15 * 10**12]


def test_shares_are_rounded_so_that_they_add_up():
    thirds = [SourceShare(name, 3, weight=1.0) for name in "abc"]
    assert count_drawn_per_epoch([*thirds, SourceShare("d", 1, weight=0.0)]) == [4, 3, 3, 0]
    assert count_drawn_per_epoch([SourceShare("a", 10), SourceShare("b", 3, epochs=2.5)]) == [10, 8]
    assert count_drawn_per_epoch([SourceShare("a", 10), SourceShare("b", 3, epochs=0.01)]) == [10, 1]
    assert count_drawn_per_epoch([SourceShare("a", 10), SourceShare("empty", 0)]) == [10, 0]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([SourceShare("a", 0), SourceShare("b", 0)], "training data is empty"),
        (
            [SourceShare("a", 3, weight=1.0), SourceShare("b", 0, weight=2.0)],
            "b has weight 2 and no training sample; add documents",
        ),
        ([SourceShare("a", 3, weight=0.0)], "weights sum to 0"),
    ],
)
def test_mixtures_that_cannot_be(sources, message):
    with pytest.raises(DataError, match=message):
        MixtureOrder(sources, 0)
