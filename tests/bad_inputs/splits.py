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

KEYS = [
    split("typo at the top of the split", {"zero_optimisation": {}}, 'did you mean "zero_optimization"'),
    split(
        "typo in offload_optimizer",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise",
        'did you mean "device"',
    ),
    split(
        "zenflow", {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "no run could go on"
    ),
    split("both half precisions", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
    split(
        "an optimizer that is not built",
        {"optimizer": {"type": "Lion"}},
        "optimizer.type",
        "'Lion'",
        "expected adam, adamw",
    ),
]

TOGETHER = [
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

CASES = [*TEXTS, *KEYS, *TOGETHER]
