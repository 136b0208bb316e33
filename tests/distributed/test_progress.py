"""Time limits of each phase, by measured times."""

from __future__ import annotations

import time

import pytest
import torch
from support.fake_clock import FakeClock

from pipeline.config.schema import DistributedConfig
from pipeline.distributed.phases import Phases
from pipeline.distributed.progress import Phase, Progress, find_phase, tag_errors


def stepped(seconds, steps=5):
    clock = FakeClock()
    progress = Progress(clock)
    for step in range(steps):
        progress.start_activity("step", step)
        clock.now += seconds
    progress.start_activity("step", steps)
    return progress


@pytest.mark.parametrize(("seconds", "limit"), [(0.1, 60), (30.0, 300)])
def test_ten_steps_and_at_least_a_minute(seconds, limit):
    assert stepped(seconds).limit(DistributedConfig()) == limit


def test_a_stated_number_is_taken_as_it_is():
    assert stepped(30.0).limit(DistributedConfig(hang_seconds=7.0)) == 7.0


def test_the_first_of_its_kind_may_compile():
    limits = DistributedConfig(timeout_seconds=900, hang_seconds=7.0)
    progress = Progress()
    assert progress.limit(limits) == 900
    progress.start_activity("evaluation")
    assert progress.limit(limits) == 900
    progress.start_activity("evaluation")
    assert progress.limit(limits) == 7.0
    progress.start_activity("step", 0)
    assert progress.limit(limits) == 900


@pytest.mark.parametrize("doing", ["saving", "resuming", "starting", "generation", "ending"])
def test_what_is_not_a_step_has_the_timeout(doing):
    progress = stepped(0.1)
    progress.start_activity(doing)
    progress.start_activity(doing)
    assert progress.limit(DistributedConfig(timeout_seconds=900, hang_seconds=7.0)) == 900
    assert progress.activity.step == 5


def test_evaluations_and_saves_are_not_steps():
    clock = FakeClock()
    progress = Progress(clock)
    for step in range(5):
        progress.start_activity("step", step)
        clock.now += 10.0
        progress.start_activity("saving", step)
        clock.now += 500.0
    progress.start_activity("step", 5)
    assert progress.limit(DistributedConfig()) == 100.0


def test_an_exception_carries_the_innermost_phase_that_it_left():
    @tag_errors(Phase.MODEL)
    def build():
        with tag_errors(Phase.WEIGHTS):
            pass
        with tag_errors(Phase.OPTIMIZER):
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        build()
    assert find_phase([caught.value]) == "while the optimizer is made"
    assert find_phase([MemoryError(), caught.value]) == Phase.OPTIMIZER, "by what was raised because of it"
    assert find_phase([MemoryError()]) is None


def test_a_phase_of_a_step_is_that_of_its_timeline():
    phases = Phases(time.perf_counter, torch.device("cpu"))

    def step():
        with phases.measure("backward"), phases.measure("communication"):
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        step()
    assert find_phase([caught.value]) is Phase.BACKWARD
