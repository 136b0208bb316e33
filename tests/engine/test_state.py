"""Shards of an engine are the whole model, once; any other engine resumes from them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from parity.splits import FUSED, GPT2, LLAMA, PHI3, QWEN2, WIDE, zero
from support.resume_across_splits import (
    SPLITS,
    GatheredShards,
    Run,
    Split,
    check_resume,
    make_recipe,
    run_on_split,
    train_and_save,
)
from torch import nn

from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError

pytestmark = pytest.mark.slow


class Odd(nn.Module):
    """A model with what language models rarely have: frozen parameters, statistics, another memory format."""

    def __init__(self, width: int):
        super().__init__()
        self.words = nn.Embedding(257, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(1))
        self.mixed = nn.Conv2d(width, 8, (3, 1), padding=(1, 0))
        self.head = nn.Linear(8, 257)
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        x_BDT = self.norm(self.frozen(self.words(input_ids)).transpose(1, 2)) * self.scale
        x_BTD = self.mixed(x_BDT[..., None])[..., 0].transpose(1, 2)
        return {"logits": self.head(x_BTD)}


def odd(width: int, channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    return Odd(width).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def odd_model(width: int = 16, channels_last: bool = False) -> dict[str, Any]:
    return {"kind": "test_state:odd", "args": {"width": width, "channels_last": channels_last}}


FP32 = [
    name
    for name, split in SPLITS.items()
    if not {"bf16", "fp16"} & split.json.keys() and split.world_size < 4 and "nvme" not in name
]
HALF_PRECISION = [
    name for name, split in SPLITS.items() if {"bf16", "fp16"} & split.json.keys() and "nvme" not in name
]


def pairs(*names: tuple[str, str]):
    for saved, resumed in dict.fromkeys(names):
        yield pytest.param(SPLITS[saved], SPLITS[resumed], id=f"{saved}-to-{resumed}")


@pytest.mark.daily(
    *("ddp-to-zero2", "zero2-to-zero3-1", "zero3-to-plain", "zero3-all-cpu-to-pipeline-zero0"),
    *("tensor-zero1-to-sequence-zero2", "zero2-to-zero2", "zero3-all-cpu-to-zero3-all-cpu"),
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    pairs(
        *zip(FP32, FP32[5:] + FP32[:5], strict=True),
        *((name, name) for name in FP32),
        *((name, "zero2") for name in FP32),
        *(("zero3", name) for name in FP32),
        ("tensor-4", "pipeline-4"),
        ("pipeline-4", "tensor-4"),
    ),
)
def test_another_split_goes_on_as_if_nothing_was(ranks, saved, resumed):
    check_resume(ranks, saved, resumed)


@pytest.mark.daily(
    *("zero2-search-to-zero2-search", "pipeline-zero1-bf16-to-pipeline-zero1-bf16"),
    *("zero3-bf16-to-zero3-bf16", "zero0-fp16-to-zero3-fp16"),
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    pairs(
        *((name, name) for name in HALF_PRECISION),
        ("zero1", "zero3-bf16"),
        ("plain-bf16", "zero2-bf16"),
        ("zero3-bf16", "pipeline-zero1-bf16"),
        ("pipeline-zero1-bf16", "zero0-bf16"),
        ("zero0-bf16", "tensor-zero0-bf16"),
        ("zero1-bf16", "zero2"),
        ("zero0-fp16", "zero3-fp16"),
        ("zero3-search", "zero0-search"),
        ("zero1-search", "zero3-search"),
        ("zero3-fp16", "ddp"),
        ("zero2-bf16", "zero1-fp16"),
    ),
)
def test_masters_carry_over_between_precisions(ranks, saved, resumed):
    check_resume(ranks, saved, resumed, tolerance=5e-3)


@pytest.mark.daily("nvme-to-zero2")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    pairs(
        ("nvme", "nvme"),
        ("nvme", "zero2"),
        ("zero1", "nvme"),
        ("nvme-bf16", "nvme-bf16"),
        ("nvme", "nvme-1"),
        ("nvme-2-groups", "nvme-2-groups"),
    ),
)
def test_what_lies_on_a_disk_is_kept_too(ranks, saved, resumed):
    check_resume(ranks, saved, resumed, model=WIDE, rate=3e-4)


@pytest.mark.daily("zero1")
@pytest.mark.parametrize(
    "name",
    ["plain", "zero0-bf16", "zero1", "zero2-cpu", "zero3", "zero3-bf16", "zero3-hpz", "pipeline-zero1"],
)
def test_an_engine_that_has_run_lets_go_of_what_it_had(ranks, name):
    check_resume(ranks, SPLITS[name], SPLITS[name], before=2)


TIED_LLAMA = LLAMA | {"extra": {"tie_word_embeddings": True}}
SPLITS |= {
    f"fused-zero{stage}": Split(
        zero(stage) | {"tensor_parallel": {"autotp_size": 2, "partition_config": FUSED}}
    )
    for stage in (0, 2)
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "cut"),
    [
        pytest.param(GPT2, "pipeline-zero1", id="gpt2-pipeline"),
        pytest.param(GPT2, "pipeline-zero0", id="gpt2-pipeline-zero0"),
        pytest.param(TIED_LLAMA, "tensor-zero1", id="tied-tensor"),
        pytest.param(QWEN2, "tensor-zero3", id="qwen2-tensor"),
        pytest.param(QWEN2, "pipeline-zero1", id="qwen2-pipeline"),
        pytest.param(PHI3, "fused-zero2", id="phi3-tensor"),
        pytest.param(PHI3, "fused-zero0", id="phi3-tensor-zero0"),
    ],
)
def test_tied_fused_and_biased_weights(ranks, model, cut):
    check_resume(ranks, SPLITS[cut], SPLITS["plain"], model)
    check_resume(ranks, SPLITS["zero3"], SPLITS[cut], model)
    check_resume(ranks, SPLITS[cut], SPLITS[cut], model)


@pytest.mark.daily("zero2-zero2", "zero3-plain")
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        *((name, name) for name in ("plain", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3-all-cpu")),
        ("ddp", "zero3"),
        ("zero3", "plain"),
        ("zero3-all-cpu", "zero1"),
        ("zero2", "zero3-all-cpu"),
        ("zero1-bf16", "zero1-bf16"),
        ("zero3-bf16", "zero3-bf16"),
    ],
)
def test_frozen_parameters_and_statistics(ranks, saved, resumed):
    check_resume(ranks, SPLITS[saved], SPLITS[resumed], odd_model(), tolerance=1e-5)


@pytest.mark.daily("ddp-plain")
@pytest.mark.parametrize(("saved", "resumed"), [("plain", "plain"), ("ddp", "plain"), ("plain", "ddp")])
def test_another_memory_format(ranks, saved, resumed):  # DeepSpeed takes none
    check_resume(ranks, SPLITS[saved], SPLITS[resumed], odd_model(channels_last=True), tolerance=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("saved", "resumed"), [("nvme-1", "nvme-1"), ("nvme-1", "plain"), ("plain", "nvme-1")]
)
def test_a_frozen_parameter_on_a_disk(ranks, saved, resumed):
    check_resume(ranks, SPLITS[saved], SPLITS[resumed], odd_model(600), tolerance=1e-5)


def refusal(job: Job, tree: dict[str, Any], split: dict[str, Any], source: GatheredShards) -> str:
    with pytest.raises(CheckpointError) as caught:
        Run(job, tree, split).engine.restore(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "lacks model.layers.2.input_layernorm.weight"),
        ({"num_layers": 1}, "also has model.layers.1.input_layernorm.weight"),
        (
            {"intermediate_size": 48},
            r"gate_proj.weight: the model has a weight of shape \(48, 32\), and the checkpoint has one of "
            r"shape \(64, 32\)",
        ),
    ],
)
def test_another_models_weights_are_refused(ranks, change, message):
    _, source = train_and_save(ranks, "plain", LLAMA)
    told = run_on_split(ranks, SPLITS["zero1-1"], refusal, make_recipe(LLAMA | change), source)[0]
    assert re.search(message, told)
    assert "\n" not in told
