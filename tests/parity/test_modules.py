"""Modules as people write them train on one curve under every split.

In fp32 it is that of plain PyTorch on one process, with the same buffers; in half precision it is near it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from parity.measure import ALONE
from parity.modules import MODULES, Curve, train_module
from support.tiny import deepspeed_json

pytestmark = pytest.mark.slow

SPLITS = ("ddp", 0, 1, 2, 3)
# Relative: loss, gradient norm; buffers by their own size. Batch statistics make more of a rounded weight
# than a language model does.
BANDS = {"fp32": (2e-6, 1e-5, 1e-5), "bf16": (3e-2, 0.2, 0.2), "fp16": (1e-2, 0.12, 0.15)}


def json_of(split, precision):
    if split != "ddp":
        return deepspeed_json(split, precision)
    return {"torch": {"parallel": "ddp"}} | ({"bf16": {"enabled": True}} if precision == "bf16" else {})


def cases():
    for name, split, precision, world in itertools.product(MODULES, SPLITS, BANDS, (1, 2)):
        if not (split == "ddp" and precision == "fp16"):
            yield pytest.param(name, split, precision, world, id=f"{name}-{split}-{precision}-{world}")


@pytest.fixture(scope="module")
def oracle(ranks):
    """One process in fp32; for averages that a module makes of what it sees itself, ddp on as many ranks."""
    known: dict[tuple[str, int], Curve] = {}

    def curve(name: str, world: int) -> Curve:
        key = (name, world if name == "Encoder" else 1)
        if key not in known:
            alone = key[1] == 1
            known[key] = (
                train_module(ALONE, name, None) if alone else ranks(world).run(train_module, name, None)[0]
            )
        return known[key]

    return curve


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.mark.daily("ResNet-3-fp32-2", "CRNN-0-bf16-2", "Encoder-3-bf16-2", "Parametrized-0-fp16-2")
@pytest.mark.parametrize(("name", "split", "precision", "world"), cases())
def test_the_curve_and_the_buffers_are_those_of_plain_pytorch(ranks, oracle, name, split, precision, world):
    expected = oracle(name, world)
    results = ranks(world).run(train_module, name, json_of(split, precision))
    loss, norm, size = BANDS[precision]
    got = results[0]
    assert difference(got.losses, expected.losses) < loss
    assert difference(got.grad_norms, expected.grad_norms) < norm
    assert difference([got.eval_loss], [expected.eval_loss]) < loss
    assert got.buffers.keys() == expected.buffers.keys()
    for key, value in expected.buffers.items():
        assert got.buffers[key].dtype == value.dtype
        largest = (
            float(value.abs().nan_to_num(posinf=0, neginf=0).max()) if value.is_floating_point() else 0.0
        )
        torch.testing.assert_close(got.buffers[key], value, rtol=0, atol=size * largest, equal_nan=True)
        assert all(
            torch.equal(value, other.buffers[key]) for other in results[1:] for value in [got.buffers[key]]
        )
