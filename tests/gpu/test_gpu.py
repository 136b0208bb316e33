"""What only a CUDA device shows: every engine on it against PyTorch on the CPU (python -m pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
from support.ranks import RankPool
from support.tiny import deepspeed_json, recipe, train_curve

from pipeline.distributed.process_group import Job, describe_device
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.stopping import StopAgreement
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


@pytest.fixture(scope="module")
def oracle():
    return train_curve(Job(Ranks(0, 0, 1, 1), torch.device("cpu")), recipe(), None)


def differences(curve, oracle):
    return [max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(curve, oracle, strict=True)) for i in (0, 1)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_precision_gives_the_cpus_curve(gpu, oracle, stage, precision):
    curve = gpu.run(train_curve, recipe(), deepspeed_json(stage, precision))[0]
    loss, norm = differences(curve, oracle)
    assert loss < BANDS[precision][0]
    assert norm < BANDS[precision][1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_pytorch_gives_the_cpus_curve(oracle, precision):
    job = Job(Ranks(0, 0, 1, 1), torch.device("cuda", 0))
    curve = train_curve(job, recipe(engine={"precision": precision}), None)
    loss, norm = differences(curve, oracle)
    assert loss < BANDS[precision][0]
    assert norm < BANDS[precision][1]


def test_a_stop_is_believed_two_steps_later_on_every_rank():
    agreement = StopAgreement(torch.device("cuda", 0))
    votes = [torch.tensor(float(step >= 1), device="cuda") for step in range(5)]
    assert [agreement.submit(vote) for vote in votes] == [False, False, False, True, True]


def test_the_device_is_known():
    assert describe_device(torch.device("cuda", 0)).fp16
    assert peak_flops("NVIDIA H200", "bf16") == pytest.approx(989.5e12)
