"""Optimizers by import path: what is tried out before a run, and what is said of one that cannot work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.split import Split
from pipeline.engine.optim import CombinedOptimizer, build_torch_optimizer, parameter_groups
from pipeline.engine.schedule import set_learning_rate
from pipeline.errors import ConfigError

ZERO_2 = Split(2, "fp32", "deepspeed", zero_stage=2)
ZERO_0 = Split(2, "fp32", "deepspeed")
ZERO_0_BF16 = Split(2, "bf16", "deepspeed")
PLAIN = Split(1, "fp32", "single")


class Signed(torch.optim.Optimizer):
    """Moves each element by the sign of its gradient; the others have a mistake in it."""

    def __init__(self, groups, power=0.5):
        super().__init__(groups, {"power": power})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in self.parameters_of(group):
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, group))

    def parameters_of(self, group):
        return group["params"]

    def update(self, p, group):
        return p.grad.sign()


class Counting(Signed):
    """Keeps a number, a 0-dim tensor and a bf16 tensor."""

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["count"] = 0
            state["share"] = torch.ones((), dtype=torch.float64)
            state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
        state["count"] += 1
        state["share"].mul_(0.9)
        state["mean"].lerp_(p.grad.bfloat16(), 0.1)
        assert state["mean"].dtype == torch.bfloat16
        return state["mean"].float() / (1 - state["share"].item()) / state["count"] ** group["power"]


class CountAlone(Signed):
    """Keeps nothing but a number."""

    def update(self, p, group):
        self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return p.grad.sign() / self.state[p]["count"]


class Normed(Signed):
    def update(self, p, group):
        return p.grad / p.grad.norm()


class RowMeans(Signed):
    """Elementwise in what it does, not in what it keeps."""

    def update(self, p, group):
        self.state[p]["rows"] = p.grad.flatten(1).mean(1) if p.grad.dim() > 1 else p.grad.mean()[None]
        return p.grad.sign()


class InAttribute(Signed):
    def update(self, p, group):
        self.count = getattr(self, "count", 0) + 1
        return p.grad.sign() / self.count


class InGroup(Signed):
    def update(self, p, group):
        group["count"] = group.get("count", 0) + 1
        return p.grad.sign() / group["count"]


class Remembering(Signed):
    def __init__(self, groups):
        super().__init__(groups)
        self.own = [p for group in self.param_groups for p in group["params"]]

    def parameters_of(self, group):
        return self.own


class AtConstruction(Signed):
    def __init__(self, groups):
        super().__init__(groups)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = 0

    def update(self, p, group):
        self.state[p]["count"] += 1
        return p.grad.sign() / self.state[p]["count"]


class Listing(Signed):
    def update(self, p, group):
        self.state[p]["norms"] = [1.0]
        return p.grad.sign()


class Quantized(Signed):
    def update(self, p, group):
        self.state[p]["bits"] = torch.zeros_like(p, dtype=torch.uint8)
        return p.grad.sign()


class Drifting(Signed):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"])


class NoneFails(Signed):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


def first_group(groups):
    return Signed(groups[:1])


def one_group(groups):
    return Signed([p for group in groups for p in group["params"]])


def no_optimizer(groups):
    return groups


def failing(groups):
    raise RuntimeError("no such thing")


def ending(groups):
    raise SystemExit(3)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def built(name, split=PLAIN, args=None, module=None, **config):
    kind = name if ":" in name else f"test_own_optimizer:{name}"
    config = OptimizerConfig(kind=kind, args=args or {}, **config)
    named = (module or model()).named_parameters()
    return build_torch_optimizer(parameter_groups(named, config), config, split)


BROKEN = {
    ("NONE", PLAIN): r"has no 'NONE'",
    ("first_group", PLAIN): r"has 2 parameters in 1 groups, and was given 4 in 2; pass the groups on",
    ("one_group", PLAIN): r"has 4 parameters in 1 groups, and was given 4 in 2; pass the groups on",
    ("no_optimizer", PLAIN): r"returned a list, not a torch\.optim\.Optimizer",
    (
        "failing",
        PLAIN,
    ): r"failing raised RuntimeError: no such thing \(tests/engine/test_own_optimizer\.py:\d+\)",
    ("ending", PLAIN): r"ended the program \(SystemExit: 3\)",
    ("InAttribute", PLAIN): r"stores state outside of self\.state\[p\].* store it in self\.state\[p\]",
    ("InGroup", PLAIN): r"stores state outside of self\.state\[p\]",
    ("Listing", PLAIN): r"stores a list as 'norms', which a checkpoint cannot contain",
    ("Quantized", PLAIN): r"stores a tensor of torch\.uint8 as 'bits', which a checkpoint cannot contain",
    ("Drifting", PLAIN): r"changes a parameter that has no gradient; write `if p\.grad is None: continue`",
    ("NoneFails", PLAIN): r"tried out without a gradient, raised AttributeError: .*test_own_optimizer\.py",
    ("torch.optim:LBFGS", PLAIN): r"raised ",
    (
        "Normed",
        ZERO_2,
    ): r"updates flat pieces of a matrix differently .*; under DeepSpeed, ZeRO stage 2.* plain PyTorch",
    ("RowMeans", ZERO_2): r"stores 'rows' in another shape than the parameter's.* plain PyTorch",
    ("Remembering", ZERO_2): r"read its parameters from self\.param_groups in each step",
    ("AtConstruction", ZERO_2): r"tried out as DeepSpeed.* raised KeyError: 'count' .* plain PyTorch",
    ("Remembering", ZERO_0_BF16): r"does not update the tensors that replace the parameters",
    ("torch.optim:Adagrad", ZERO_2): r"DeepSpeed replaces torch's Adagrad .* plain PyTorch",
}


@pytest.mark.parametrize(("name", "split"), BROKEN, ids=str)
def test_one_that_cannot_work_is_one_line(name, split):
    with pytest.raises(ConfigError, match=BROKEN[name, split]) as caught:
        built(name, split)
    assert str(caught.value).startswith(("optimizer.kind: ", "test_own_optimizer:NONE"))
    assert "\n" not in str(caught.value)


def test_arguments_that_do_not_fit_are_one_line():
    with pytest.raises(ConfigError, match=r"optimizer\.args: test_own_optimizer:Signed .*'beta'"):
        built("Signed", args={"beta": 1})


@pytest.mark.parametrize("name", ["Normed", "RowMeans", "Remembering"])
def test_one_that_looks_at_whole_matrices_works_where_they_are_whole(name):
    built(name, PLAIN)
    built(name, ZERO_0)


@pytest.mark.parametrize("name", ["Adam", "Adamax", "NAdam", "RAdam", "RMSprop"])
def test_torchs_own_fit_as_they_are(name):
    assert type(built(f"torch.optim:{name}", ZERO_2)) is getattr(torch.optim, name)


def test_groups_have_the_rates_and_decays_of_the_recipe():
    groups = [{"patterns": ["2.*"], "learning_rate_factor": 0.1, "weight_decay": 0.5}]
    optimizer = built("Signed", weight_decay=0.3, learning_rate=2.0, groups=groups, args={"power": 1.0})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.5]
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 2.0, 0.2]
    assert {group["power"] for group in optimizer.param_groups} == {1.0}
    set_learning_rate(optimizer, 3.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3.0, 3.0, 0.3])


def test_one_stands_beside_muon():
    module = model()
    groups = [{"patterns": ["0.weight"], "kind": "muon"}]
    optimizer = built("Signed", module=module, learning_rate=1.0, groups=groups)
    assert isinstance(optimizer, CombinedOptimizer)
    set_learning_rate(optimizer, 0.5)
    before = module[2].weight.detach().clone()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(module[2].weight, before - 0.5)


def test_trying_it_out_draws_no_random_number_of_the_run():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    module = nn.Linear(2, 2)
    torch.manual_seed(5)
    built("Counting", ZERO_2, module=module)
    assert torch.equal(torch.rand(3), expected)
