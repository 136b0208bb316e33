"""The DeepSpeed JSON: its text, its keys, its values, and what does not go together."""

from __future__ import annotations

from typing import Any

from bad_inputs.case import Case


def split(wrong: str, tree: Any, *says: str, **given: Any) -> Case:
    """A file that is wrong: the error names it."""
    return Case(wrong, ["split.json", *says], split=tree, **given)


TEXTS = [
    split("a split that is empty", "", "not valid JSON"),
    split("a split cut off", '{"zero_optimization": {', "not valid JSON"),
    split("a split with a comment", '{\n// two\n"bf16": {}}', ":2:1", "not valid JSON"),
    split("a split in single quotes", "{'bf16': {}}", ":1:2", "not valid JSON"),
    split("a split in latin-1", '{"caf\xe9": 1}'.encode("latin-1"), "not UTF-8"),
    split("a key of the split given twice", '{"bf16": {}, "bf16": {}}', "bf16", "given twice"),
]

TYPOS = [
    split("typo at the top of the split", {"zero_optimisation": {}}, 'did you mean "zero_optimization"'),
    split("typo in fp16", {"fp16": {"enabled": True, "loss_scal": 0}}, "fp16.loss_scal", '"loss_scale"'),
    split(
        "typo in offload_optimizer",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise",
        'did you mean "device"',
    ),
    split("typo in tensor_parallel", {"tensor_parallel": {"autotp_sizes": 2}}, 'did you mean "autotp_size"'),
    split(
        "typo in the optimizer's parameters",
        {"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}},
        "optimizer.params.lrr",
    ),
    split(
        "typo in the scheduler's parameters",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "scheduler.params.warmup_steps",
    ),
]

VALUES = [
    split(
        "a bucket below zero",
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}},
        "reduce_bucket_size",
    ),
    split(
        "an unknown device to offload to",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}},
        "device",
    ),
    split(
        "NVMe without a path",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "nvme_path",
    ),
    split("stage 4", {"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "given 4"),
    split("bf16 is true", {"bf16": True}, "bf16", "expected an object"),
    split("both half precisions", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
    split("compile in words in the file", {"compile": {"enabled": "yes"}}, "compile.enabled", "given 'yes'"),
    split(
        "an optimizer that is not built",
        {"optimizer": {"type": "Lion"}},
        "optimizer.type",
        "'Lion'",
        "expected adam, adamw",
    ),
    split(
        "a scheduler that is not built",
        {"scheduler": {"type": "OneCycle"}},
        "scheduler.type",
        "schedule.kind in the recipe",
    ),
    split(
        "parameters of the optimizer as a list",
        {"optimizer": {"type": "AdamW", "params": [1]}},
        "optimizer.params",
        "expected an object",
    ),
]

REMOVED = [
    split("amp", {"amp": {"enabled": True}}, "amp", "use bf16 or fp16"),
    split("the csv monitor", {"csv_monitor": {"enabled": True}}, "metrics.jsonl holds every number"),
    split("expert parallelism", {"expert_parallel": {"size": 2}}, "does not split experts"),
    split(
        "zenflow", {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "no run could go on"
    ),
    split(
        "weights in 8 bits", {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, "export"
    ),
]

TOGETHER = [
    split(
        "an optimizer's rate against the recipe's",
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        "optimizer.params.lr is 0.001",
        "0.1",
        'write "auto" here',
        recipe={"optimizer.learning_rate": 0.1},
    ),
    split(
        "a batch against the recipe's",
        {"train_batch_size": 16},
        "train_batch_size is 16",
        "is 4",
        'write "auto" here',
    ),
    Case(
        "an engine section beside the JSON",
        ["recipe.yaml:", "engine", "the JSON decides the precision"],
        split={"bf16": {"enabled": False}},
        recipe={"engine": {"precision": "bf16"}},
    ),
    split(
        "torch beside zero", {"torch": {}, "zero_optimization": {"stage": 1}}, "torch", "zero_optimization"
    ),
    split(
        "torch beside an engine",
        {"torch": {"parallel": "ddp"}},
        "torch",
        "engine section too",
        recipe={"engine": {"precision": "bf16"}},
    ),
    split("torch in fp16", {"torch": {}, "fp16": {"enabled": True}}, "fp16.enabled", "ds_configs/"),
    split(
        "gradients scaled beforehand at stage 3",
        {"zero_optimization": {"stage": 3}, "prescale_gradients": True},
        "DeepSpeed does not scale gradients beforehand",
        "zero_optimization.stage 1",
        more=["--dry-run"],
    ),
    split(
        "a batch in quotes",
        {"train_batch_size": "4"},
        "train_batch_size: expected a whole number",
        "given '4'",
    ),
    split(
        "axolotl's compile",
        {"compile": {"disable": False, "backend": "inductor"}},
        "compile.disable",
        'write "compile": {"enabled": true}',
    ),
    split("more stages than ranks", {"pipeline": {"stages": 2}}, "pipeline", "2"),
    split(
        "tensors over more than all ranks", {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "2"
    ),
    split(
        "a pipeline under ZeRO 2",
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}},
        "pipeline",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "a pipeline of a cnn",
        {"pipeline": {"stages": 2}},
        "pipeline",
        base="digits",
        more=["--dry-run", "--world-size", "2"],
    ),
    split(
        "parameters offloaded under ZeRO 2",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_param",
    ),
    split(
        "tensor and pipeline that do not divide",
        {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
        "3",
        more=["--dry-run", "--world-size", "3"],
    ),
    Case(
        "a batch that does not divide over four ranks",
        ["6", "4", "global_batch_size"],
        split={},
        more=["--dry-run", "--world-size", "4", "batch.global_batch_size=6"],
    ),
]

CASES = [*TEXTS, *TYPOS, *VALUES, *REMOVED, *TOGETHER]
