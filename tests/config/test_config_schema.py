"""Every section DeepSpeed has: a typo and a wrong value are told with file, line and the nearest key."""

from __future__ import annotations

import json

import pytest
from config.deepspeed_schema import text
from deepspeed.runtime import config as installed
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from pipeline.config import deepspeed_keys as keys
from pipeline.config.deepspeed_check import SCHEMA, load_key_rules
from pipeline.config.deepspeed_json import load_deepspeed_json
from pipeline.config.loading import parse_override, set_dotted
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.errors import ConfigError

DESCRIBED = json.loads(SCHEMA.read_text())
OURS = ("optimizer", "scheduler")  # held to the recipe's tables instead
PASSED_ON = sorted(
    key
    for key in load_key_rules()
    if key.partition(".")[0] not in OURS
    and not any(f"{key}.".startswith(f"{other}.") for other in keys.UNSUPPORTED)
    and not any(
        key.startswith(f"{s}.") and key.rpartition(".")[2] not in n for s, n in keys.READ_KEYS.items()
    )
)
SECTIONS = sorted(
    key for key in PASSED_ON if any(each.startswith(f"{key}.") for each in PASSED_ON) or key in keys.READ_KEYS
)
ANOTHER_TYPE = {"boolean": 2, "integer": "4", "number": "0.5", "string": 3, "array": 7, "object": 5}


def nested(dotted, value):
    tree = {}
    set_dotted(tree, dotted.split("."), value, "test")
    return tree


@pytest.fixture
def load(tmp_path):
    def function(content, *overrides):
        path = tmp_path / "split.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
        return load_deepspeed_json(path, [parse_override(each) for each in overrides])

    return function


def settings(folder, tree):
    (folder / "split.json").write_text(json.dumps(tree, indent=2))
    (folder / "recipe.yaml").write_text("max_steps: 1\nmodel: {kind: cnn}\ndata: {kind: digits}\n")
    return load_settings(folder / "recipe.yaml", folder / "split.json")


def refusal(load, tmp_path, content, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(content, *overrides)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    return message


def test_the_file_describes_the_installed_deepspeed():
    assert SCHEMA.read_text() == text(), "python tests/config/deepspeed_schema.py"


def test_every_section_of_the_installed_deepspeed_is_described():
    """A section that DeepSpeed parses to a model, or reads key by key, is closed in the file."""
    config = installed.DeepSpeedConfig({"train_batch_size": 1, "comms_logger": {}, "weight_quantization": {}})

    def models(value):
        if isinstance(value, DeepSpeedConfigModel):
            yield type(value)
            for name in type(value).model_fields:
                yield from models(getattr(value, name))

    parsed = {model for value in vars(config).values() for model in models(value)}
    # the monitors stand at the top level, one by one; what is inside expert_parallel is not read here
    parsed -= {type(config.monitor_config), type(config.expert_parallel_config)}
    sections = {key.rpartition(".")[0] for key in DESCRIBED}
    for model in parsed:
        names = {field.alias or name for name, field in model.model_fields.items()}
        holders = [
            s for s in sections if names <= {k.rpartition(".")[2] for k in DESCRIBED if k.startswith(s)}
        ]
        assert holders, f"{model.__name__}: its keys stand together in no section of the file"
    by_hand = {"aio", "flops_profiler", "checkpoint", "checkpoint.writer", "data_types", "timers.throughput"}
    by_hand |= {"activation_checkpointing", "comms_logger", "zero_optimization.leaf_module", "hybrid_engine"}
    assert by_hand <= sections


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_a_typo_is_an_error_in_every_section(load, tmp_path, section):
    key = max((key for key in PASSED_ON if key.rpartition(".")[0] == section), key=len).rpartition(".")[2]
    wrong = f"{section}.{key}x".removeprefix(".")
    message = refusal(load, tmp_path, nested(wrong, None))  # null too: a misspelt key is one
    assert message == f'split.json:{2 + wrong.count(".")}: {wrong}: unknown key (did you mean "{key}"?)'
    message = refusal(load, tmp_path, {}, f"{wrong}=1")
    assert message == f'command line: ds.{wrong}: unknown key (did you mean "{key}"?)'


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_a_value_of_another_type_is_told_with_its_line(load, tmp_path, section):
    for dotted in PASSED_ON:
        kinds = load_key_rules()[dotted].get("type")
        if dotted.rpartition(".")[0] != section or kinds is None:
            continue
        wrong = [ANOTHER_TYPE[kinds] if isinstance(kinds, str) else {"a": 1}]
        wrong += [True] if kinds in ("integer", "number") else []
        for value in wrong:
            message = refusal(load, tmp_path, nested(dotted, value))
            assert message.startswith(f"split.json:{2 + dotted.count('.')}: {dotted}: expected ")
            assert message.partition("; ")[0].endswith(f", given {value!r}")


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        ("zero_optimization.reduce_bucket_size", 0, "a whole number above 0"),
        ("zero_optimization.reduce_bucket_size", -5e8, "a whole number above 0"),
        ("zero_optimization.reduce_bucket_size", 1.5, "a whole number above 0"),
        ("zero_optimization.allgather_bucket_size", 5, "a whole number above 0, a multiple of 2"),
        ("zero_optimization.stage3_prefetch_bucket_size", -1, "a whole number of at least 0"),
        ("zero_optimization.max_live_parameters", -1, "a whole number of at least 0"),
        ("zero_optimization.offload_optimizer.device", "gpu", "none, cpu or nvme"),
        ("zero_optimization.offload_optimizer.device", "CPU", "none, cpu or nvme"),
        ("zero_optimization.offload_optimizer.ratio", 1.1, "a number of at least 0 and up to 1"),
        ("steps_per_print", "often", "a whole number above 0"),
        ("steps_per_print", 0, "a whole number above 0"),
        ("aio.block_size", 0, "a whole number above 0"),
        ("fp16.loss_scale", -1, "a number of at least 0"),
        ("fp16.initial_scale_power", 5000, "a whole number of at least 0 and up to 127"),
        ("communication_data_type", "fp8", "fp32, fp16 or bf16"),
        ("data_types.grad_accum_dtype", "double", "fp32, fp16 or bf16"),
        ("tf32.enabled", "maybe", 'true, false or "auto"'),
        ("torch.parallel", "fsdp", "auto, single, dp or ddp"),
    ],
)
def test_a_value_out_of_its_range_is_told_with_the_range(load, tmp_path, dotted, value, expected):
    told = f"{dotted}: expected {expected}, given {value!r}"
    assert refusal(load, tmp_path, nested(dotted, value)) == f"split.json:{2 + dotted.count('.')}: {told}"
    assert refusal(load, tmp_path, {}, f"{dotted}={value}") == f"command line: ds.{told}"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "non-finite gradients"),
        ({"zero_optimization.stage": 2}, 'unknown key; write "zero_optimization": {"stage": ...}'),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16: another name of bf16, which is given too; remove one"),
        ({"zero_optimization": {"cpu_offload": True}}, "use zero_optimization.offload_optimizer: "),
        ({"pipeline": {"seed_layers": True}}, "of pipeline this trainer reads partition, stages"),
        ({"tensor_parallel": {"dtype": "bf16"}}, "of tensor_parallel this trainer reads autotp"),
        ({"flops_profiler": {"enabled": True, "profile_stepp": 1}}, 'did you mean "profile_step"?'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 1}}}, 'mean "warmup_num_steps"?'),
    ],
)  # fmt: skip
def test_what_deepspeed_would_refuse_or_read_otherwise_is_told(tmp_path, tree, message):
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, tree)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/split.json:")


@pytest.mark.parametrize(
    "number", ["9" * 5000, "-" + "9" * 5000, "9" * 300, "1e999", "-1e999", "NaN", "Infinity"]
)
def test_a_number_of_absurd_size_is_one_short_line(load, tmp_path, number):
    message = refusal(load, tmp_path, f'{{\n"zero_optimization": {{\n"reduce_bucket_size": {number}}}}}')
    assert message.startswith(
        "split.json:3: zero_optimization.reduce_bucket_size: expected a whole number abo"
    )
    assert len(message) < 200


def test_lines_are_found_in_any_layout(load, tmp_path):
    content = '{"a\\"b": "}", "list": [1, {"x": 2}],\r\n\t"bf16":\n{ "enabled"\n : true,\n\n"enabeld": 1}}'
    with pytest.raises(ConfigError, match=r'json:1: a"b: unknown key'):
        load(content)
    assert refusal(load, tmp_path, content.replace('"a\\"b": "}", "list": [1, {"x": 2}],', "")) == (
        'split.json:6: bf16.enabeld: unknown key (did you mean "enabled"?)'
    )


@pytest.mark.parametrize("key", ["_comment", "//", "comment", "$schema", "_note_on_buckets", "stage_comment"])
@pytest.mark.parametrize("section", ["", "zero_optimization.", "optimizer.params."])
def test_keys_that_people_write_for_each_other_are_passed_over_with_a_line(load, section, key):
    file = load(nested(f"{section}{key}", "why"))
    if section == "optimizer.params.":
        return
    (note,) = file.notes
    assert note.endswith(f"{section}{key}: ignored; it is a comment")
    assert key not in json.dumps(file.tree)


def test_a_comment_may_stand_twice(load):
    assert load('{"_comment": "a", "_comment": "b"}').tree == {}


@pytest.mark.parametrize(
    "tree",
    [
        {"tensorboard": {"enabled": False, "output_path": "logs"}},
        {"amp": {"enabled": "auto", "opt_level": "auto"}},
        {"elasticity": {"enabled": False}},
        {"dataloader_drop_last": False},
        {"gradient_allreduce_op": "mean"},
        {"sparse_gradients": False},
        {"checkpoint": {"use_node_local_storage": False, "load_universal": False}},
    ],
)
def test_what_is_switched_off_is_passed_over_with_a_line(load, tree):
    file = load(tree)
    assert file.tree == {}
    assert len(file.notes) == 1
    assert file.notes[0].endswith(": ignored; it is switched off")


@pytest.mark.parametrize(
    ("key", "on", "off"),
    [
        ("wall_clock_breakdown", True, False),
        ("comms_logger", {"enabled": True, "verbose": False}, {"enabled": False, "verbose": True}),
        ("flops_profiler", {"enabled": True, "profile_step": 5}, {"enabled": False, "profile_step": 5}),
    ],
)
def test_deepspeeds_profilers_are_passed_over_with_what_to_use(load, key, on, off):
    file = load({key: on})
    assert (file.tree, len(file.notes)) == ({}, 1)
    assert file.notes[0].endswith(f"{key}: ignored; {keys.IGNORED[key]}")
    assert (load({key: off}).tree, load({key: off}).notes) == ({}, [])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"max_live_parameters": 1e9}, {"stage3_max_live_parameters": 10**9}),
        ({"prefetch_bucket_size": "auto"}, {"stage3_prefetch_bucket_size": "auto"}),
        ({"gather_16bit_weights_on_model_save": True}, {}),
        ({"stage3_gather_fp16_weights_on_model_save": True}, {}),
        ({"cpu_offload": False}, {}),
        ({"cpu_offload_use_pin_memory": True}, {}),
    ],
)
def test_other_names_of_deepspeeds_own_become_the_documented_ones(load, given, taken):
    assert load({"zero_optimization": given}).tree == {"zero_optimization": taken}


@pytest.mark.parametrize("name", [n for key in PASSED_ON for n in load_key_rules()[key].get("names", ())])
def test_every_alias_of_deepspeeds_fields_is_taken(load, name):
    value = load_key_rules()[f"zero_optimization.stage3_{name}"]["default"]
    taken = load({"zero_optimization": {name: value}}).tree.get("zero_optimization", {})
    ignored = f"zero_optimization.stage3_{name}" in keys.IGNORED
    assert taken == ({} if ignored or value is None else {f"stage3_{name}": value})


def test_an_alias_is_told_by_the_name_that_was_given(load, tmp_path):
    tree = {"zero_optimization": {"stage": 3, "max_reuse_distance": "far"}}
    assert refusal(load, tmp_path, tree) == (
        "split.json:4: zero_optimization.max_reuse_distance: expected a whole number of at least 0, "
        "given 'far'"
    )


def refused_by_deepspeed(tree):
    try:
        installed.DeepSpeedConfig({"train_batch_size": 1, **tree})
    except (ValueError, AssertionError, TypeError, AttributeError, installed.DeepSpeedConfigError):
        return True
    return False


UNVALIDATED = {
    "activation_checkpointing",
    "compile",
    "pipeline",
    "tf32",
    "torch",
}  # this trainer's own, or taken as they are


@pytest.mark.slow
@pytest.mark.parametrize("section", ["", *(name for name in SECTIONS if name not in UNVALIDATED)])
def test_what_deepspeed_refuses_is_refused_before_it_is_loaded(tmp_path, section):
    """Every key with every odd value: what DeepSpeed's own validation refuses, --dry-run does too."""
    num_refused = 0
    for dotted in PASSED_ON:
        owned = dotted in keys.RECIPE_OWNS or dotted.partition(".")[0] in keys.OWN_SECTIONS
        if dotted.rpartition(".")[0] != section or owned:
            continue
        for value in (0, -1, 1.5, 10**30, True, "often", "1", [], {}, [1], {"nothing": 1}):
            tree = nested(dotted, value)
            zero = tree.setdefault("zero_optimization", {})
            if isinstance(zero, dict):
                zero.setdefault("stage", 2)
            if (dotted, value) == ("aio.use_gds", True):
                continue  # refused on a CPU only
            if refused_by_deepspeed(tree):
                with pytest.raises(ConfigError):
                    settings(tmp_path, tree).resolve(1, Device("cpu", bf16=True, fp16=True))
                num_refused += 1
    assert num_refused > 0
