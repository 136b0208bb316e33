"""Expected memory and time of a run against what it took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity.measure import ALONE
from support.tiny import recipe, resolve, settings

from pipeline.data.bundle import DataBundle
from pipeline.planner.forecast import forecast
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.shapes import read_model_spec
from pipeline.training.expectation import Expectation, build_expectation, guess_micro_batch

GPU = resolve_hardware("h100")


@pytest.fixture
def found():
    tree = recipe(data={"kind": "text", "paths": ["python_stdlib"], "sequence_length": 64})
    chosen = settings(tree, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    return forecast(chosen, read_model_spec(chosen.config), GPU)


@pytest.mark.parametrize(("memory", "speed"), [(1.05, 0.9), (1.0, 0.7), (1.3, 1.3)])
def test_what_a_run_took_is_told_and_is_no_alert(found, memory, speed):
    expectation = Expectation(found, 64)
    a_second = found.time.tokens_per_second / 64
    first = 0.01 * a_second * speed  # the compiler's
    told = expectation.compare(found.peak / 2**30 * memory, [first, *[a_second * speed] * 7])
    assert (told.level, told.advice) == ("info", "")
    assert told.fields["memory_measured_gib"] == pytest.approx(memory * told.fields["memory_expected_gib"])
    measured, expected = (told.fields[f"tokens_per_second_{name}"] for name in ("measured", "expected"))
    assert measured == pytest.approx(speed * expected)


def test_a_speed_is_expected_as_a_range(found):
    speed = found.time.tokens_per_second
    assert Expectation(found, 64).speed == f"{0.8 * speed:,.0f} to {1.2 * speed:,.0f} positions/s expected"


def test_a_process_on_a_cpu_that_held_more_before_is_not_judged(found):
    on_cpu = replace(
        found, hardware=replace(found.hardware, device=replace(found.hardware.device, kind="cpu"))
    )
    for before, is_judged in ((0.0, True), (100.0, False)):
        expectation = Expectation(on_cpu, 64, before)
        told = expectation.compare(100.0, [])
        assert (told is not None) == is_judged
    told = expectation.compare(100.0, [10.0] * 8)  # its speed is, all the same
    assert told.fields["tokens_per_second_measured"] == 640.0
    assert "memory_measured_gib" not in told.fields


def test_of_a_module_that_no_formula_knows_states_are_told():
    tree = recipe(model={"kind": "cnn"}, data={"kind": "digits"}, objective={"kind": "classification"})
    config, resolved = resolve(tree, {"torch": {"parallel": "single"}}, 1)
    data = DataBundle([], {}, dict, None, None, 10, "none")
    told = build_expectation(config, resolved, ALONE, data, torch.nn.Linear(512, 512))
    assert told.memory.startswith("at least 0.45 GiB expected")


def test_the_guess_is_the_largest_micro_batch_that_is_expected_to_fit(tmp_path):
    text = {"kind": "text", "paths": ["python_stdlib"], "sequence_length": 64, "cache_dir": str(tmp_path)}
    batch = {"micro_batch_size": "auto", "global_batch_size": 48}
    config, resolved = resolve(recipe(data=text, batch=batch), {"torch": {"parallel": "single"}}, 1)
    data = DataBundle([], {}, dict, None, 257, None, "none")
    assert guess_micro_batch(config, resolved, ALONE, data) == 48
    large = config.model_copy(update={"model": config.model.model_copy(update={"intermediate_size": 2**24})})
    assert guess_micro_batch(large, resolved, ALONE, data) < 48


def test_nothing_is_said_of_what_was_not_expected_or_not_measured(found):
    assert Expectation(None, 64).compare(1.0, [10.0] * 8) is None
    assert (Expectation(None, 64).memory, Expectation(None, 64).speed) == (None, None)
    assert Expectation(found, 64).compare(0.0, []) is None
