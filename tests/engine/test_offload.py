"""Optimizer state and parameters in host memory or on a disk: the same curve, steps skipped, runs resumed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.launch import ROOT, launch, write_recipe
from support.tiny import TOLERANCES, deepspeed_json, recipe, train_curve

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = OPTIMIZER | {"offload_param": {"device": "cpu"}}
STEPS = 8
# DeepSpeed swaps what has a megabyte on a rank, and keeps the rest in memory.
LARGE = recipe()["model"] | {"num_layers": 1, "hidden_size": 128, "intermediate_size": 8192}


@cache
def oracle(large: bool = False) -> list[tuple[float, float]]:
    model = {"model": LARGE} if large else {}
    return train_curve(ALONE, recipe(batch={"micro_batch_size": 8}, **model), None, steps(large))


def steps(large: bool) -> int:
    return 5 if large else STEPS


def hold_to_oracle(curve, precision: str, large: bool = False) -> None:
    for column, band in enumerate(TOLERANCES[precision]):
        expected = oracle(large)
        assert max(abs(a[column] / b[column] - 1) for a, b in zip(curve, expected, strict=True)) < band


@pytest.mark.daily("zero3")
@pytest.mark.parametrize(
    "zero",
    [
        {"offload_optimizer": {"device": "cpu", "pin_memory": False}, "sub_group_size": 1000},
        {"offload_optimizer": {"device": "cpu", "pipeline_read": True, "pipeline_write": True}},
        {"offload_optimizer": {"device": "cpu", "buffer_count": 8, "fast_init": True}},
        OPTIMIZER | {"offload_param": {"device": "cpu", "pin_memory": False, "max_in_cpu": 1000}},
    ],
)
def test_other_keys_change_no_number(ranks, zero):
    hold_to_oracle(ranks(2).run(train_curve, recipe(), deepspeed_json(3, **zero), STEPS)[0], "fp32")


def has_async_io(job: Job) -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@pytest.fixture
def on_disk(ranks, tmp_path):
    """`on_disk(optimizer, parameters)`: a ZeRO-3 section that swaps these to a disk."""
    if not ranks(1).run(has_async_io)[0]:
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")

    def section(optimizer: bool = True, parameters: bool = True):
        disk = {"device": "nvme", "nvme_path": str(tmp_path / "disk")}
        zero = {"sub_group_size": 1_000_000}
        if optimizer:
            zero["offload_optimizer"] = dict(disk)
        if parameters:
            zero["offload_param"] = disk | {"buffer_size": 2_000_000, "buffer_count": 5}
        return zero

    return section


@pytest.mark.daily("parameters")
@pytest.mark.parametrize(
    ("optimizer", "parameters"),
    [
        (True, False),
        (False, True),
    ],
    ids=["optimizer", "parameters"],
)
def test_one_of_the_two_on_a_disk(ranks, on_disk, optimizer, parameters):
    json = deepspeed_json(3, **on_disk(optimizer, parameters))
    curve = ranks(2).run(train_curve, recipe(model=LARGE), json, steps(True), timeout=580)[0]
    hold_to_oracle(curve, "fp32", large=True)


@pytest.mark.nightly
def test_without_a_compiler_torchs_adamw_takes_its_place(tmp_path):
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2_offload.json")]
    result = launch(
        "--config",
        str(write_recipe(tmp_path)),
        *split,
        CXX="/nowhere/c++",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("CPU Adam cannot be built (") == 1
