"""Advice on what to change of a run, the suggested split, and the largest size that fits."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from pipeline.cli.plan import format_command
from pipeline.config.settings import load_settings
from pipeline.errors import ConfigError
from pipeline.planner.changes import (
    BACK_TO_DEVICE,
    BATCH,
    OTHER_CURVE,
    ZERO,
    ConfigChange,
    price_changes,
    sort_by_memory_gain,
    suggest_split,
)
from pipeline.planner.forecast import Forecast, forecast
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.shapes import read_model_spec

SIZES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_layers": 40, "num_heads": 40},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64}
    | {"num_key_value_heads": 8},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_layers": 126, "num_heads": 128}
    | {"num_key_value_heads": 8},
}


def settings_of(folder, size, rows=128, length=4096, *words):
    """A Llama with rows of 4,096 tokens, 128 a step."""
    path = folder / f"{size}.yaml"
    model = {"kind": "causal_lm", "architecture": "llama", "vocab_size": 32000, **SIZES[size]}
    data = {"kind": "text", "paths": ["python_stdlib"], "sequence_length": length}
    path.write_text(
        yaml.safe_dump({"max_steps": 100, "model": model, "data": data, "batch": {"global_batch_size": rows}})
    )
    return load_settings(path, None, words)


@pytest.mark.parametrize(
    ("size", "gpu", "gpus", "nodes", "rows", "length", "file", "recomputes"),
    [
        ("7B", "4090", 1, 1, 128, 4096, "zero3_nvme", "full"),
        ("7B", "h100", 8, 1, 128, 4096, "zero1", "none"),
        ("13B", "h100", 8, 1, 128, 4096, "zero3", "none"),
        ("70B", "h100", 8, 8, 128, 4096, "zero3", "full"),
        ("70B", "h100", 8, 1, 128, 4096, "zero3_offload", "full"),
        ("7B", "h100", 8, 1, 4, 32768, "sequence2", "full"),
    ],
)
def test_the_first_rung_that_fits_is_suggested(
    tmp_path, size, gpu, gpus, nodes, rows, length, file, recomputes
):
    """Its words make the run that was planned, with the recipe's global batch and as many rows as fit."""
    settings = settings_of(tmp_path, size, rows, length)
    place = resolve_hardware(gpu, None, gpus, nodes)
    model = read_model_spec(settings.config)
    found = suggest_split(settings, model, place)
    assert found.words[:2] == ("--deepspeed", file)
    assert f"model.activation_checkpointing={recomputes}" in found.words
    again = forecast(settings.with_arguments(found.words), model, place)
    assert again.fits
    assert (again.peak, again.resolved.batch_plan) == (
        found.forecast.peak,
        found.forecast.resolved.batch_plan,
    )
    assert again.resolved.batch_plan.global_batch_size == rows
    batch = again.resolved.batch_plan
    if batch.gradient_accumulation_steps % 2 == 0 and batch.micro_batch_size < 64:
        more = (f"batch.micro_batch_size={2 * batch.micro_batch_size}",)
        more += (f"batch.gradient_accumulation_steps={batch.gradient_accumulation_steps // 2}",)
        assert not forecast(settings.with_arguments((*found.words, *more)), model, place).fits


def test_the_command_that_is_told_makes_the_run_that_was_planned(tmp_path):
    """The advice keeps what was typed and what the JSON stated, without the recipe's keys that must go."""
    recipe = settings_of(tmp_path, "7B").recipe_path
    own = tmp_path / "own.json"
    adam = {"type": "Adam", "params": {"lr": 7e-5, "betas": [0.9, 0.99]}}
    own.write_text(
        json.dumps({"optimizer": adam, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}})
    )
    typed = ["run_dir=my run", "model.activation_checkpointing=full", "ds.gradient_clipping=0.25"]
    typed += ["ds.gradient_accumulation_steps=4"]
    settings = load_settings(recipe, own, typed)
    place = resolve_hardware("h100", None, 8)
    suggestion = suggest_split(settings, read_model_spec(settings.config), place)
    command = shlex.split(format_command(settings, place, suggestion).partition(" train ")[2])
    assert command[0::2][:2] == ["--config", "--deepspeed"]
    again = load_settings(command[1], command[3], command[4:])
    optimizer = again.config.optimizer
    config = again.config
    assert (optimizer.learning_rate, optimizer.betas, optimizer.max_grad_norm) == (7e-5, (0.9, 0.99), 0.25)
    assert (config.run_dir, config.model.activation_checkpointing) == ("my run", "none")
    found = forecast(again, read_model_spec(config), place)
    assert found.peak == suggestion.forecast.peak
    assert (
        found.resolved.batch_plan.global_batch_size
        == suggestion.forecast.resolved.batch_plan.global_batch_size
    )


def test_what_no_machine_has_in_host_memory_is_not_suggested(tmp_path):
    """405 billion parameters on 8 cards of 80 GB need terabytes beside them."""
    settings = settings_of(tmp_path, "405B")
    place = resolve_hardware("h100", None, 8)
    model = read_model_spec(settings.config)
    found = suggest_split(settings, model, place)
    assert found.words[1] == "zero3_nvme"
    assert found.forecast.memory.states.disk.total > 2**40 / 8
    words = (
        "--deepspeed",
        "zero3_offload",
        "model.activation_checkpointing=full",
        "batch.micro_batch_size=1",
    )
    found = forecast(settings.with_arguments(words), model, place)
    assert found.lacking.startswith("host memory, ")
    assert "of 2,048 GiB per machine" in found.lacking
    assert any(
        "GiB of host memory per machine are assumed; give --host-memory" in line for line in found.remarks()
    )


def test_why_nothing_can_be_suggested_is_told(tmp_path):
    large = settings_of(tmp_path, "405B")
    with pytest.raises(
        ConfigError, match=r"no split of llama \(40\d,.*fits on .*the last one does not fit: host memory, "
    ):
        suggest_split(large, read_model_spec(large.config), resolve_hardware("h100"))
    settings = settings_of(tmp_path, "7B", 128, 4096, "engine.precision=bf16")
    with pytest.raises(ConfigError, match=r"--suggest: .*engine"):
        suggest_split(settings, read_model_spec(settings.config), resolve_hardware("h100", None, 8))


def test_a_change_is_told_by_its_words_its_gain_and_its_price():
    words = ("batch.micro_batch_size=4",)
    plain = ConfigChange(
        "the same step with 2 times as many micro-batches", BATCH, words, gain=2**30, time_ratio=1.23456
    )
    told = "batch.micro_batch_size=4 (-1.00 GiB, 1.2 times as long, "
    told += "the same step with 2 times as many micro-batches)"
    assert str(plain) == told
    back = ConfigChange("no offload", BACK_TO_DEVICE, ("ds.x=none",), gain=-(2**30), time_ratio=1.001)
    assert str(back) == "ds.x=none (+1.00 GiB, no offload)"
    other = ConfigChange("shorter rows change the loss curve", OTHER_CURVE, ("data.sequence_length=64",))
    assert str(other) == "data.sequence_length=64 (shorter rows change the loss curve)"


class Peak:
    """Stands for a forecast of which only the peak is asked."""

    peak = 10
    fits = True


def test_what_is_enough_is_first_the_cheapest_of_it_at_the_front():
    def change(name, gain, slower, fits, kind=ZERO):
        return ConfigChange(name, kind, (name,), gain=gain, time_ratio=slower, fits=fits)

    found = [
        change("unknown", None, None, None),
        change("less, another curve", 3, 1.0, False, OTHER_CURVE),
        change("little", 2, 1.0, False),
        change("another curve", 9, 1.0, True, OTHER_CURVE),
        change("who knows how slow", 9, None, True),
        change("slow", 9, 2.0, True),
        change("fast", 8, 1.1, True),
        change("more memory", -5, 0.5, True),
    ]
    names = [each.name for each in sort_by_memory_gain(found, Peak())]
    unknown = "who knows how slow"
    assert names == ["fast", "slow", unknown, "another curve", "little", "less, another curve"]
    enough = [each.name for each in sort_by_memory_gain(found, Peak(), missing=9)][:4]
    assert enough == ["slow", unknown, "another curve", "fast"]


def test_what_frees_the_hosts_memory_helps_where_that_is_lacking(tmp_path):
    words = (
        "--deepspeed",
        "zero3_offload",
        "model.activation_checkpointing=full",
        "batch.micro_batch_size=1",
    )
    settings = settings_of(tmp_path, "7B").with_arguments(words)
    place = resolve_hardware("h100", None, 8, host_memory_gib=64)
    model = read_model_spec(settings.config)

    def at(changed) -> Forecast:
        return forecast(changed, model, place)

    now = at(settings)
    assert now.lacking.startswith("host memory")
    found = sort_by_memory_gain(price_changes(settings, now, at), now)
    assert found[0].fits
    assert any("device=none" in word for each in found for word in each.overrides)
