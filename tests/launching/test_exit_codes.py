"""The exit code of a run is what its ranks said of their ends, not what a launcher makes of it."""

from __future__ import annotations

import pytest

from pipeline.launching.exit_codes import exit_code, ranks_without_exit_code


def words(*codes):
    """By rank; None: it said nothing."""
    return {
        rank: {"code": code, "world_size": len(codes)} for rank, code in enumerate(codes) if code is not None
    }


@pytest.mark.parametrize(
    ("codes", "launcher", "expected"),
    [
        ((0, 0), 0, 0),
        ((0, 0), -9, 0),  # all had finished when the launcher was ended
        ((0, 0), 250, 250),  # a rank that had finished aborted on its way out
        ((0, None), 0, 1),  # deepspeed, its launch.py killed
        ((None, None), 0, 1),
        ((None, None), 7, 7),
        ((143, 143), 0, 143),
        ((138, 138), 241, 138),  # to be put into the queue again
        ((138, 143), 241, 138),  # the second was just leaving when its launcher ended it
        ((130, 138, 143), 241, 241),
        ((138, None), 241, 241),
        ((1, 124), 247, 124),
        ((2, None), 241, 2),
        ((0, 3), 0, 3),
        ((12, None), 241, 12),  # out of memory, and its launcher ended the other
        ((14, 1), 241, 14),
        ((None, 1), -15, 143),
    ],
)
def test_exit_codes(codes, launcher, expected):
    assert exit_code(words(*codes), range(len(codes)), launcher) == expected


def test_ranks_that_said_nothing():
    assert ranks_without_exit_code(words(0, None, 0), range(4)) == [1, 3]
    assert ranks_without_exit_code(words(0, None, 0), ()) == [1]  # by what the others knew
    assert ranks_without_exit_code({}, ()) == []
    assert exit_code({}, (), 0) == 1
