"""Settings that cannot work together are refused by --dry-run with a reason; the alternative named works."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from support import tiny

from pipeline.cli.train import main
from pipeline.config.split import Device
from pipeline.config.split_conflicts import RULES, format_rules_table
from pipeline.distributed.process_group import describe_device
from pipeline.errors import ConfigError

LANGUAGE = {"model.num_heads": 4, "model.num_layers": 4, "model.hidden_size": 64, "data.sequence_length": 64}
TENSOR = "ds.tensor_parallel.autotp_size"
SEQUENCE = "ds.sequence_parallel_size"
STAGES = "ds.pipeline.stages"
STAGE = "ds.zero_optimization.stage"
OPTIMIZER = "ds.zero_optimization.offload_optimizer.device"
PARAMETERS = "ds.zero_optimization.offload_param.device"
HPZ = "ds.zero_optimization.zero_hpz_partition_size"
QUANTIZED = "ds.zero_optimization.zero_quantized_weights"
OFFLOAD = "ds.zero_optimization.offload_optimizer"
KV = "model.num_key_value_heads"
KIND = "optimizer.kind"
GROUPS = "optimizer.groups"
ACCUMULATION = "ds.data_types.grad_accum_dtype"
BF16 = "ds.bf16.enabled"
MASTERS = "ds.bf16.bf16_master_weights_and_grads"
STATES = "ds.bf16.bf16_optimizer_states"
ROUTERS = "model.extra.output_router_logits"
COMPILE = "ds.compile.enabled"
NVME = {OPTIMIZER: "nvme", f"{OFFLOAD}.nvme_path": "/tmp"}
CNN = {"model.kind": "cnn", "data.kind": "digits"}

# For each rule, in order: what breaks it (with the ranks), and the change that its last column names.
EXAMPLES = [
    (2, {"engine.parallel": "dp"}, {"engine.parallel": "ddp"}),
    (2, {STAGES: 2, STAGE: 2}, {STAGE: 1}),
    (4, {STAGES: 2, TENSOR: 2, STAGE: 1}, {STAGES: 1}),
    (2, {STAGES: 2, STAGE: 1, OPTIMIZER: "cpu"}, {STAGES: 1, STAGE: 3}),
    (2, {TENSOR: 2, **CNN}, {TENSOR: 1, STAGE: 3}),
    (3, {TENSOR: 3, STAGE: 1}, {TENSOR: 1}),
    (2, {SEQUENCE: 2, KV: 3, "model.num_heads": 6, "model.hidden_size": 96}, {KV: 1}),
    (2, {SEQUENCE: 2, "data.sequence_length": 63}, {"data.sequence_length": 64}),
    (2, {SEQUENCE: 2, "model.attention": "eager"}, {"model.attention": "auto"}),
    (2, {STAGES: 2, STAGE: 1, "objective.kind": "kto", "data.kind": "preference"}, {STAGES: 1}),
    (2, {STAGES: 2, STAGE: 1, ROUTERS: True}, {STAGES: 1}),
    (8, {STAGES: 8, STAGE: 1}, {STAGES: 4}),
    (1, {ACCUMULATION: "fp32", BF16: True, STAGE: 0}, {STAGE: 1}),
    (2, {ACCUMULATION: "fp32", BF16: True, STAGE: 1, SEQUENCE: 2}, {STAGE: 2}),
    (
        1,
        {"engine.parallel": "dp", "batch.micro_batch_size": "auto", "batch.global_batch_size": 8},
        {"engine.parallel": "ddp"},
    ),
    (2, {COMPILE: True, TENSOR: 2, STAGE: 1}, {TENSOR: 1}),
    (2, {"model.fp8": "tensorwise", TENSOR: 2, STAGE: 1}, {TENSOR: 1, STAGE: 3}),
    (2, {"adapter.quantize": "nf4", STAGE: 3}, {STAGE: 2}),
    (1, {PARAMETERS: "cpu", STAGE: 2}, {STAGE: 3}),
    (1, {OPTIMIZER: "cpu", STAGE: 0}, {STAGE: 1}),
    (1, {KIND: "adafactor", STAGE: 1}, {KIND: "sgd"}),
    (1, {KIND: "sgd", OPTIMIZER: "cpu", f"{OFFLOAD}.ratio": 0.5, STAGE: 3}, {f"{OFFLOAD}.ratio": 1.0}),
    (1, {OPTIMIZER: "nvme", STAGE: 3}, {f"{OFFLOAD}.nvme_path": "/tmp"}),
    (1, {"ds.prescale_gradients": True, STAGE: 2}, {"ds.zero_optimization.reduce_scatter": False}),
    (1, {MASTERS: True, STATES: True, BF16: False, STAGE: 2}, {BF16: True}),
    (1, {MASTERS: True, STATES: True, BF16: True, ACCUMULATION: "fp32", STAGE: 1}, {STAGE: 2}),
    (1, {MASTERS: True, BF16: True, STAGE: 2}, {OPTIMIZER: "cpu"}),
    (1, {STATES: True, BF16: True, STAGE: 2}, {MASTERS: True}),
    (
        1,
        {"ds.fp16.enabled": True, STAGE: 1, "watch.on_nonfinite": "stop"},
        {"watch.on_nonfinite": "skip"},
    ),
    (1, {STAGE: 1, "watch.on_nonfinite": "rollback"}, {"checkpoint.every": 5}),
    (1, {**NVME, f"{OFFLOAD}.pipeline_read": True, STAGE: 3}, {f"{OFFLOAD}.pipeline_read": False}),
    (2, {HPZ: 2, STAGE: 2}, {STAGE: 3}),
    (3, {HPZ: 2, STAGE: 3}, {HPZ: 3}),
    (1, {QUANTIZED: True, STAGE: 3}, {QUANTIZED: False}),
]


# The other ways to break a rule of several parts.
MORE = [
    (4, {TENSOR: 2, SEQUENCE: 2, STAGE: 1}, "two of pipeline stages, tensor and sequence"),
    (2, {TENSOR: 2, ROUTERS: True, STAGE: 1}, "`model.extra.output_router_logits` with pipeline"),
    (3, {SEQUENCE: 3}, "ranks that do not divide the heads"),
    (1, {COMPILE: True, STAGE: 3, PARAMETERS: "nvme"}, "`compile` with tensor or sequence"),
    (2, {"model.fp8": "tensorwise", "adapter": "lora", STAGE: 1}, "`model.fp8` with tensor parallelism or"),
    (1, {**NVME, STAGE: 2}, "`offload_optimizer` to NVMe, without ZeRO 3"),
    (
        1,
        {GROUPS: [{"patterns": ["*_proj.*"], "kind": "muon"}], STAGE: 2},
        "or several kinds, with ZeRO 1 to 3",
    ),
    (1, {"ds.gradient_predivide_factor": 8.0, STAGE: 3}, "or `gradient_predivide_factor` with ZeRO 3"),
    (1, {f"{OFFLOAD}.ratio": 0.5, OPTIMIZER: "cpu", STAGE: 2}, "`offload_optimizer.ratio` below 1"),
    (1, {"ds.fp16.fp16_master_weights_and_grads": True, "ds.fp16.enabled": True, STAGE: 0}, "without ZeRO"),
]


def dry_run(capsys, tmp_path, ranks, choice):
    """Exit code and what is printed for the default recipe with these choices."""
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    choice = {**(LANGUAGE if "model.kind" not in choice else {}), **choice}
    split = [] if any(key.startswith("engine.") for key in choice) else ["--deepspeed", str(file)]
    recipe = tmp_path / "recipe.yaml"
    sections = {
        "model": {"kind": choice.pop("model.kind", "causal_lm")},
        "data": {"kind": choice.pop("data.kind", "text")},
    }
    if sections["data"]["kind"] in ("text", "preference"):
        sections["model"]["architecture"], sections["data"]["paths"] = "llama", ["notes"]
    recipe.write_text(json.dumps({"max_steps": 1, **sections}))
    overrides = [f"{key}={json.dumps(value)}" for key, value in choice.items()]
    code = main(["--dry-run", "--config", str(recipe), *split, "--world-size", str(ranks), *overrides])
    return code, capsys.readouterr()


def test_every_rule_has_an_example():
    assert len(EXAMPLES) == len(RULES)


@pytest.mark.parametrize(
    ("rule", "example"), zip(RULES, EXAMPLES, strict=True), ids=lambda x: getattr(x, "combination", "")
)
def test_a_rule_refuses_with_its_reason_and_a_way_out_that_works(capsys, tmp_path, rule, example):
    ranks, broken, mended = example
    code, printed = dry_run(capsys, tmp_path, ranks, broken)
    assert code == 2
    assert printed.err.count("\n") == 1
    assert f"{rule.combination}: {rule.reason}; use {rule.alternative}" in printed.err
    code, printed = dry_run(capsys, tmp_path, ranks, broken | mended)
    assert code == 0, printed.err


@pytest.mark.parametrize(("ranks", "choice", "words"), MORE)
def test_every_part_of_a_rule_refuses(capsys, tmp_path, ranks, choice, words):
    code, printed = dry_run(capsys, tmp_path, ranks, choice)
    assert code == 2
    assert words in printed.err


def test_the_document_holds_the_same_table():
    from support.launch import ROOT

    assert format_rules_table() in (ROOT / "docs" / "reference" / "splits.md").read_text()


@pytest.mark.parametrize(("ranks", "choice"), [(3, {TENSOR: 2}), (6, {STAGES: 4}), (2, {SEQUENCE: 4})])
def test_degrees_that_do_not_divide_the_ranks_name_a_number_that_does(capsys, tmp_path, ranks, choice):
    code, printed = dry_run(capsys, tmp_path, ranks, choice)
    assert code == 2
    needed = next(iter(choice.values()))
    assert f"needs a multiple of {needed} ranks, and this job has {ranks}; start " in printed.err


def test_a_group_of_the_optimizers_own_kind_is_no_second_optimizer(capsys, tmp_path):
    groups = [{"patterns": ["*_proj.*"], "kind": "adamw", "learning_rate_factor": 0.5}]
    code, printed = dry_run(capsys, tmp_path, 1, {GROUPS: groups, STAGE: 2})
    assert code == 0, printed.err


FP8 = {"model": tiny.recipe()["model"] | {"fp8": "rowwise"}}


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_for_gpus_that_have_it(monkeypatch, capability, has):
    """An A100 and an L40S or H100, by what torch says of one, and a CPU, which emulates it."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = describe_device(torch.device("cuda:0"))
    settings = tiny.settings(tiny.recipe(**FP8), None)
    settings.resolve(1, Device.cpu())
    if has:
        settings.resolve(1, gpu)
        return
    with pytest.raises(ConfigError, match=r"GPU does not multiply in fp8, .* set model\.fp8=none") as raised:
        settings.resolve(1, gpu)
    assert "\n" not in str(raised.value)
    tiny.settings(tiny.recipe(), None).resolve(1, gpu)


@pytest.mark.parametrize(
    ("changes", "library"), [(FP8, "torchao"), ({"adapter": {"quantize": "nf4"}}, "bitsandbytes")]
)
def test_a_library_that_is_not_there_is_named_with_how_to_install_it(monkeypatch, changes, library):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, library, raising=False)
    with pytest.raises(ConfigError, match=f"needs {library}, which is not installed: pip install"):
        tiny.settings(tiny.recipe(**changes), None).resolve(1, Device.cpu())
