"""Phases: what is in none is `other`, all of them add up to the time that has passed, and nothing waits."""

from __future__ import annotations

import random

import pytest
import torch
from support.fake_clock import FakeClock, FakeGpu

from pipeline.distributed.phases import MAX_MARKS, OTHER_OUTSIDE_STEPS, PHASES, Phases, format_columns

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_one_phase_inside_of_another_takes_its_time_from_it():
    clock = FakeClock()
    phases = Phases(clock, CPU)
    clock.now += 1
    with phases.measure("forward"):
        clock.now += 2
        with phases.measure("communication"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert phases.pop_segment().seconds() == {"other": 17, "forward": 10, "communication": 4}
    assert phases.pop_segment().seconds() == {"other": 0}


def test_what_is_no_part_of_a_step_is_not_interrupted():
    """An evaluation goes through the stages' instructions as a step does."""
    clock = FakeClock()
    phases = Phases(clock, CPU)
    with phases.measure("evaluation"), phases.measure("forward"):
        clock.now += 1
    assert phases.pop_segment().seconds() == {"other": 0, "evaluation": 1}


def test_a_phase_ends_with_an_exception():
    clock = FakeClock()
    phases = Phases(clock, CPU)
    with pytest.raises(ZeroDivisionError), phases.measure("forward"):
        _ = 1 / 0
    clock.now += 1
    assert phases.pop_segment().seconds() == {"other": 1, "forward": 0}


def test_whatever_happens_they_add_up():
    draw = random.Random(0)
    clock = FakeClock()
    phases = Phases(clock, CPU)
    rows = []
    taken_at = 0.0

    def go_on(depth):
        for _ in range(draw.randrange(4)):
            clock.now += draw.random()
            with phases.measure(draw.choice(PHASES)):
                clock.now += draw.random()
                if depth < 4:
                    go_on(depth + 1)

    for _ in range(50):
        go_on(0)
        rows.append((phases.pop_segment().seconds(), clock.now - taken_at))
        taken_at = clock.now
    for seconds, passed in rows:
        assert sum(seconds.values()) == pytest.approx(passed)
        assert sum(format_columns(seconds, communicates=False).values()) == pytest.approx(passed)
    assert sum(phases.totals().values()) == pytest.approx(clock.now)


def test_every_column_is_there_and_communication_where_there_are_ranks():
    told = format_columns(
        {"routing": 1.0, "forward": 2.0, OTHER_OUTSIDE_STEPS: 4.0, "communication": 8.0}, communicates=True
    )
    assert list(told) == list(PHASES)
    assert (told["forward"], told["other"], told["communication"]) == (3.0, 4.0, 8.0)
    alone = format_columns({"communication": 8.0}, communicates=False)
    assert "communication" not in alone
    assert alone["other"] == 8.0


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_on_a_gpu_it_is_the_device_s_time_and_nothing_waits_until_it_is_read(gpu):
    phases = Phases(lambda: pytest.fail("the host's clock"), CUDA)
    for _ in range(2):
        with phases.measure("forward"):
            gpu.queued_until += 3
        with phases.measure("backward"):
            gpu.queued_until += 5
        gpu.queued_until += 1
    taken = phases.pop_segment()
    gpu.queued_until += 100  # the next step
    assert sum(phases.totals().values()) == 0  # it has come nowhere yet
    assert (gpu.num_waits, gpu.now) == (0, 0)
    assert taken.seconds() == {"other": 2, "forward": 6, "backward": 10}
    assert gpu.now == 18
    assert phases.totals(synchronize=True)["other"] == 102


def test_marks_do_not_pile_up_between_two_rows(gpu):
    """Each holds an event: what the device has passed is added up, and what it has not is kept."""
    phases = Phases(FakeClock(), CUDA)

    def steps(count):
        for _ in range(count):
            with phases.measure("forward"):
                gpu.queued_until += 1

    steps(MAX_MARKS)
    assert len(phases._segment.marks) > 2 * MAX_MARKS - 2
    gpu.now = gpu.queued_until
    steps(MAX_MARKS)
    assert len(phases._segment.marks) <= 2 * MAX_MARKS + 2
    gpu.now = gpu.queued_until
    steps(1)
    assert len(phases._segment.marks) < 8
    assert gpu.num_waits == 0
    assert phases.pop_segment().seconds()["forward"] == 2 * MAX_MARKS + 1
