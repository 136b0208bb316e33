"""Batch normalisation under data parallelism: two ranks with half the micro-batch are one with all of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parity.measure import ALONE
from support.tiny import deepspeed_json, make_engine, recipe
from torch import nn

from pipeline.config.batch_plan import plan_batch
from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import mean_loss
from pipeline.models.batch_norm import CPUSyncBatchNorm, count_batch_norms, synchronize_batch_norm
from pipeline.objectives import Classification
from pipeline.training.assemble import build_loader

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Hidden(nn.BatchNorm2d):
    """A subclass, which may compute anything: the conversion leaves it alone."""


def cnn(kind=nn.BatchNorm2d):
    """No bias before a normalisation: its gradient is rounding noise, of which AdamW makes whole steps."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        kind(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, bias=False),
        kind(8, momentum=None),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16, bias=False),
        nn.BatchNorm1d(16, eps=1e-3, momentum=0.3) if kind is nn.BatchNorm2d else nn.Identity(),
        nn.Linear(16, 5),
    )


class Images:
    """Images whose brightness and label go together, sorted, so that halves of a batch differ."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 5
        image = torch.randn(1, 8, 8, generator=generator) * (1 + label) + 10 * (index % 2)
        return {"inputs": image, "labels": torch.tensor(label)}


def curve_and_statistics(job: Job, deepspeed, build="cnn", steps=10):
    """(loss, gradient norm) a step, the running statistics on this rank, and a held-out loss."""
    data = DataBundle(Images(), {}, collate_items, None, None, 5, "images")
    micro = 8 // job.ranks.world_size
    tree = recipe(
        model={"kind": f"test_models_batch_norm:{build}"},
        objective={"kind": "classification"},
        batch={"micro_batch_size": micro, "gradient_accumulation_steps": 2},
    )
    engine = make_engine(job, tree, deepspeed, data)
    config = plan_config(tree, deepspeed)
    loader = build_loader(config, plan_batch(config.batch, engine.dp_world_size), data, engine)
    curve = []
    for _ in range(steps):
        result = engine.train_step(loader.next_group(), Classification(), 3e-3, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        curve += [float(mean_loss(total, result.global_count)), float(result.grad_norm)]
    statistics = {name: value.clone() for name, value in engine.module.named_buffers()}
    held_out = engine.eval_step(collate_items([data.train[i] for i in range(16)]), Classification())
    return curve, statistics, float(held_out.loss_sum)


def plan_config(tree, deepspeed):
    from support.tiny import settings

    return settings(tree, deepspeed).config


SPLITS = {"ddp": None, **{f"ZeRO {stage}": deepspeed_json(stage) for stage in (0, 2, 3)}}


@pytest.fixture(scope="module")
def oracle():
    return curve_and_statistics(ALONE, None)


@pytest.mark.daily("ddp", "ZeRO 3")
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_with_half_the_micro_batch_are_one_rank(ranks, oracle, split):
    curve, statistics, held_out = oracle
    results = ranks(2).run(curve_and_statistics, SPLITS[split])
    for other_curve, other_statistics, other_held_out in results:
        assert other_curve == pytest.approx(curve, rel=1e-5)
        assert other_held_out == pytest.approx(held_out, rel=1e-5)
        assert other_statistics.keys() == statistics.keys()
        for name, value in statistics.items():
            torch.testing.assert_close(other_statistics[name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(results[0][1][name], results[1][1][name])


# --- one layer ----------------------------------------------------------------------------------------


def uneven(job: Job, kind, momentum, dtype):
    """Rank 0 sees 5 samples, rank 1 the other 2. (output, input gradient, weight gradient, statistics)."""
    generator = torch.Generator().manual_seed(0)
    shape = {nn.BatchNorm1d: (7, 3), nn.BatchNorm2d: (7, 3, 4, 2), nn.BatchNorm3d: (7, 3, 2, 2, 3)}[kind]
    whole = (torch.randn(shape, generator=generator) * 2 + 100).to(dtype)
    slope = torch.randn(shape, generator=generator).to(dtype)
    layer = kind(3, momentum=momentum)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        layer.bias.copy_(torch.tensor([0.1, 0.0, -3.0]))
    mine = slice(None)
    if job.ranks.world_size > 1:
        mine = slice(0, 5) if job.ranks.rank == 0 else slice(5, 7)
        layer = synchronize_batch_norm(layer, dist.group.WORLD, CPU)
        assert type(layer) is CPUSyncBatchNorm
    x = whole[mine].clone().requires_grad_()
    for _ in range(2):
        y = layer(x)
        (y * slope[mine]).sum().backward()
    layer.eval()
    statistics = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    tensors = (y, x.grad, layer(x), layer.weight.grad, layer.bias.grad, *statistics)
    return [tensor.detach() for tensor in tensors]


@pytest.mark.daily("BatchNorm1d-0.1", "BatchNorm3d-None")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_uneven_batches_give_what_one_layer_gives(ranks, kind, momentum):
    expected = uneven(ALONE, kind, momentum, torch.float32)
    first, second = ranks(2).run(uneven, kind, momentum, torch.float32)
    for a, b, whole in zip(first[:3], second[:3], expected[:3], strict=True):
        torch.testing.assert_close(torch.cat([a, b]), whole, rtol=1e-4, atol=1e-4)
    for a, b, whole in zip(first[3:5], second[3:5], expected[3:5], strict=True):
        torch.testing.assert_close(a + b, whole, rtol=1e-4, atol=1e-4)
    for a, b, whole in zip(first[5:], second[5:], expected[5:], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, whole, rtol=1e-5, atol=1e-5)


def test_half_precision_goes_in_and_comes_out(ranks):
    expected = uneven(ALONE, nn.BatchNorm2d, 0.1, torch.bfloat16)[0]
    parts = [result[0] for result in ranks(2).run(uneven, nn.BatchNorm2d, 0.1, torch.bfloat16)]
    assert parts[0].dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts), expected, rtol=2e-2, atol=2e-2)


# --- the conversion -----------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer under two names, one without parameters or statistics, and a subclass."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.BatchNorm1d(4, affine=False, track_running_stats=False), Hidden(4))


def converted(job: Job):
    model = Shared().eval()
    before = dict(model.named_parameters()), list(model.state_dict())
    after = synchronize_batch_norm(model, None, CPU)
    assert after is model
    assert after.a is after.b
    assert not after.a.training
    assert [type(layer) for layer in after.inner] == [CPUSyncBatchNorm, Hidden]
    assert all(p is before[0][name] for name, p in after.named_parameters())
    assert list(after.state_dict()) == before[1]
    after.train()
    x = torch.full((2, 4), float(job.ranks.rank)) + torch.tensor([[-0.5], [0.5]])
    return after.inner[0](x), count_batch_norms(after)


def test_the_conversion_keeps_parameters_names_and_what_is_no_plain_batch_norm(ranks):
    (first, left), (second, _) = ranks(2).run(converted)
    assert left == 0
    assert torch.cat([first, second]).mean().abs() < 1e-6
    assert first.mean() < -0.5 < 0.5 < second.mean()
    assert count_batch_norms(cnn()) == 3
