"""What only a CUDA device shows: every engine on it against PyTorch on the CPU (python -m pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from parity.measure import largest_difference, missing, oracle, train
from parity.splits import cases
from support.ranks import RankPool

from pipeline.distributed.process_group import describe_device
from pipeline.distributed.stopping import STOP_FLAG, FlagReader
from pipeline.peak_flops import peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Relative difference to fp32 on the CPU, per step: loss, gradient norm.
BANDS = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 3e-2), "fp16": (1e-3, 1e-2)}


@pytest.fixture(scope="module")
def gpu():
    with RankPool(1, on_gpu=True) as pool:
        yield pool


@pytest.mark.parametrize("case", [case for case in cases() if case.world_size == 1], ids=str)
def test_every_split_of_one_gpu_gives_the_cpus_curve(gpu, case):
    """Plain, every ZeRO stage, offloaded, recomputed, compiled, in each precision."""
    if why := missing(case):
        pytest.skip(why)
    got, expected = gpu.run(train, case.recipe, case.json)[0], oracle(case)
    assert largest_difference(got.losses, expected.losses) < BANDS[case.precision][0]
    assert largest_difference(got.grad_norms, expected.grad_norms) < BANDS[case.precision][1]


def test_a_stop_is_believed_two_steps_later_on_every_rank():
    flag_reader = FlagReader(torch.device("cuda", 0))
    summed = [torch.tensor(float(STOP_FLAG * (step >= 1)), device="cuda") for step in range(5)]
    assert [flag_reader.read(flags).stop for flags in summed] == [False, False, False, True, True]


def test_the_device_is_known():
    assert describe_device(torch.device("cuda", 0)).fp16
    assert peak_flops("NVIDIA H200", "bf16") == pytest.approx(989.5e12)
