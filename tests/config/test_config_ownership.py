"""The recipe owns the numbers of training, the JSON those of the split; two different values are an error."""

from __future__ import annotations

import json

import pytest

from pipeline.config import deepspeed_keys as keys
from pipeline.config.loading import get_dotted, set_dotted
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.errors import ConfigError

DEVICE = Device("cpu", bf16=True, fp16=True)
# A value for each key of the JSON, different from the recipe's default.
STATED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer.params.lr": 1e-4,
    "optimizer.params.betas": [0.8, 0.99],
    "optimizer.params.eps": 1e-7,
    "optimizer.params.momentum": 0.8,
    "optimizer.params.weight_decay": 0.01,
    "optimizer.params.max_grad_norm": 0.3,
    "scheduler.params.warmup_num_steps": 7,
    "scheduler.params.total_num_steps": 70,
    "scheduler.params.warmup_max_lr": 1e-4,
    "scheduler.params.cos_min_ratio": 0.02,
}


@pytest.fixture
def load(tmp_path):
    def function(split, recipe="", *overrides, max_steps="max_steps: 100\n"):
        (tmp_path / "split.json").write_text(json.dumps(split))
        text = f"model: {{kind: cnn}}\ndata: {{kind: digits}}\n{max_steps}{recipe}"
        (tmp_path / "recipe.yaml").write_text(text)
        return load_settings(tmp_path / "recipe.yaml", tmp_path / "split.json", list(overrides))

    return function


def fails_with(load, tmp_path, *arguments, **keywords):
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **keywords)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    return message


def nested(dotted, value):
    tree = {}
    set_dotted(tree, dotted.split("."), value, "test")
    return tree


def stating(json_key):
    """A JSON with this number; momentum is read by SGD alone."""
    tree = nested(json_key, STATED[json_key])
    if json_key == "optimizer.params.momentum":
        tree["optimizer"]["type"] = "SGD"
    return tree


def as_yaml(dotted, value):
    return json.dumps(nested(dotted, value))[1:-1] + "\n"  # JSON is YAML


def field(config, dotted):
    value = get_dotted(config.model_dump(), dotted)
    return list(value) if isinstance(value, tuple) else value


def test_these_tests_state_every_number_two_files_can_state():
    assert set(STATED) == set(keys.RECIPE_OWNS)


@pytest.mark.parametrize(("json_key", "mine"), keys.RECIPE_OWNS.items())
def test_a_number_of_the_json_is_adopted_where_the_recipe_is_silent(load, json_key, mine):
    max_steps = "" if mine == "max_steps" else "max_steps: 100\n"
    config = load(stating(json_key), max_steps=max_steps).config
    assert field(config, mine) == STATED[json_key]


@pytest.mark.parametrize(("json_key", "mine"), keys.RECIPE_OWNS.items())
def test_the_same_number_twice_is_fine_and_another_one_is_an_error_that_quotes_both(
    load, tmp_path, json_key, mine
):
    stated = STATED[json_key]
    split = stating(json_key)
    max_steps = "" if mine == "max_steps" else "max_steps: 100\n"
    config = load(split, as_yaml(mine, stated), max_steps=max_steps).config
    assert field(config, mine) == stated
    own = [0.9, 0.95] if isinstance(stated, list) else 71 if isinstance(stated, int) else 0.25
    message = fails_with(load, tmp_path, split, as_yaml(mine, own), max_steps=max_steps)
    line = 3 if mine == "max_steps" else 4
    assert message == (
        f"split.json:1: {json_key} is {stated}, recipe.yaml:{line}: {mine} is {own}; "
        f'write "auto" here, or remove {mine} there'
    )


def test_the_optimizers_type_is_a_number_like_any_other(load, tmp_path):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8, "nesterov": False}}}
    config = load(sgd).config.optimizer
    assert (config.kind, config.learning_rate, config.momentum) == ("sgd", 0.1, 0.8)
    message = fails_with(load, tmp_path, {"optimizer": {"type": "AdamW"}}, "optimizer: {kind: sgd}\n")
    assert message == (
        "split.json:1: optimizer.type is AdamW, recipe.yaml:4: optimizer.kind is sgd; "
        'write "auto" here, or remove optimizer.kind there'
    )


def test_the_command_line_counts_as_the_recipe(load, tmp_path):
    message = fails_with(load, tmp_path, {"gradient_clipping": 0.5}, "", "optimizer.max_grad_norm=2.0")
    assert "gradient_clipping is 0.5, command line: optimizer.max_grad_norm is 2.0" in message


def test_the_json_may_not_contradict_itself(load, tmp_path):
    split = {"gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.4}}}
    message = fails_with(load, tmp_path, split)
    assert message == (
        "split.json:1: optimizer.params.max_grad_norm is 0.4, split.json:1: gradient_clipping is 0.5; "
        'write "auto" here'
    )


def test_the_scheduler_decides_the_peak_as_in_deepspeed(load):
    split = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}},
    }
    settings = load(split)
    assert settings.config.optimizer.learning_rate == 2e-4
    (note,) = settings.deepspeed_file.notes
    assert note.endswith(
        "optimizer.params.lr: the peak learning rate is warmup_max_lr, 0.0002, not 0.0001, as in DeepSpeed"
    )


def test_an_adopted_number_that_is_none_names_the_json(load, tmp_path):
    message = fails_with(load, tmp_path, {"gradient_clipping": -1})
    assert message.startswith(
        "split.json:1: gradient_clipping: optimizer.max_grad_norm: input should be greater"
    )


def test_a_section_of_the_recipe_that_is_none_is_told(load, tmp_path):
    message = fails_with(load, tmp_path, {"gradient_clipping": 1.0}, "optimizer: adam\n")
    assert "optimizer.max_grad_norm: optimizer is a value, not a section" in message


@pytest.mark.parametrize(("theirs", "ours"), keys.SCHEDULES.items())
def test_a_schedule_of_the_json_is_adopted(load, tmp_path, theirs, ours):
    split = {"scheduler": {"type": theirs}}
    assert load(split).config.schedule.kind == ours
    message = fails_with(load, tmp_path, split, "schedule: {kind: wsd}\n")
    assert f"scheduler.type is {theirs} (here: {ours}), recipe.yaml:4: schedule.kind is wsd" in message


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        (
            "optimizer.type",
            "Lamb",
            "expected adam, adamw, sgd or adafactor, given 'Lamb'; or remove the section",
        ),
        (
            "scheduler.type",
            "OneCycle",
            "expected WarmupLR, WarmupDecayLR or WarmupCosineLR, given 'OneCycle'",
        ),
        (
            "scheduler.type",
            7,
            "expected WarmupLR, WarmupDecayLR or WarmupCosineLR, given 7; or remove the sec",
        ),
        ("optimizer.params.amsgrad", True, "expected false, given True; remove it: the optimizers and"),
        (
            "optimizer.params.adam_w_mode",
            False,
            "expected true, given False; remove it: the optimizers",
        ),
        ("optimizer.params.dampening", 0.1, "expected 0, given 0.1; remove it: the optimizers"),
        (
            "optimizer.legacy_fusion",
            True,
            "expected false, given True; remove it: the optimizers and s",
        ),
        ("optimizer.params.max_norm", 1.0, 'unknown key (did you mean "max_grad_norm"?)'),
        ("optimizer.params.learning_rate", 1e-4, "unknown key"),
        ("optimizer.parms", {"lr": 1}, 'unknown key (did you mean "params"?)'),
        ("scheduler.params.cycle_first_step_size", 10, "unknown key"),
        ("scheduler.max_train_steps", 10, "unknown key (valid: params, type)"),
        (
            "scheduler.params.warmup_num_steps",
            0.5,
            "expected a whole number, given 0.5; for a share of the r",
        ),
        ("optimizer.params.lr", "1e-4", "expected a number, given '1e-4'"),
        ("optimizer", "AdamW", "expected an object, given 'AdamW'"),
        ("scheduler.params", "AdamW", "expected an object, given 'AdamW'"),
    ],
)
def test_what_the_recipe_cannot_take_over_is_refused(load, tmp_path, dotted, value, expected):
    assert fails_with(load, tmp_path, nested(dotted, value)).startswith(f"split.json:1: {dotted}: {expected}")


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("optimizer.legacy_fusion", False),
        ("optimizer.params.adam_w_mode", True),
        ("optimizer.params.bias_correction", True),
        ("optimizer.params.dampening", 0.0),
        ("optimizer.params.nesterov", False),
        ("optimizer.params.torch_adam", True),
        ("scheduler.params.last_batch_iteration", -1),
    ],
)
def test_a_parameter_that_says_what_is_done_anyway_is_fine(load, dotted, value):
    for each in (value, "auto", None):
        assert load(nested(dotted, each)).config == load({}).config


@pytest.mark.parametrize(
    ("scheduler", "kind", "floor"),
    [
        ({"type": "WarmupLR"}, "constant", 0.1),
        ({"type": "WarmupDecayLR"}, "linear", 0.0),
        ({"type": "WarmupDecayLR", "params": {"warmup_min_lr": 2e-6, "warmup_max_lr": 2e-5}}, "linear", 0.1),
        ({"type": "WarmupCosineLR"}, "cosine", 0.0001),
        ({"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.05}}, "cosine", 0.05),
        ({"type": "WarmupCosineLR", "params": {"cos_min_ratio": "auto"}}, "cosine", 0.1),
        ({"type": "auto", "params": {"warmup_num_steps": "auto"}}, "cosine", 0.1),
    ],
)
def test_a_schedule_ends_where_deepspeeds_does(load, scheduler, kind, floor):
    schedule = load({"scheduler": scheduler}).config.schedule
    assert (schedule.kind, schedule.min_learning_rate_ratio) == (kind, pytest.approx(floor))


def test_where_a_schedule_ends_is_the_recipes_where_the_json_leaves_it_open(load, tmp_path):
    recipe = "schedule: {min_learning_rate_ratio: 0.2}\n"
    config = load({"scheduler": {"type": "WarmupCosineLR"}}, recipe).config
    assert config.schedule.min_learning_rate_ratio == 0.2
    message = fails_with(load, tmp_path, {"scheduler": {"type": "WarmupDecayLR"}}, recipe)
    assert "recipe.yaml:4: schedule.min_learning_rate_ratio is 0.2" in message


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"warmup_type": "linear"}, ""),
        ({"warmup_type": "linear", "warmup_min_lr": 0}, ""),
        ({"warmup_type": "linear", "warmup_min_lr": 1e-6}, "here it is linear from 0"),
        ({}, "here it is linear from 0"),
        ({"warmup_type": "log"}, "here it is linear from 0"),
    ],
)
def test_another_warm_up_than_here_is_told(load, params, told):
    split = {"scheduler": {"type": "WarmupLR", "params": params}}
    assert not load(split).deepspeed_file.notes  # no warm-up at all
    notes = load(split, "schedule: {warmup: 3}\n").deepspeed_file.notes
    assert [told in note for note in notes] == [True] * bool(told)


def test_total_num_steps_is_compared_with_epochs_too(load, tmp_path):
    split = nested("scheduler.params.total_num_steps", 70)
    message = fails_with(load, tmp_path, split, "", max_steps="max_epochs: 70\n")
    assert message == (
        "split.json:1: scheduler.params.total_num_steps is 70, recipe.yaml:3: max_epochs is 70; "
        'write "auto" here, or remove max_epochs there'
    )


def test_a_batch_of_the_json_follows_the_equation(load):
    settings = load({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})
    found = settings.resolve(2, DEVICE)
    plan = found.batch_plan
    filled = found.deepspeed
    assert plan.gradient_accumulation_steps == filled["gradient_accumulation_steps"] == 8
    settings = load({"train_batch_size": 64})
    assert settings.resolve(4, DEVICE).batch_plan.micro_batch_size == 16
