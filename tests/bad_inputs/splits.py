"""The DeepSpeed JSON: its text, its keys, its values, and what does not go together."""

from __future__ import annotations

from typing import Any

from bad_inputs.case import Case


def split(wrong: str, tree: Any, *says: str, **given: Any) -> Case:
    """Write a wrong file, which the error must name."""
    return Case(wrong, ["split.json", *says], split=tree, **given)


TEXTS = [
    split("a split in single quotes", "{'bf16': {}}", ":1:2", "not valid JSON"),
    split("a split in latin-1", '{"caf\xe9": 1}'.encode("latin-1"), "not UTF-8"),
]

KEYS = [
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
        "tensor and pipeline that do not divide",
        {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
        "3",
        more=["--dry-run", "--world-size", "3"],
    ),
]

CASES = [*TEXTS, *KEYS, *TOGETHER]
