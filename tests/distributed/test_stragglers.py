"""A rank that is slower than the others is named, once."""

from __future__ import annotations

import pytest

from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.stragglers import Stragglers

EVERYONE = [RankProcess(rank, f"node{rank}", 70 + rank) for rank in range(4)]


def said(own, step=1.0, intervals=5, steps=4, share=0.25):
    stragglers = Stragglers(EVERYONE[: len(own)], share)
    return [line for _ in range(intervals) if (line := stragglers.look(steps, own, step)) is not None]


def test_the_slow_one_is_named_once():
    (line,) = said([0.4, 0.41, 0.9, 0.39], intervals=20)
    assert line == (
        "rank 2 on node2 (pid 72) is slow: reading data and the forward take it 900 ms a step and the median "
        "rank 400 ms; the others wait for it in 500 of every 1000 ms"
    )


@pytest.mark.parametrize(
    ("own", "step"),
    [([0.4, 0.41, 0.49, 0.39], 1.0), ([0.001, 0.001, 0.002, 0.001], 1.0)],
    ids=["less than the share", "little of the step"],
)
def test_what_costs_little_is_not_worth_a_line(own, step):
    assert said(own, step) == []


def test_the_first_interval_and_few_steps_say_nothing():
    slow = [0.1, 0.9]
    assert said(slow, intervals=3) == []  # 8 steps after the first interval
    assert len(said(slow, intervals=4)) == 1


def test_of_two_ranks_the_slower_one():
    (line,) = said([0.9, 0.1])
    assert line.startswith("rank 0 on node0")


def test_another_one_is_told_of_too():
    stragglers = Stragglers(EVERYONE[:2], 0.25)
    lines = [stragglers.look(10, own, 1.0) for own in ([1, 1], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9])]
    assert [line and line[:6] for line in lines] == [None, "rank 1", "rank 0", None]


def test_metrics():
    assert Stragglers(EVERYONE, 0.25).row([0.4, 0.3, 0.9, 0.5]) == {
        "perf/own_time_seconds": 0.4,
        "perf/slowest_rank": 2,
        "perf/slowest_rank_own_time_seconds": 0.9,
    }
