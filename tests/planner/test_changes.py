"""A change as it is told, and which comes first."""

from __future__ import annotations

import pytest

from pipeline.config.loading import parse_override
from pipeline.planner.forecast import Change, ranked, word

GIB = 2**30


def test_it_is_told_by_its_words_its_gain_and_its_price():
    plain = Change("micro-batch 8 -> 4", ("batch.micro_batch_size=4",), GIB, 1.23456, "")
    assert str(plain) == "batch.micro_batch_size=4 (-1.00 GiB, 1.23 times as long, micro-batch 8 -> 4)"
    other = Change("shorter rows", ("data.sequence_length=64",), None, None, "another curve")
    assert str(other) == "data.sequence_length=64 (another curve)"


def test_what_is_enough_stands_first_the_cheapest_of_it_at_the_front():
    slow, fast = Change("slow", ("a=1",), 9, 2.0, ""), Change("fast", ("b=1",), 8, 1.1, "")
    little, unknown = Change("little", ("c=1",), 2, 1.0, ""), Change("unknown", ("d=1",), None, None, "")
    other = Change("other", ("e=1",), 9, 1.0, "shorter rows", other_curve=True)
    less = Change("less", ("f=1",), 3, 1.0, "shorter rows", other_curve=True)
    told = ranked([unknown, less, little, other, slow, fast], lambda each: (each.gain or 0) >= 7)
    assert told == [fast, slow, other, little, less, unknown]


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        True,
        1,
        3e-4,
        "full",
        "my run",
        "1e3",
        "null",
        "yes",
        "a: b",
        "#1",
        "",
        [0.9, 0.95],
        {"a": None},
    ],
)
def test_a_word_is_read_as_what_it_was_made_of(value):
    assert parse_override(word("model.key", value)) == (["model", "key"], value)
