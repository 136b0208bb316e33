"""What a run was expected to take against what it took: told, judged and kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity.measure import ALONE
from support.tiny import recipe, resolve, settings

from pipeline.data.bundle import DataBundle
from pipeline.planner.forecast import forecast
from pipeline.planner.place import History, Kind, place_of
from pipeline.planner.shapes import model_of
from pipeline.training.expectation import Expectation, expect, guessed

GPU = place_of("h100", None, 1, 1, None, None)


@pytest.fixture
def found():
    tree = recipe(data={"kind": "text", "paths": ["python_stdlib"], "sequence_length": 64})
    chosen = settings(tree, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    return forecast(chosen, model_of(chosen.config), GPU)


def observed(found, history, memory, speed):
    expectation = Expectation(found, history, 64)
    expected = found.peak / 2**30
    a_second = found.time.tokens_per_second * found.time.gpus / 64
    first = 0.01 * a_second * speed  # the compiler's
    return expectation.conclusion(expected * memory, [first, *[a_second * speed] * 7])


def test_a_run_as_expected_is_told_and_kept(found, tmp_path):
    told = observed(found, History(tmp_path), 1.05, 0.9)
    assert told.level == "info"
    assert told.fields["memory_measured_gib"] == pytest.approx(1.05 * told.fields["memory_expected_gib"])
    kind = Kind.of(GPU.gpu.name, found.model, found.config, found.resolved)
    correction = History(tmp_path).correction(kind)
    assert (correction.memory, correction.speed) == (pytest.approx(1.05), pytest.approx(0.9))


@pytest.mark.parametrize(("memory", "speed"), [(1.0, 0.7), (1.0, 1.3), (1.3, 1.0)])
def test_one_that_is_far_from_it_is_no_alert(found, memory, speed):
    large = replace(found.memory, phases=dict.fromkeys(found.memory.phases, 40 * 2**30))
    told = observed(replace(found, memory=large), None, memory, speed)
    assert (told.level, told.advice) == ("info", "")


def test_the_next_plan_of_its_kind_is_corrected_and_ends_at_what_was_measured(found, tmp_path):
    history = History(tmp_path)
    observed(found, history, 1.2, 0.8)
    tree = recipe(data={"kind": "text", "paths": ["python_stdlib"], "sequence_length": 64})
    chosen = settings(tree, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    after = forecast(chosen, model_of(chosen.config), GPU, history)
    assert after.peak == pytest.approx(1.2 * found.peak, rel=1e-3)
    assert after.correction.runs == 1
    again = observed(after, history, 1.0, 1.0)
    assert again.level == "info"
    kind = Kind.of(GPU.gpu.name, found.model, found.config, found.resolved)
    assert history.correction(kind).memory == pytest.approx(1.2, rel=1e-3)


def test_a_process_on_a_cpu_that_held_more_before_is_not_judged(found):
    on_cpu = replace(found, place=replace(found.place, device=replace(found.place.device, kind="cpu")))
    for before, is_judged in ((0.0, True), (100.0, False)):
        expectation = Expectation(on_cpu, None, 64, before)
        told = expectation.conclusion(100.0, [])
        assert (told is not None) == is_judged
    told = expectation.conclusion(100.0, [10.0] * 8)  # its speed is, all the same
    assert told.fields["tokens_per_second_measured"] == 640.0
    assert "memory_measured_gib" not in told.fields


def test_of_a_module_that_no_formula_knows_states_are_told():
    tree = recipe(model={"kind": "cnn"}, data={"kind": "digits"}, objective={"kind": "classification"})
    config, resolved = resolve(tree, {"torch": {"parallel": "single"}}, 1)
    data = DataBundle([], {}, dict, None, None, 10, "none")
    told = expect(config, resolved, ALONE, data, torch.nn.Linear(512, 512))
    assert told.line.startswith("at least 0.49 GiB of")


def test_the_guess_is_the_largest_micro_batch_that_is_expected_to_fit(tmp_path):
    text = {"kind": "text", "paths": ["python_stdlib"], "sequence_length": 64, "cache_dir": str(tmp_path)}
    batch = {"micro_batch_size": "auto", "global_batch_size": 48}
    config, resolved = resolve(recipe(data=text, batch=batch), {"torch": {"parallel": "single"}}, 1)
    data = DataBundle([], {}, dict, None, 257, None, "none")
    assert guessed(config, resolved, ALONE, data) == 48
    large = config.model_copy(update={"model": config.model.model_copy(update={"intermediate_size": 2**24})})
    assert guessed(large, resolved, ALONE, data) < 48


def test_nothing_is_said_of_what_was_not_expected_or_not_measured(found):
    assert Expectation(None, None, 64).conclusion(1.0, [10.0] * 8) is None
    assert Expectation(None, None, 64).line is None
    assert Expectation(found, None, 64).conclusion(0.0, []) is None
