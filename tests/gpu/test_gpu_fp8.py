"""fp8 on a GPU that has it: its kernels, near what the CPU emulates (pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from parity.measure import train
from parity.splits import SHORT, Case, Split, recomputed, zero
from support.rank_pool import RankPool
from torch.profiler import ProfilerActivity, profile

from pipeline.distributed.process_group import describe_device

pytest.importorskip("torchao")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not describe_device(torch.device("cuda", 0)).fp8,
        reason="no CUDA device that multiplies in fp8",
    ),
]

# bf16 rounds what fp8 has left; gradients of 32 wide layers have few terms.
BAND = 3e-3
NORM_BAND = 5e-2


def curve(json, recipe, on_gpu=True, **model):
    case = Case(Split("", json, model=recomputed("none") | {"fp8": recipe} | model), 1, "bf16")
    with RankPool(1, on_gpu=on_gpu) as pool:
        return pool.run(train, case.recipe, case.json, SHORT, timeout=600)[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("json", [{"torch": {"parallel": "single"}}, zero(2), zero(3)], ids=str)
def test_the_curve_is_that_of_the_emulation(json, recipe):
    compile_off = {"compile": {"enabled": False}}
    expected = curve({"torch": {"parallel": "single"}}, recipe, on_gpu=False)
    for found in (curve(json | compile_off, recipe), curve(json, recipe)):  # as written, and compiled
        assert found.losses == pytest.approx(expected.losses, rel=BAND)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=NORM_BAND)


def test_products_are_the_fp8_kernels():
    from models.test_models_fp8 import language_model

    model = language_model(device="cuda").to("cuda", torch.bfloat16)
    ids = torch.arange(24, device="cuda").view(2, 12)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls["aten::_scaled_mm"] == 3 * 14
