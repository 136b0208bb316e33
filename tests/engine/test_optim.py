"""Parameters of each group, its rate and decay, and what a skipped step leaves unchanged."""

from __future__ import annotations

import copy
import math
from contextlib import suppress

import pytest
import torch
from torch import nn

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.engine.clipping import clip_and_guard, suppress_steps
from pipeline.engine.optim import build_torch_optimizer, parameter_groups
from pipeline.engine.schedule import set_learning_rate
from pipeline.errors import ConfigError, ModelError


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.norm = nn.LayerNorm(3)


def made(**optimizer):
    """(what each parameter's group says of it: name -> (rate factor, decay), names in the groups' order)."""
    model = Tiny()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model.named_parameters(), OptimizerConfig(**optimizer))
    told = {
        names[id(p)]: (group["lr_factor"], group["weight_decay"]) for group in groups for p in group["params"]
    }
    return told, [len(group["params"]) for group in groups]


def test_matrices_decay_and_vectors_do_not():
    told, sizes = made(weight_decay=0.3)
    assert sizes == [3, 4]
    assert list(told) == [
        *("embed.weight", "layers.0.weight", "layers.1.weight"),
        *("layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias"),
    ]
    assert all(found == (1.0, 0.3 if i < 3 else 0.0) for i, found in enumerate(told.values()))


def test_the_first_group_that_matches_has_the_parameter():
    told, sizes = made(
        weight_decay=0.3,
        groups=[
            {"patterns": ["embed.*", "*.1.weight"], "learning_rate_factor": 0.1},
            {"patterns": ["layers.*"], "weight_decay": 0.5},
        ],
    )
    assert told == {
        "layers.0.weight": (1.0, 0.5),
        "layers.0.bias": (1.0, 0.5),
        "layers.1.bias": (1.0, 0.5),
        "embed.weight": (0.1, 0.3),
        "layers.1.weight": (0.1, 0.3),
        "norm.weight": (1.0, 0.0),
        "norm.bias": (1.0, 0.0),
    }
    assert sizes == [2, 2, 3]


def test_a_pattern_without_a_parameter_names_the_nearest():
    with pytest.raises(ConfigError) as caught:
        made(groups=[{"patterns": ["norm.*"]}, {"patterns": ["layer.0.*"]}])
    assert str(caught.value).startswith(
        "optimizer.groups.1.patterns: 'layer.0.*' matches no parameter that is trained; nearest: layers.0."
    )


def test_frozen_parameters_are_in_no_group():
    model = Tiny()
    model.embed.requires_grad_(False)
    with pytest.raises(ConfigError, match="matches no parameter that is trained"):
        parameter_groups(model.named_parameters(), OptimizerConfig(groups=[{"patterns": ["embed.*"]}]))
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="nothing can be trained"):
        parameter_groups(model.named_parameters(), OptimizerConfig())


def build(config: OptimizerConfig):
    model = Tiny()
    return model, build_torch_optimizer(parameter_groups(model.named_parameters(), config), config)


def test_a_group_steps_at_its_own_multiple_of_the_rate():
    config = OptimizerConfig(groups=[{"patterns": ["norm.*"], "learning_rate_factor": 0.25}])
    _, optimizer = build(config)
    set_learning_rate(optimizer, 0.008)
    assert [group["lr"] for group in optimizer.param_groups] == [0.008, 0.008, 0.002]


def test_a_group_is_stepped_by_its_own_kind():
    """Each moves as it would if its optimizer were the only one."""
    torch.manual_seed(0)
    model = Tiny()
    twins = [copy.deepcopy(model) for _ in range(3)]
    config = OptimizerConfig(
        groups=[
            {"patterns": ["layers.*.weight"], "kind": "muon", "weight_decay": 0.2},
            {"patterns": ["*bias"], "kind": "sgd", "learning_rate_factor": 2.0},
        ]
    )
    optimizer = build_torch_optimizer(parameter_groups(model.named_parameters(), config), config)
    alone = [
        torch.optim.Muon(
            [layer.weight for layer in twins[0].layers], 0.01, 0.2, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.SGD([p for name, p in twins[1].named_parameters() if "bias" in name], 0.02, momentum=0.9),
        torch.optim.AdamW(
            [
                {"params": [twins[2].embed.weight], "weight_decay": 0.1},
                {"params": [twins[2].norm.weight], "weight_decay": 0.0},
            ],
            0.01,
            config.betas,
        ),
    ]
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in model.parameters()]
        for each in (model, *twins):
            for p, gradient in zip(each.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
        set_learning_rate(optimizer, 0.01)
        for each in (optimizer, *alone):
            each.step()
    moved = dict(model.named_parameters())
    for twin, stepped in zip(twins, alone, strict=True):
        names = {p: name for name, p in twin.named_parameters()}
        for p in (p for group in stepped.param_groups for p in group["params"]):
            torch.testing.assert_close(moved.pop(names[p]), p)
    assert not moved


def test_muon_takes_matrices_alone():
    with pytest.raises(ConfigError, match=r"kind: muon is for matrices, and layers\.0\.bias has 1 dimension"):
        made(groups=[{"patterns": ["layers.*"], "kind": "muon"}])


class OnHost(torch.optim.RMSprop):
    """One of torch's without fused kernels, with a state of three kinds."""

    def __init__(self, groups):
        super().__init__(groups, lr=0.1, momentum=0.9, centered=True)


OPTIMIZERS = {
    "adamw": lambda groups: build_torch_optimizer(groups, OptimizerConfig()),
    "sgd": lambda groups: build_torch_optimizer(groups, OptimizerConfig(kind="sgd")),
    "sgd without momentum": lambda groups: build_torch_optimizer(
        groups, OptimizerConfig(kind="sgd", momentum=0)
    ),
    "adafactor": lambda groups: build_torch_optimizer(groups, OptimizerConfig(kind="adafactor")),
    "another without found_inf": OnHost,
    "muon for matrices, AdamW for vectors": lambda groups: build_torch_optimizer(
        [group | {"kind": kind} for group, kind in zip(groups, ("muon", "adamw"), strict=True)],
        OptimizerConfig(),
    ),
}


def held(model, optimizer):
    """Copies of all that a step may change."""
    states = [
        {key: torch.as_tensor(value).clone() for key, value in optimizer.state.get(p, {}).items()}
        for p in model.parameters()
    ]
    return [p.detach().clone() for p in model.parameters()], states


def step(model, optimizer, factor: float):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    model.norm.bias.grad[0] *= factor
    _, skipped = clip_and_guard(optimizer, 1.0)
    optimizer.step()
    return bool(skipped)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_is_not_finite_moves_no_parameter_and_no_state(kind, bad):
    torch.manual_seed(0)
    model = Tiny()
    twin = Tiny()
    twin.load_state_dict(model.state_dict())
    optimizers = []
    for each in (model, twin):
        groups = parameter_groups(each.named_parameters(), OptimizerConfig())
        optimizers.append(OPTIMIZERS[kind](groups))
    for factor in (bad, 1.0, bad, 1.0):  # the very first step too, before there is any state
        before = held(model, optimizers[0])
        assert step(model, optimizers[0], factor) == (factor != 1.0)
        if factor == 1.0:
            step(twin, optimizers[1], 1.0)
        else:
            parameters, states = held(model, optimizers[0])
            assert all(map(torch.equal, parameters, before[0]))
            for now, then in zip(states, before[1], strict=True):
                assert all(torch.equal(now[key], then[key]) for key in then)
    (parameters, states), (expected, wanted) = held(model, optimizers[0]), held(twin, optimizers[1])
    assert all(map(torch.equal, parameters, expected)), "as if the bad steps had not been"
    for now, then in zip(states, wanted, strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(now[key], then[key]) for key in then)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_is_at_rest_inside_and_steps_again_after_an_error(kind):
    model = Tiny()
    optimizer = OPTIMIZERS[kind](parameter_groups(model.named_parameters(), OptimizerConfig()))
    before, _ = held(model, optimizer)

    def step_once():
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()

    with suppress(KeyError), suppress_steps(optimizer, torch.device("cpu")):
        step_once()
        assert all(map(torch.equal, model.parameters(), before))
        raise KeyError
    step_once()
    assert not any(map(torch.equal, model.parameters(), before))
