"""The DeepSpeed JSON: names checked, every "auto" filled, the tables held against the installed DeepSpeed."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from deepspeed.runtime import config as installed
from support import tiny

from pipeline.config import deepspeed_keys as keys
from pipeline.config import split
from pipeline.config.deepspeed_check import SCHEMA, load_key_rules
from pipeline.config.deepspeed_json import (
    get_precision,
    load_deepspeed_json,
)
from pipeline.config.loading import get_dotted, parse_override, set_dotted
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.errors import ConfigError

ALL_SHIPPED = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
PLAIN_PYTORCH = [path for path in ALL_SHIPPED if "torch" in json.loads(path.read_text())]
SHIPPED = [path for path in ALL_SHIPPED if path not in PLAIN_PYTORCH]
NVME = {"device": "nvme", "nvme_path": "/tmp"}
CUTS = {"tensor2", "pipeline2", "sequence2"}
MODELS = {
    "language model": ("{kind: causal_lm, architecture: llama, hidden_size: 64}", "{kind: text, paths: [a]}"),
    "pretrained": ("{kind: causal_lm, pretrained: folder}", "{kind: text, paths: [a]}"),
    "cnn": ("{kind: cnn}", "{kind: digits}"),
    "custom": ("{kind: 'my.model:build'}", "{kind: 'my.data:load'}"),
}


@pytest.fixture
def load(tmp_path):
    """The checked tree of a JSON given as text or as an object, with `ds.` overrides."""

    def function(content, *overrides):
        path = tmp_path / "split.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return load_deepspeed_json(path, [parse_override(each) for each in overrides]).tree

    return function


def fails_with(load, tmp_path, content, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(content, *overrides)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    return message


def nested(dotted, value):
    tree = {}
    set_dotted(tree, dotted.split("."), value, "test")
    return tree


def resolved(path, model, device=Device("cpu", True, True), world_size=2):  # noqa: B008 (frozen)
    recipe = path.parent / "recipe.yaml"
    model_section, data_section = MODELS[model]
    objective = "{kind: model_loss}" if model == "custom" else "{kind: auto}"
    sections = f"model: {model_section}\ndata: {data_section}\nobjective: {objective}\n"
    recipe.write_text(f"max_steps: 3\n{sections}")
    found = load_settings(recipe, path, []).resolve(world_size, device)
    return found.batch_plan, found.deepspeed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1:2: not valid JSON: "),
        ('{\n  "fp16": {"enabled": true,}\n}', ":2:"),
        ('{\n  "fp16": {"enabled": True}\n}', ":2:23: not valid JSON: "),
        ('{\n  // a comment\n}', ":2:3: not valid JSON: "),
        ("", ":1:1: not valid JSON: "),
        ("[" * 100_000, ": not valid JSON: nested too deeply"),
        ('{"fp16": {}, "fp16": {}}', ":1: fp16: the key 'fp16' is given twice"),
        ('{"fp16": {"enabled": true,\n"enabled": 0}}', ":2: fp16.enabled: the key 'enabled' is given twice"),
        ("[]", ": expected an object of keys to values, found a list"),
        ('"zero2"', ": expected an object of keys to values, found a str"),
        ('{"zero_optimisation": {}}', ':1: zero_optimisation: unknown key (did you mean "zero_optimiz'),
        ('{"zero_stage": 2}', ":1: zero_stage: unknown key"),
        ('{"lr": 2}', ":1: lr: unknown key"),
        ('{"tensor_paralel": {}}', ':1: tensor_paralel: unknown key (did you mean "tensor_parallel"?)'),
        ('{"zero_optimization": 2}', ":1: zero_optimization: expected an object, given 2"),
        ('{"fp16": true}', ":1: fp16: expected an object, given True"),
        ('{"zero_optimization":\n{"stage": 4}}', ":2: zero_optimization.stage: expected 0, 1, 2 or 3, given"),
        ('{"zero_optimization": {"stage": "2"}}', ":1: zero_optimization.stage: expected 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": true}}', ":1: zero_optimization.stage: expected 0, 1, 2 or 3"),
        ('{"bf16": {"enabled": "yes"}}', ":1: bf16.enabled: expected true, false or \"auto\", given 'yes'"),
        ('{"fp16": {"enabled": 1}}', ':1: fp16.enabled: expected true, false or "auto", given 1'),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line(load, tmp_path, text, message):
    assert fails_with(load, tmp_path, text).startswith(f"split.json{message}")


@pytest.mark.parametrize("key", keys.UNSUPPORTED)
def test_what_is_not_read_here_is_refused_with_what_to_use_instead(load, tmp_path, key):
    message = fails_with(load, tmp_path, nested(key, {}))
    assert message == f"split.json:1: {key}: not supported; {keys.UNSUPPORTED[key]}"


def test_a_section_that_is_on_where_it_stands_is_never_taken_for_switched_off(load, tmp_path):
    """Every other one with DeepSpeed's own defaults in it asks for nothing."""
    assert load({"checkpoint": {"load_universal": False}}) == {}
    assert "zenflow: not supported" in fails_with(
        load, tmp_path, nested("zero_optimization.zenflow.offload", False)
    )


def test_the_command_line_comes_after_the_file(load):
    tree = load({"zero_optimization": {"stage": 1}}, "zero_optimization.stage=3", "bf16.enabled=true")
    assert tree == {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def test_a_wrong_value_on_the_command_line_says_so(load, tmp_path):
    message = fails_with(load, tmp_path, {}, "zero_optimization.stage=5")
    assert message == "command line: ds.zero_optimization.stage: expected 0, 1, 2 or 3, given 5"
    message = fails_with(load, tmp_path, {}, "zero_optimization=5")
    assert message == "command line: ds.zero_optimization: expected an object, given 5"


def test_null_says_nothing(load):
    zero = {"stage": 2, "offload_optimizer": None}
    assert load({"fp16": None, "zero_optimization": zero}) == {"zero_optimization": {"stage": 2}}
    assert "zero_optimization" not in load({"zero_optimization": None})


def test_a_byte_order_mark_is_passed_over(load):
    assert load('\ufeff{"log_level": "info"}') == {"log_level": "info"}


# --- "auto" -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_resolves_and_deepspeed_accepts_it(tmp_path, shipped, model):
    path = tmp_path / shipped.name
    path.write_text(shipped.read_text())
    gpu = Device("cuda", True, True)
    if shipped.stem in CUTS and model in ("cnn", "custom"):
        with pytest.raises(ConfigError, match="ZeRO 3, which shards any nn"):
            resolved(path, model, gpu, world_size=8)
        return
    plan, filled = resolved(path, model, gpu, world_size=8)
    assert '"auto"' not in json.dumps(filled)
    assert plan.dp_world_size == (4 if shipped.stem in CUTS else 8)
    assert filled["train_batch_size"] == plan.global_batch_size
    alone = filled | {"train_batch_size": plan.global_batch_size // plan.dp_world_size}
    config = installed.DeepSpeedConfig(alone)  # which has one rank here
    assert config.gradient_clipping == 1.0
    stage = re.search(r"zero(\d)", shipped.stem)
    stated = get_dotted(json.loads(shipped.read_text()), "zero_optimization.stage") or 0
    assert config.zero_optimization_stage == stated == (int(stage[1]) if stage else stated)
    named = re.search(r"fp16|fp32$", shipped.stem)
    expected = named[0] if named else "bf16"
    assert get_precision(filled) == expected
    assert config.bfloat16_config.enabled == (expected == "bf16")
    assert config.float16_config.enabled == (expected == "fp16")


@pytest.mark.parametrize("shipped", PLAIN_PYTORCH, ids=lambda path: path.stem)
def test_a_file_with_a_torch_section_is_plain_pytorch(tmp_path, shipped):
    path = tmp_path / shipped.name
    path.write_text(shipped.read_text())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 3\nmodel: {kind: cnn}\ndata: {kind: digits}\n")
    parallel = shipped.stem.removeprefix("torch_")
    for ranks in (1, 2):
        settings = load_settings(recipe, path, [])
        if ranks == 2 and parallel != "ddp":
            with pytest.raises(ConfigError, match="both use one process"):
                settings.resolve(ranks, Device("cpu", True, True))
            continue
        found = settings.resolve(ranks, Device("cpu", True, True))
        assert found.deepspeed is None
        assert (found.split.parallel, found.split.precision) == (parallel, "bf16")
        assert found.batch_plan.global_batch_size == 8 * ranks
    assert settings.resolve(1, Device("cpu", False, False)).split.precision == "fp32"


@pytest.mark.parametrize(("stage", "found"), [(1, True), (2, True), (3, None)])
def test_parameters_of_stages_1_and_2_begin_where_kernels_are_fast(tmp_path, stage, found):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    assert resolved(path, "cnn")[1]["zero_optimization"].get("parameter_alignment") is found
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, "parameter_alignment": False}}))
    assert resolved(path, "cnn")[1]["zero_optimization"]["parameter_alignment"] is False


@pytest.mark.parametrize(
    "dotted",
    [
        "aio.block_size",
        "fp16.loss_scale",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.ratio",
    ],
)
def test_an_auto_that_nothing_fills_is_an_error_that_names_it(tmp_path, dotted):
    path = tmp_path / "split.json"
    path.write_text(json.dumps(nested(dotted, "auto")))
    with pytest.raises(ConfigError, match=f'{re.escape(dotted)}: nothing here can fill this "auto"; write a'):
        resolved(path, "cnn")


def test_bucket_sizes_follow_the_width_of_the_model(tmp_path):
    names = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto")}}))
    _, filled = resolved(path, "language model")
    assert [filled["zero_optimization"][name] for name in names] == [50_000_000, 45_000_000, 640]
    _, filled = resolved(path, "cnn")
    assert all(isinstance(filled["zero_optimization"][name], int) for name in names)


def test_a_file_that_says_nothing_is_stage_0_in_fp32(tmp_path):
    path = tmp_path / "split.json"
    path.write_text("{}")
    plan, filled = resolved(path, "cnn", world_size=4)
    assert filled == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "timers": {"throughput": {"enabled": False}},
    }
    assert plan.global_batch_size == 32
    assert get_precision(filled) == "fp32"


# --- precision ----------------------------------------------------------------------------------------

SETTINGS = [None, "auto", True, False]


DEVICES = [Device(kind, b, f) for kind in ("cpu", "cuda") for b in (True, False) for f in (True, False)]


@pytest.mark.parametrize("device", DEVICES, ids=repr)
@pytest.mark.parametrize(("bf16", "fp16"), itertools.product(SETTINGS, SETTINGS))
def test_the_precision_is_the_one_asked_for_or_the_best_the_device_has(tmp_path, bf16, fp16, device):
    path = tmp_path / "split.json"
    tree = {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}
    path.write_text(json.dumps(tree))
    lacking = (bf16 is True and not device.bf16) or (fp16 is True and not device.fp16)
    if (bf16 is True and fp16 is True) or (device.kind == "cuda" and lacking):
        with pytest.raises(ConfigError, match="both true" if bf16 is fp16 is True else "does not compute in"):
            resolved(path, "cnn", device)
        return
    if bf16 is True:
        expected = "bf16"
    elif fp16 is True:
        expected = "fp16"
    elif bf16 == "auto" and device.bf16:
        expected = "bf16"
    elif fp16 == "auto" and device.fp16:
        expected = "fp16"
    else:
        expected = "fp32"
    _, filled = resolved(path, "cnn", device)
    assert get_precision(filled) == expected
    assert [filled[name].get("enabled", False) for name in ("bf16", "fp16")] == [
        expected == "bf16",
        expected == "fp16",
    ]


@pytest.mark.parametrize(("asked", "other"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_precision_the_device_has_not_is_told_with_a_way_out(tmp_path, asked, other):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({asked: {"enabled": True}}))
    with pytest.raises(ConfigError) as caught:
        resolved(path, "cnn", Device("cuda", bf16=asked != "bf16", fp16=asked != "fp16"))
    message = str(caught.value)
    assert f"{asked}.enabled: this device does not compute in {asked}; use {other} (ds_configs/" in message
    named = re.search(r"ds_configs/\w+\.json", message)
    assert Path(named[0]).name in {path.name for path in SHIPPED}
    assert f"ds.{asked}.enabled=false" in message


# --- the tables against the installed DeepSpeed -----------------------------------------------------------


def test_every_removed_key_of_the_installed_deepspeed_is_known():
    removed = getattr(installed, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    removed_zero = getattr(installed, "_REMOVED_ZERO_CONFIG_KEYS", {})
    assert set(removed) | {f"zero_optimization.{key}" for key in removed_zero} <= set(keys.UNSUPPORTED)
    assert not set(removed) & set(load_key_rules())


def test_the_tables_do_not_contradict_each_other():
    described = set(json.loads(SCHEMA.read_text()))
    own = {
        key
        for section, names in keys.READ_KEYS.items()
        for key in (section, *(f"{section}.{name}" for name in names))
    }
    assert not set(keys.UNSUPPORTED) & set(keys.IGNORED)
    assert set(keys.LIMITS) - described - set(keys.OPTIMIZER_AND_SCHEDULER) <= own | {
        "sequence_parallel_size"
    }
    assert set(keys.IGNORED) <= described
    assert {key.partition(".")[0] for key in keys.ADOPTED} <= described
    assert set(keys.ADOPTED) <= set(load_key_rules())


# --- what a CPU has for bf16 ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("avx512_bf16 avx512_fp16 vendor_id : GenuineIntel", "fp32"),
        ("avx512_bf16 avx512_fp16 amx_bf16 vendor_id : GenuineIntel", "bf16"),
        ("avx512_bf16 vendor_id : AuthenticAMD", "bf16"),
        ("avx2 fma", "fp32"),
        ("asimdhp bf16", "bf16"),
    ],
)
def test_auto_takes_the_precision_in_which_a_cpu_is_fastest(tmp_path, monkeypatch, flags, chosen):
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse2\n")
    monkeypatch.setattr(split, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "split.json").write_text(json.dumps({key: {"enabled": "auto"} for key in ("bf16", "fp16")}))
    recipe = "max_steps: 3\nmodel: {kind: cnn}\ndata: {kind: digits}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "plain.yaml").write_text(recipe + "engine: {precision: auto}\n")
    for name, json_file in (("recipe.yaml", tmp_path / "split.json"), ("plain.yaml", None)):
        found = load_settings(tmp_path / name, json_file, []).resolve(1, Device.cpu())
        assert found.split.precision == chosen


def test_half_precision_on_a_cpu_without_instructions_for_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "split.json").write_text('{"bf16": {"enabled": true}}')
    (tmp_path / "recipe.yaml").write_text("max_steps: 3\nmodel: {kind: cnn}\ndata: {kind: digits}\n")
    for flags, said in (
        ("avx2", "this CPU is not faster in bf16 than in fp32; set ds.bf16.enabled=false"),
        ("amx_bf16", None),
    ):
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse2\n")
        found = load_settings(tmp_path / "recipe.yaml", tmp_path / "split.json").resolve(1, Device.cpu())
        assert found.warn_of_slow_precision(Device.cpu()) == said


@pytest.mark.parametrize(
    ("kind", "json", "compiled"),
    [
        ("cuda", {"zero_optimization": {"stage": 3}}, True),
        ("cuda", {"zero_optimization": {"stage": 1}, "compile": {"enabled": "auto"}}, True),
        ("cuda", {"torch": {"parallel": "ddp"}}, True),
        ("cuda", None, True),
        ("cuda", {"zero_optimization": {"stage": 3}, "compile": {"enabled": False}}, False),
        ("cuda", {"torch": {"parallel": "ddp"}, "compile": {"enabled": False}}, False),
        ("cuda", {"tensor_parallel": {"autotp_size": 2}}, False),
        ("cuda", {"sequence_parallel_size": 2}, False),
        ("cuda", {"zero_optimization": {"stage": 3, "offload_param": NVME}}, False),
        ("cpu", {"zero_optimization": {"stage": 3}}, False),
        ("cpu", {"torch": {"parallel": "ddp"}, "compile": {"enabled": True}}, True),
    ],
)
def test_blocks_are_compiled_on_a_gpu_where_the_split_allows_it(kind, json, compiled):
    assert tiny.settings(tiny.recipe(), json).resolve(2, Device(kind, True, True)).compile is compiled
