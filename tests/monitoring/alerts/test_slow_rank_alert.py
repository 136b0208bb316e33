"""A rank that is slower than the others is named with what it is slow in, once."""

from __future__ import annotations

import math

import pytest

from pipeline.distributed.diagnosis import RankProcess
from pipeline.monitoring.alerts import RowDetails
from pipeline.monitoring.alerts.rules import SlowRank

EVERYONE = [RankProcess(rank, f"node{rank}", 70 + rank) for rank in range(4)]
QUICK = [0.0, 0.0, 0.0, 0.0]


def seen(data, forward=None, step=1.0, steps=4, backward=None):
    own = {"step": [step] * len(data), "data": data, "host": [9.0] * len(data)}
    own |= {} if backward is None else {"backward": backward}
    return RowDetails({}, [1.0] * steps, per_rank=own if forward is None else own | {"forward": forward})


def said(*rows, share=0.15, stages=1):
    alert = SlowRank(EVERYONE[: len(rows[0].per_rank["data"])], share, stages)
    return [event for number, row in enumerate(rows) if (event := alert(number, row)) is not None]


def test_the_slow_one_is_named_once_with_its_phase():
    (event,) = said(*[seen(QUICK, [0.4, 0.41, 0.9, 0.39])] * 20)
    assert event.name == "slow_rank"
    assert event.message == (
        "rank 2 on node2 (pid 72) is slow: its forward takes 900 ms a step (the median rank: 400 ms); "
        "the others wait for it 500 of every 1000 ms"
    )
    assert event.fields["rank"] == 2
    assert event.fields["phase"] == "forward"


@pytest.mark.parametrize("forward", [None, [0.4, 0.4, 0.4, 0.4]], ids=["data alone", "both"])
def test_one_that_reads_slowly(forward):
    (event,) = said(*[seen([0.01, 0.3, 0.01, 0.01], forward)] * 20)
    assert event.message.startswith("rank 1 on node1 (pid 71) is slow: reading data takes 300 ms a step")
    assert event.fields["phase"] == "data"


@pytest.mark.parametrize("every", [1, 4, 5, 10, 20])
def test_a_rank_1_2_times_slower_is_named_within_20_steps(every):
    """Rows are written often enough; the first step is a row of its own."""
    rows = [seen(QUICK, [0.4, 0.41, 0.48, 0.39], steps=1)]
    at = 1
    while at < 20:
        steps = min(every - at % every, 20 - at)
        rows.append(seen(QUICK, [0.4, 0.41, 0.48, 0.39], steps=steps))
        at += steps
    assert len(said(*rows)) == 1


@pytest.mark.parametrize(
    ("own", "step"),
    [([0.4, 0.41, 0.45, 0.39], 1.0), ([0.001, 0.001, 0.002, 0.001], 1.0)],
    ids=["less than the share", "little of the step"],
)
def test_what_costs_little_is_not_worth_a_line(own, step):
    assert said(*[seen(QUICK, own, step)] * 20) == []
    assert said(*[seen(own, None, step)] * 20) == []


def test_the_first_row_and_few_steps_say_nothing():
    slow = [0.1, 0.9]
    assert said(*[seen(slow)] * 4) == []  # 12 steps after the first row
    assert len(said(*[seen(slow)] * 5)) == 1


def test_a_rank_that_is_disturbed_for_a_moment_is_not_named():
    """Now the one and now the other, or one of them for a while."""
    quick, first, second = (seen(QUICK[:2], each, steps=8) for each in ([0.4, 0.4], [0.4, 0.9], [0.9, 0.4]))
    assert said(*[quick, first, second] * 20) == []
    assert said(*[quick, first, quick] * 20) == []


@pytest.mark.parametrize(("load", "seconds"), [(0.5, 0.3), (2.0, 1.2), (6.1, 11.2)])
def test_many_short_steps_are_a_moment(load, seconds):
    """A row of 20 steps of 12 ms: what another process does in a quarter of a second is in all of them."""
    quick, slow = (
        RowDetails(
            {},
            [1.0] * 20,
            per_rank={"step": [0.012] * 2, "data": [0.0] * 2, "forward": own, "load": [load] * 2},
        )
        for own in ([0.003, 0.003], [0.003, 0.007])
    )
    enough = math.ceil(seconds / 0.24)
    assert said(*[quick, *[slow] * (enough - 1)] * 10) == []
    assert len(said(quick, *[slow] * enough)) == 1


def test_another_one_is_told_of_too():
    rows = [
        seen(QUICK[:2], own, steps=10)
        for own in ([1, 1], *[[0.1, 0.9]] * 2, *[[0.9, 0.1]] * 2, *[[0.1, 0.9]] * 2)
    ]
    assert [event.message[:6] for event in said(*rows)] == ["rank 1", "rank 0"]


@pytest.mark.parametrize(("slow", "told"), [(0.48, 0), (0.6, 1)])
def test_where_ranks_share_their_cores_with_others_one_must_be_slower_still(slow, told):
    crowded = seen(QUICK, [0.4, 0.41, slow, 0.39])
    events = said(
        *[RowDetails({}, crowded.losses, per_rank=dict(crowded.per_rank) | {"load": [1.0, 2.0]})] * 20
    )
    assert len(events) == told


def test_one_rank_and_evaluations_are_not_compared():
    assert said(*[seen([0.9])] * 20) == []
    alert = SlowRank([], 0.15)  # a process without a group knows nobody
    assert [alert(step, seen([0.9])) for step in range(20)] == [None] * 20
    assert SlowRank(EVERYONE, 0.15)(1, RowDetails({"eval/loss": 1.0})) is None


def test_ranks_of_one_stage_are_compared_with_each_other():
    """Stages do different work: that one takes twice as long as the other says nothing."""
    usual = seen(QUICK, [0.2, 0.2, 0.4, 0.4], backward=[0.3, 0.3, 0.5, 0.5])
    assert said(*[usual] * 20, stages=2) == []
    (event,) = said(*[seen(QUICK, [0.2, 0.2, 0.4, 0.4], backward=[0.3, 0.4, 0.5, 0.5])] * 20, stages=2)
    assert event.message == (
        "rank 1 on node1 (pid 71) is slow: its backward takes 400 ms a step (the median rank of its "
        "stage: 300 ms); the others wait for it 100 of every 1000 ms"
    )


STAGES = [0.1, 0.4, 0.2, 0.2]


def test_a_stage_of_one_rank_is_compared_with_no_other():
    assert said(*[seen(QUICK, STAGES, backward=STAGES)] * 20, stages=4) == []


def test_stages_read_data_alike():
    (event,) = said(*[seen([0.0, 0.0, 0.3, 0.0], STAGES, backward=STAGES)] * 20, stages=4)
    assert event.message.startswith("rank 2 on node2 (pid 72) is slow: reading data takes 300 ms a step")
