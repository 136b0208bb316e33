"""The order of samples: a permutation, reached from any position; evaluation in step."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.loader import iter_batch_indices
from pipeline.data.sampler import EvalSampler, ShuffledOrder

WORLDS = (1, 2, 3, 4, 8)
quick = settings(max_examples=40, deadline=None)


@quick
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    samples = ShuffledOrder(n, seed).samples_at(np.arange(n) + epoch * n)
    assert sorted(samples.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9, 10, 15, 16, 17, 1023, 1024, 1025, 65536, 65537, 250_000])
def test_permutation_at_the_edges_of_the_network(n):
    samples = ShuffledOrder(n, 7).samples_at(np.arange(n))
    assert np.array_equal(np.sort(samples), np.arange(n))


@quick
@given(n=st.integers(2, 2**60), seed=st.integers(0, 2**32 - 1), position=st.integers(0, 2**60))
def test_a_huge_data_set_costs_nothing(n, seed, position):
    samples = ShuffledOrder(n, seed).samples_at(np.array([position, position + 1]))
    assert ((samples >= 0) & (samples < n)).all()
    assert samples[0] != samples[1] or position // n != (position + 1) // n


def test_epochs_and_seeds_differ():
    n = 1000
    orders = [
        ShuffledOrder(n, seed).samples_at(np.arange(n) + epoch * n) for seed in (0, 1) for epoch in range(4)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.01  # by chance 1 in n stays where it is


def test_positions_may_have_any_shape():
    order = ShuffledOrder(100, 0)
    positions = np.arange(24).reshape(2, 3, 4) + 90  # across the end of an epoch
    assert np.array_equal(order.samples_at(positions).ravel(), order.samples_at(positions.ravel()))


def test_the_shuffle_is_even():
    """Chi-square of (where in the epoch) x (where in the data), and of neighbours, over 40 epochs."""
    n = 5000
    cells = 20
    epochs = 40
    order = ShuffledOrder(n, 3)
    table = np.zeros((cells, cells))
    neighbours = np.zeros((cells, cells))
    for epoch in range(epochs):
        samples = order.samples_at(np.arange(n) + epoch * n)
        np.add.at(table, (np.arange(n) * cells // n, samples * cells // n), 1)
        np.add.at(neighbours, (samples[:-1] * cells // n, samples[1:] * cells // n), 1)
    for counts in (table, neighbours):
        expected = counts.sum() / cells**2
        chi_square = ((counts - expected) ** 2 / expected).sum()
        freedom = (cells - 1) ** 2
        assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)


@pytest.mark.slow
def test_blocks_join_without_a_seam():
    order = ShuffledOrder(10_000, 0)
    without_end = iter_batch_indices(
        order,
        micro_batch_size=7,
        gradient_accumulation_steps=3,
        dp_rank=0,
        dp_world_size=1,
        samples_seen=5,
    )
    draws = list(islice(without_end, 2000))  # more than three blocks
    taken = list(chain(*(draw.indices for draw in draws)))
    assert [draw.position for draw in draws] == list(range(5, 5 + 14_000, 7))
    assert taken == order.samples_at(np.arange(5, 5 + 14_000)).tolist()
    assert all(type(sample) is int for sample in taken[:3])


@quick
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    micro=st.integers(1, 5),
    world=st.sampled_from(WORLDS),
)
def test_evaluation_covers_each_data_set_once(sizes, micro, world):
    samplers = [
        EvalSampler(sizes, micro_batch_size=micro, dp_rank=rank, dp_world_size=world) for rank in range(world)
    ]
    of_rank = [list(sampler) for sampler in samplers]
    assert [list(sampler) for sampler in samplers] == of_rank  # and again
    real = []
    for draws in zip(*of_rank, strict=True):
        assert len({draw.dataset for draw in draws}) == 1
        for sampler, draw in zip(samplers, draws, strict=True):
            if sampler.is_real(draw):
                real += [(draw.dataset, sample) for sample in draw.indices]
            else:
                assert draw.indices == [0]
    assert real == [(number, sample) for number, size in enumerate(sizes) for sample in range(size)]
