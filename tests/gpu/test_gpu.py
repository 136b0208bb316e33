"""Tests that need a CUDA device: every engine on it against PyTorch on the CPU (python -m pytest -m gpu)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from parity.measure import largest_difference, missing, oracle, train
from parity.splits import cases
from support.launch import DIGITS, ROOT, TORCHRUN, TRAIN, write_recipe
from support.rank_pool import RankPool

from pipeline.distributed.process_group import describe_device
from pipeline.distributed.stopping import STOP_FLAG, FlagReader
from pipeline.distributed.watchdog import _read_flight_recorders
from pipeline.monitoring.metrics import MemoryMeter
from pipeline.planner.hardware import peak_flops

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
    got = gpu.run(train, case.recipe, case.json)[0]
    expected = oracle(case)
    assert largest_difference(got.losses, expected.losses) < BANDS[case.precision][0]
    assert largest_difference(got.grad_norms, expected.grad_norms) < BANDS[case.precision][1]


def test_a_stop_is_believed_two_steps_later_on_every_rank():
    flag_reader = FlagReader(torch.device("cuda", 0))
    summed = [torch.tensor(float(STOP_FLAG * (step >= 1)), device="cuda") for step in range(5)]
    assert [flag_reader.read(flags).stop for flags in summed] == [False, False, False, True, True]


def test_the_device_is_known():
    assert describe_device(torch.device("cuda", 0)).fp16
    assert peak_flops("NVIDIA H200", "bf16") == pytest.approx(989.5e12)


def recorded_all_reduce(job):
    dist.all_reduce(torch.ones(3, device=job.device))
    torch.cuda.synchronize()
    return [entry["profiling_name"] for entry in _read_flight_recorders(only_active=False)["entries"]]


def test_hang_verdicts_know_what_nccl_is_in(gpu):
    assert "nccl:all_reduce" in gpu.run(recorded_all_reduce)[0]


def test_two_ranks_have_no_gpu_between_them(tmp_path):
    """Each by itself sees one GPU and takes it, as under srun --gpus-per-task=1, but here it is the same."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    training = [TRAIN, "--config", str(write_recipe(tmp_path, **DIGITS))]
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", "2", *training]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": index}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert "ranks 0, 1 on" in done.stderr
    assert "share one GPU" in done.stderr
    ours, torchrun, _ = done.stderr.partition("torch/distributed/elastic")
    assert torchrun
    assert "Traceback" not in ours


DIES = """
import torch

class Dies(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, torch.nn.Linear(2, 2)

    def forward(self, inputs):
        if self.how == "memory":
            torch.empty(2**44, dtype=torch.uint8, device=inputs.device)
        else:
            self.linear.weight[torch.full((3,), 7, device=inputs.device)].sum().item()
        return self.linear(inputs)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("memory", 12, r"out of memory on cuda:0 .* asked for 16\S+ \S+, of \S+ GiB in all"),
        ("index", 14, "cuda:0 failed"),
    ],
)
def test_a_run_that_dies_of_the_device_says_so_in_one_line(tmp_path, how, code, said):
    """The message of a real CUDA error; tests on a CPU only have copies of it."""
    (tmp_path / "dies.py").write_text(DIES)
    recipe = write_recipe(
        tmp_path,
        model={"kind": "dies:Dies", "args": {"how": how}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, TRAIN, "--config", str(recipe)]
    variables = os.environ | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cuda"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == code, done.stderr
    assert re.search(said, done.stderr)
    assert "Traceback" not in done.stderr


def test_peaks_of_memory_are_those_since_the_last_row():
    meter = MemoryMeter(torch.device("cuda", 0))
    meter.read_and_reset()
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del held
    high = meter.read_and_reset()
    low = meter.read_and_reset()
    assert high["memory/peak_allocated_gib"] >= 0.25 + low["memory/peak_allocated_gib"]
    assert high["memory/peak_reserved_gib"] >= 0.25
    assert low["memory/alloc_retries"] == 0
