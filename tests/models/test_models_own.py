"""Models that are plain nn.Modules: the small CNN, and a user's own by import path."""

from __future__ import annotations

import logging

import pytest
import torch
from support.launch import ROOT, launch, write_recipe
from torch import nn

from pipeline.config.model_schema import CNNConfig, CustomModelConfig
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding

REQUEST = ModelRequest(NoSharding(), num_classes=10)


def own(kind, **args):
    return build_model(CustomModelConfig(kind=f"test_models_own:{kind}", args=args), REQUEST, seed=0)


def line(*, width, bias=True):
    return nn.Linear(width, 1, bias=bias)


def none_at_all():
    return {"not": "a module"}


class Tied(nn.Module):
    """Two names for one weight, a statistic, and a table of its own precision."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(3)


def in_bf16():
    model = Tied().bfloat16()
    model.register_buffer("table", torch.zeros(3, dtype=torch.float64))
    return model


def large_and_lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyLinear(3))


def broken():
    return nn.Linear("wide", 1)


def with_experts():
    from deepspeed.moe.layer import MoE

    return nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2))


def called_once():
    model = nn.LazyLinear(2)
    model(torch.zeros(1, 3))
    return model


a_number = 3


# --- the CNN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (16, 10), (28, 28), (4, 4)])
def test_the_cnn_takes_images_of_any_size(size):
    model = build_model(CNNConfig(kind="cnn", channels=4), REQUEST, seed=0)
    assert model(torch.zeros(3, 1, *size)).shape == (3, 10)


def test_initial_weights_depend_on_the_seed_alone():
    first = build_model(CNNConfig(kind="cnn"), REQUEST, seed=1)
    torch.rand(100)
    again = build_model(CNNConfig(kind="cnn", dropout=0.3), REQUEST, seed=1)
    other = build_model(CNNConfig(kind="cnn"), REQUEST, seed=2)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_classes_come_from_the_recipe_or_the_data():
    def outputs(stated, data):
        request = ModelRequest(NoSharding(), num_classes=data)
        return build_model(CNNConfig(kind="cnn", num_classes=stated), request, 0).classifier.out_features

    assert outputs(None, 7) == 7
    assert outputs(12, 7) == 12
    assert outputs(12, None) == 12
    with pytest.raises(ModelError, match=r"model\.num_classes is 6, but the data has 7 classes"):
        outputs(6, 7)
    with pytest.raises(
        ModelError, match=r"model\.num_classes is not given, and the data does not say it; write the number"
    ):
        outputs(None, None)


def test_dropout_acts_in_training_alone():
    model = build_model(CNNConfig(kind="cnn", dropout=0.5), REQUEST, seed=0)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(model.eval()(images), model(images))
    assert not torch.equal(model.train()(images), model(images))


def test_a_function_is_called_with_its_arguments():
    model = own("line", width=3, bias=False)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.bias) == (3, None)


# --- a model of one's own -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("test_models_own:lines", {}, "has no 'lines'; did you mean 'line'?"),
        ("test_models_own:a_number", {}, "it is a int, which is not callable"),
        ("test_models_owned:line", {}, "there is no module 'test_models_owned'"),
        ("no.such.module:line", {}, "there is no module 'no'"),
        ("test_models_own:line", {}, "model.args do not fit test_models_own:line: missing a required"),
        ("test_models_own:line", {"widht": 3, "width": 3}, "got an unexpected keyword argument 'widht'"),
        ("test_models_own:none_at_all", {}, "returned a dict, not an nn.Module"),
        ("test_models_own:with_experts", {}, "(1.deepspeed_moe.experts.deepspeed_experts.0.weight), whose"),
    ],
)  # fmt: skip
def test_what_leads_to_no_model_is_one_line(kind, args, message):
    with pytest.raises(ModelError) as caught:
        build_model(CustomModelConfig(kind=kind, args=args), REQUEST, 0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_in_half_precision_become_fp32(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pipeline"), "propagate", True)
    model = own("in_bf16")
    assert {p.dtype for p in model.parameters()} == {model.norm.running_mean.dtype} == {torch.float32}
    assert model.table.dtype == torch.float64
    assert model.inner.weight is model.outer.weight
    assert "15 parameters are bf16 and were cast to fp32" in caplog.text
    caplog.clear()
    own("line", width=3)
    assert not caplog.text


def test_parameters_without_values_are_named():
    with pytest.raises(ModelError, match=r"values: 0\.weight, 0\.bias, 1\.weight, \.\.\. are lazy; give the"):
        own("large_and_lazy")
    assert own("called_once").weight.shape == (2, 3)


def test_an_error_inside_the_users_function_keeps_its_type():
    with pytest.raises(TypeError):
        own("broken")


def test_a_class_written_in_c_may_be_named():
    config = CustomModelConfig(kind="torch.nn:Identity")
    assert isinstance(build_model(config, REQUEST, 0), nn.Identity)
    with pytest.raises(ModelError, match=r"returned a dict, not an nn\.Module"):
        build_model(CustomModelConfig(kind="builtins:dict"), REQUEST, 0)


@pytest.mark.nightly
def test_it_does_not_wait_for_transformers(tmp_path):
    """A package whose import takes longer than everything else that a run imports."""
    recipe = write_recipe(
        tmp_path,
        max_steps=1,
        model={"kind": "support.faults:faulty", "args": {"fault": "none", "rank": 0, "at": 0}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
    )
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")]
    done = launch(
        "--config", str(recipe), *split, PYTHONPATH=str(ROOT / "tests"), PYTHONPROFILEIMPORTTIME="1"
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"torch", "deepspeed", "pipeline.models.transformers_facts"} <= imported
    assert "transformers" not in imported
