"""Sizes that the search tries, on devices whose memory use is a formula."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training.micro_batch import (
    MAX_TRIALS,
    TRIAL_SHARE,
    USABLE_SHARE,
    MemoryUse,
    find_largest_fitting,
    next_trial,
)

LIMIT = 80_000


def search(candidates: list[int], guess: int | None, ranks: list[tuple[int, int, int]]):
    """The size found and the sizes tried, given each rank's bytes: static, of a row, of an update."""
    tried: dict[int, list[MemoryUse]] = {}
    while (size := next_trial(candidates, tried, guess)) is not None:
        assert size not in tried
        tried[size] = [
            MemoryUse(row * size, held + row * size, held + update, LIMIT) for held, row, update in ranks
        ]
    return find_largest_fitting(tried), tried


def powers(most: int) -> list[int]:
    return [2**n for n in range(most)]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 60_000),
    st.integers(1, 2_000),
    st.integers(0, 11_000),
    st.sampled_from([powers(10), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96], [1, 3, 5, 9, 15, 45, 225]]),
)
def test_guesses_twice_too_large_and_half_too_small_end_at_the_same(held, row, update, candidates):
    """Every guess ends at the same size, and none tries what does not go into memory."""
    answer = max((n for n in candidates if held + row * n <= USABLE_SHARE * LIMIT), default=None)
    guesses = [None] if answer is None else [2 * answer, answer, max(1, answer // 2), None]
    for guess in guesses:
        found, tried = search(candidates, guess, [(held, row, update)])
        assert found == answer
        assert len(tried) <= MAX_TRIALS
        assert all(held + row * size <= TRIAL_SHARE * LIMIT for size in tried if size > candidates[0])


def test_the_rank_with_the_least_room_decides():
    found, _ = search(powers(8), 32, [(0, 100, 0), (0, 2_000, 0), (0, 100, 0)])
    assert found == 32
    assert search(powers(8), 32, [(0, 100, 0), (10_000, 2_000, 0)])[0] == 16


def test_an_update_that_takes_more_than_small_batches_hides_nothing():
    """Its peak is the same for all of them: the line goes through what comes before it."""
    found, tried = search(powers(12), None, [(1_000, 50, 70_000)])
    assert found == 1024
    assert list(tried)[:2] == [1, 2]


@pytest.mark.parametrize("guess", [1_000, 64])
def test_a_guess_that_is_far_too_large_is_come_back_from(guess):
    """A quarter of it is tried first, and where that fits memory but not the margin, smaller ones."""
    found, tried = search(powers(11), guess, [(10_000, 4_000, 0)])
    assert (found, len(tried) <= MAX_TRIALS) == (8, True)


def test_where_not_even_the_smallest_fits_it_is_the_last_that_is_tried():
    found, tried = search(powers(5), None, [(79_000, 500, 0)])
    assert (found, list(tried)) == (None, [1])


def test_the_first_trials_are_a_quarter_and_a_half_of_the_guess():
    assert list(search(powers(8), 32, [(0, 1_000, 0)])[1])[:2] == [8, 16]
    assert list(search(powers(4), 32, [(0, 1_000, 0)])[1]) == [8]  # the largest there is
