"""Optimizer state and parameters in host memory or on a disk: the same curve, steps skipped, runs resumed."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from support.launch import ROOT, launch, write_recipe
from support.saved import store_in
from support.tiny import BANDS, deepspeed_json, make_engine, recipe, token_bundle, train_curve
from test_step import good_bad_good

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.objectives import CausalLM

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
    for column, band in enumerate(BANDS[precision]):
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


@pytest.mark.daily("3-zero3-fp32", "3-zero1-bf16")
@pytest.mark.parametrize(
    ("stage", "zero", "precision"),
    [
        (2, OPTIMIZER, "fp32"),
        (3, BOTH, "bf16"),
        (1, OPTIMIZER, "fp16"),
        (3, OPTIMIZER, "fp32"),
    ],
)
def test_a_bad_batch_changes_no_parameter(ranks, stage, zero, precision):
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    arguments = (tree, deepspeed_json(stage, precision, **zero), math.nan)
    unchanged, skipped, moved, finite = ranks(2).run(good_bad_good, *arguments, timeout=500)[0]
    assert unchanged
    assert skipped == 1.0
    assert moved
    assert finite


def four_and_two_and_two(job: Job, tree, deepspeed, folder: str):
    """Losses and norms of four steps, and of two, a checkpoint, and two of a new engine."""
    data = token_bundle()
    batches = [{key: value[None] for key, value in data.train[i].items()} for i in range(4)]

    def train(engine, some):
        results = [engine.train_step([batch], CausalLM(), 1e-2, False) for batch in some]
        return [(float(r.loss_sum), float(r.grad_norm)) for r in results]

    unbroken = train(make_engine(job, tree, deepspeed, data), batches)
    first = make_engine(job, tree, deepspeed, data)
    resumed = train(first, batches[:2])
    store = store_in(folder, job)
    store.save_final(first, {"global_step": 2})
    second = make_engine(job, tree, deepspeed, data)
    assert store.resume(second) == {"global_step": 2}
    store.close()
    return unbroken, resumed + train(second, batches[2:])


@pytest.mark.daily("3-zero3-fp16")
@pytest.mark.parametrize(
    ("stage", "zero", "precision"),
    [
        (2, OPTIMIZER, "bf16"),
        (3, BOTH, "fp32"),
        (1, OPTIMIZER, "fp32"),
        (3, OPTIMIZER, "fp16"),
    ],
)
def test_resumed_equals_unbroken(ranks, tmp_path, stage, zero, precision):
    tree = recipe(batch={"micro_batch_size": 1, "gradient_accumulation_steps": 1})
    json = deepspeed_json(stage, precision, **zero)
    for unbroken, resumed in ranks(2).run(four_and_two_and_two, tree, json, str(tmp_path), timeout=500):
        assert resumed == unbroken


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
    assert result.stderr.count("CPU Adam cannot be built here") == 1
